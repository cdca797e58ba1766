//! Turns the list of ops in `ops.rs` into the enum of ops and everything that goes over all of them.

/// Declares the enum of ops, their names, the module `types`, and `for_each_op!`, which evaluates the same expression
/// for any op. A line of the list is `module::Type = "name" with Part, …;` where the parts are other types that
/// belong to the op.
macro_rules! ops {
    (($d:tt) $($(#[$doc:meta])* $module:ident::$Op:ident = $name:literal
        $(with $($part:ident),+)?;)*) => {
        /// The types of all ops and of their parts, re-exported as [`crate::op`].
        pub mod types {
            pub use super::Op;
            pub use crate::kv::KvLayer;
            $(pub use super::$module::$Op;
            $(pub use super::$module::{$($part),+};)?)*
        }

        use types::{$($Op),*};

        /// One operation. Each variant's contract is in the file of the same name under `ops/`.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(tag = "op", rename_all = "snake_case", bound = "")]
        pub enum Op<O: Operands = Bound> {
            $($(#[$doc])* $Op($Op<O>),)*
        }

        $(impl<O: Operands> Named for $Op<O> {
            const NAME: &'static str = $name;
        }

        impl<O: Operands> From<$Op<O>> for Op<O> {
            fn from(op: $Op<O>) -> Op<O> {
                Op::$Op(op)
            }
        })*

        macro_rules! for_each_op {
            ($d self:expr, $d op:ident => $d body:expr) => {
                match $d self {
                    $(Op::$Op($d op) => $d body,)*
                }
            };
            ($d self:expr, $d op:ident => $d body:expr, again) => {
                match $d self {
                    $(Op::$Op($d op) => Op::$Op($d body),)*
                }
            };
        }
    };
}
