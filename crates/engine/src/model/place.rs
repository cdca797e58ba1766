//! How each weight is stored on a device, and whether a checkpoint has all of them.

use super::LoadError;
use super::weights::WeightSpec;
use device::target::WeightUse;
use device::{DType, Tensor};
use formats::checkpoint::{Checkpoint, TensorInfo};
use formats::tensor_names::{Role, is_ignorable};
use std::collections::BTreeMap;

/// A weight with its place in the arena.
#[derive(Clone, Debug)]
pub struct Placed {
    /// What it is made of.
    pub spec: WeightSpec,
    /// Where it lies.
    pub tensor: Tensor,
}

/// The checkpoint's tensors by role.
pub type Sources<'a> = BTreeMap<Role, &'a TensorInfo>;

/// Finds every tensor the specs need; lists all that is missing, extra or of the wrong shape at once.
pub fn sources<'a>(
    checkpoint: &'a Checkpoint,
    specs: &[WeightSpec],
) -> Result<Sources<'a>, LoadError> {
    let mut found = BTreeMap::new();
    let mut problems = Vec::new();
    let wanted: BTreeMap<Role, Vec<usize>> = specs
        .iter()
        .flat_map(|spec| {
            spec.parts.iter().map(move |part| {
                let shape = match spec.kind {
                    WeightUse::Vector => vec![part.rows],
                    _ => vec![part.rows, spec.cols],
                };
                (part.role, shape)
            })
        })
        .collect();
    for info in checkpoint.tensors() {
        match Role::parse(&info.name).filter(|role| wanted.contains_key(role)) {
            Some(role) => {
                if info.shape != wanted[&role] {
                    problems.push(format!(
                        "{}: shape {:?}, expected {:?}",
                        info.name, info.shape, wanted[&role]
                    ));
                }
                if device_dtype(info.dtype).is_none() {
                    problems.push(format!("{}: type {} cannot be a weight", info.name, info.dtype));
                }
                found.insert(role, info);
            }
            // A tied checkpoint may still carry the head it shares with the embedding.
            None if is_ignorable(&info.name) || Role::parse(&info.name) == Some(Role::LmHead) => {}
            None => problems.push(format!("{}: not part of this model", info.name)),
        }
    }
    for role in wanted.keys().filter(|role| !found.contains_key(role)) {
        problems.push(format!("{}: missing", role.hf_name()));
    }
    match problems.is_empty() {
        true => Ok(found),
        false => Err(LoadError::Tensors { path: checkpoint.path().to_owned(), problems }),
    }
}

/// The device's name for a checkpoint's type, when weights can be of it.
pub fn device_dtype(dtype: formats::dtype::DType) -> Option<DType> {
    use formats::dtype::DType as F;
    Some(match dtype {
        F::F32 => DType::F32,
        F::F16 => DType::F16,
        F::BF16 => DType::BF16,
        F::Q4_0 => DType::Q4_0,
        F::Q4_1 => DType::Q4_1,
        F::Q5_0 => DType::Q5_0,
        F::Q5_1 => DType::Q5_1,
        F::Q8_0 => DType::Q8_0,
        F::Q2_K => DType::Q2K,
        F::Q3_K => DType::Q3K,
        F::Q4_K => DType::Q4K,
        F::Q5_K => DType::Q5K,
        F::Q6_K => DType::Q6K,
        _ => return None,
    })
}
