//! The CUDA device. Lowering an op to launches is a pure function over plain data (`lower`), so that
//! plans can be explained, counted and compiled on a machine without a GPU; only `driver` talks to one.

pub mod launch;
pub mod lower;
