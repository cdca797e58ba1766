//! The operands of ops. In a program they are names of values and weights, in a plan they are tensors. The op types
//! are the same: a program becomes a plan by binding each operand to memory.

use crate::op::{KvLayer, Op};
use crate::ops::Access;
use crate::step::HostInputs;
use crate::{Span, StepState, Tensor};
use serde::de::{DeserializeOwned, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use std::any::TypeId;
use std::fmt;

/// Plain data that can be part of an op.
pub trait Plain: Clone + fmt::Debug + PartialEq + Serialize + DeserializeOwned + 'static {}

impl<T: Clone + fmt::Debug + PartialEq + Serialize + DeserializeOwned + 'static> Plain for T {}

/// The types of an op's operands.
pub trait Operands: Clone + Copy + fmt::Debug + PartialEq + 'static {
    /// Activations.
    type Value: Plain + Copy;
    /// A weight.
    type Weight: Plain + Copy;
    /// A table of rotations.
    type Table: Plain + Copy;
    /// The pages of a cache.
    type Cache: Plain + Copy;
    /// What a layer carries from token to token, of each seat.
    type Carry: Plain + Copy;
    /// Rows that the host gives.
    type Input: Plain + Copy;
    /// Bytes of any kind.
    type Bytes: Plain + Copy;
    /// A field that is known only once the step's size and memory are known.
    type Late<T: Plain>: Plain;
}

/// Operands are tensors in memory: the ops of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound;

impl Operands for Bound {
    type Value = Tensor;
    type Weight = Tensor;
    type Table = Tensor;
    type Cache = KvLayer;
    type Carry = Tensor;
    type Input = Tensor;
    type Bytes = Span;
    type Late<T: Plain> = T;
}

/// Takes the place of a field that is not known yet; omitted from JSON.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unset;

impl Serialize for Unset {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_none()
    }
}

impl<'de> Deserialize<'de> for Unset {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Unset, D::Error> {
        struct Nothing;
        impl Visitor<'_> for Nothing {
            type Value = Unset;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("nothing: this field belongs to plans")
            }
            fn visit_none<E>(self) -> Result<Unset, E> {
                Ok(Unset)
            }
            fn visit_unit<E>(self) -> Result<Unset, E> {
                Ok(Unset)
            }
        }
        // As an option, so that an absent field is accepted.
        from.deserialize_option(Nothing)
    }
}

/// Whether a field is left out of JSON.
pub(crate) fn unset<T: 'static>(_: &T) -> bool {
    TypeId::of::<T>() == TypeId::of::<Unset>()
}

/// An operand of an op, as a visitor gets it.
#[derive(Debug)]
pub(crate) enum Operand<'a, O: Operands> {
    /// A value, and whether it is read or written.
    Value(&'a mut O::Value, Access),
    /// A weight, which is read.
    Weight(&'a mut O::Weight),
    /// A table, which is read.
    #[expect(dead_code, reason = "ops name all operands; no pass asks for tables")]
    Table(&'a mut O::Table),
    /// Pages, which are read or written.
    #[expect(dead_code, reason = "ops name all operands; no pass asks for pages")]
    Cache(&'a mut O::Cache),
    /// A recurrent state, which is read and written.
    #[expect(dead_code, reason = "ops name all operands; no pass asks for recurrent states")]
    Carry(&'a mut O::Carry),
}

/// Called with every operand of an op.
pub(crate) type OperandVisitor<'a, O> = &'a mut dyn FnMut(Operand<'_, O>);

/// Finds the memory of each operand.
pub trait Binder<O: Operands> {
    /// Why an operand has no memory.
    type Error;

    /// Where a value lies.
    fn value(&self, value: O::Value) -> Result<Tensor, Self::Error>;
    /// Where a weight lies.
    fn weight(&self, weight: O::Weight) -> Result<Tensor, Self::Error>;
    /// Where a table lies.
    fn table(&self, table: O::Table) -> Result<Tensor, Self::Error>;
    /// The pages of a cache.
    fn cache(&self, cache: O::Cache) -> Result<KvLayer, Self::Error>;
    /// Where the recurrent states of all seats lie, a row each.
    fn carry(&self, carry: O::Carry) -> Result<Tensor, Self::Error>;
    /// Where rows that the host gives lie.
    fn input(&self, input: O::Input) -> Result<Tensor, Self::Error>;
    /// Where bytes lie.
    fn bytes(&self, bytes: O::Bytes) -> Result<Span, Self::Error>;
    /// The step's tables.
    fn state(&self) -> StepState;
    /// The same as the layers of a cache see them: with the page table of its pages.
    fn state_of(&self, cache: O::Cache) -> StepState;
    /// Rows and tokens of the step.
    fn size(&self) -> StepShape;
    /// Pages that every cache has.
    fn pages(&self) -> u32;
    /// The host's input blocks, if it prepares them.
    fn inputs(&self) -> Option<HostInputs>;
    /// Where tokens of the experts with these weights are counted.
    fn load(&self, experts: O::Weight) -> Option<Span>;
    /// The device-side count of the rows of `value` that matter.
    fn live(&self, value: O::Value) -> Option<Span>;
    /// Whether a row of `value` belongs to a row of the step; else to a token.
    fn by_row(&self, value: O::Value) -> bool;
    /// Whether only the last token of each row of `value` is ever read.
    fn last_only(&self, value: O::Value) -> bool;
    /// Binds the members of a fused op; values between them are in [`crate::Region::Inside`].
    fn members(&self, members: &[Op<O>]) -> Result<Vec<Op>, Self::Error>;
}

/// The size of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepShape {
    /// Rows of the bucket.
    pub rows: u32,
    /// Tokens of the bucket.
    pub tokens: u32,
    /// Tokens of every row of a decode step; 1 for prefill steps, whose rows have any number.
    pub q_len: u32,
    /// Every row has exactly one token.
    pub single: bool,
}
