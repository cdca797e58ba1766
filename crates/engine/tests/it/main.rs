//! The engine from outside, over a device that answers at once.

mod batch;
mod echo;
mod engine;
mod fair;
mod grammar;
mod lists;
mod load;
mod offline;
mod thinking;
