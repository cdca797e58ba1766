//! Every op on every device against its scalar reference: random shapes, strides, page tables and ragged lengths;
//! outputs are poisoned before each run. A GPU is one more device if there is one.

mod attention;
mod drafts;
mod expert_layer;
mod experts;
mod fixed;
mod ggml;
mod latent;
mod layers;
mod linear;
mod lora;
mod planted;
mod quant;
mod ragged;
mod recurrent;
mod rejected;
mod rows;
mod sample;
mod scaled;
mod step_model;
mod support;
