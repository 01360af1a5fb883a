//! A checkpoint and its adapters, as one value.

use super::Adapter;
use super::casts::Which;
use super::patches::{Matching, Patches};
use super::report::MatchReport;
use super::resolve::PackedWeights;
use crate::checkpoint::{Checkpoint, Layout, TensorId};
use crate::dtype::DType;
#[cfg(doc)]
use crate::error::{AdapterFault, CastFault};
use crate::error::{Error, Measured, Result};
use crate::patch::{PatchOutcome, ScalePolicy};
use crate::rounding::Rounding;

/// The weights of a model to load: a checkpoint, and the adapters to merge into it.
///
/// Only headers and the adapters' factors have been read. [`read`](Weights::read) returns one merged tensor;
/// [`Loader::load`](crate::Loader::load) loads all of them onto the devices that a plan gives them.
///
/// ```
/// use tensor_offload::{Adapter, Checkpoint, Matching, Weights};
/// let checkpoint = Checkpoint::open("examples/data/tiny-llama")?;
/// let adapter = Adapter::open("examples/data/tiny-llama-lora", 0.5)?;
/// let weights = Weights::patched(checkpoint, vec![adapter], Matching::Strict)?;
/// println!("{}", weights.report()); // 9 modules applied to 9 tensors …
///
/// let name = "model.layers.0.mlp.down_proj.weight";
/// let tensor = weights.checkpoint().find(name).expect("every Llama has one");
/// let mut merged = vec![0; weights.layout().tensor(tensor).expect("it was just found").bytes as usize];
/// weights.read(tensor, &mut merged)?;
/// # Ok::<(), tensor_offload::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Weights {
    checkpoint: Checkpoint,
    patches: Patches,
    /// Of a checkpoint that is a part of another: the weights of the whole, which decide what becomes of those of the part.
    whole: Option<Box<Weights>>,
}

impl Weights {
    /// A checkpoint without adapters.
    pub fn new(checkpoint: Checkpoint) -> Weights {
        let patches = Patches::none(checkpoint.layout());
        let whole = checkpoint.part().map(|part| Box::new(Weights::new(part.whole().clone())));
        Weights { checkpoint, patches, whole }
    }

    /// A checkpoint with `adapters` merged into it, in this order.
    ///
    /// # Errors
    /// As [`Patches::resolve`].
    pub fn patched(checkpoint: Checkpoint, adapters: Vec<Adapter>, matching: Matching) -> Result<Weights> {
        Weights::resolved(checkpoint, adapters, matching, &PackedWeights::default())
    }

    /// As [`patched`](Weights::patched), but weights that are packed into codes of bitsandbytes (NF4 and FP4) or NVFP4 may be changed
    /// too: their values are computed and changed in f32, their scales are recomputed, and the values are packed again. The
    /// tensors beside such a weight that hold its scales are among those that change.
    ///
    /// That loses about as much as the first packing did, and small changes may vanish; a load reports the error
    /// ([`LoadReport::requantised`](crate::load::LoadReport::requantised)). A block of values that no adapter changes keeps its
    /// codes and its scale, unless a scale that it shares with others has to change. Codes are the nearest ones, whatever the
    /// [`rounding`](Weights::rounding).
    ///
    /// Each tensor of a changed weight is computed from the checkpoint's bytes of all of them, so the arithmetic of the weight is
    /// repeated for each; all work on f32 copies of the weight.
    ///
    /// # Errors
    /// As [`Patches::resolve`]; [`Error::Adapter`] with [`AdapterFault::Codes`] for a packed weight whose codes are not understood, a
    /// tensor of which is missing, or that would be padded; with [`AdapterFault::Packed`] for one of another packing.
    pub fn repacked(checkpoint: Checkpoint, adapters: Vec<Adapter>, matching: Matching) -> Result<Weights> {
        Weights::resolved(checkpoint, adapters, matching, &PackedWeights { repacked: true, deferred: Vec::new() })
    }

    /// As [`patched`](Weights::patched), with the changes of some weights [deferred](Weights::defer): of those that a pattern names, as
    /// factors of the type beside it. A later pattern decides for the weights that several name. Weights that `patched` refuses are
    /// among them, since their codes and scales stay as they are: those that are packed into codes of bitsandbytes (NF4, FP4 and
    /// int8), NVFP4, MXFP4, GPTQ, AWQ, int8, or four or eight bits of compressed-tensors, if the tensors beside the codes say which shape
    /// the values have, and those with a scale that is not understood. What no pattern names is refused still.
    ///
    /// # Errors
    /// As [`patched`](Weights::patched) and [`defer`](Weights::defer).
    pub fn deferred(
        checkpoint: Checkpoint,
        adapters: Vec<Adapter>,
        matching: Matching,
        deferred: &[(impl AsRef<str>, DType)],
    ) -> Result<Weights> {
        Weights::all_deferred((checkpoint, adapters, matching), false, deferred)
    }

    /// As [`deferred`](Weights::deferred). With `repacked`, packed weights that no pattern names are packed again.
    pub(crate) fn all_deferred(
        (checkpoint, adapters, matching): (Checkpoint, Vec<Adapter>, Matching),
        repacked: bool,
        rules: &[(impl AsRef<str>, DType)],
    ) -> Result<Weights> {
        let deferred = rules.iter().map(|(pattern, _)| pattern.as_ref().to_owned()).collect();
        let weights = Weights::resolved(checkpoint, adapters, matching, &PackedWeights { repacked, deferred })?;
        rules.iter().try_fold(weights, |weights, (pattern, dtype)| weights.defer(pattern.as_ref(), *dtype))
    }

    fn resolved(
        checkpoint: Checkpoint,
        adapters: Vec<Adapter>,
        matching: Matching,
        packed: &PackedWeights,
    ) -> Result<Weights> {
        if let Some(part) = checkpoint.part() {
            let whole = Weights::resolved(part.whole().clone(), adapters, matching, packed)?;
            // A head that came to differ from its embedding is a tensor more.
            let untied = whole.patches.with_head().map(|_| part.of_other(&whole.checkpoint)).transpose()?;
            return Weights::part(whole, untied.unwrap_or(checkpoint));
        }
        let patches = Patches::resolve_in(&checkpoint, adapters, matching, packed)?;
        let with_head = patches.with_head().map(|layout| checkpoint.with_layout(layout.clone())).transpose()?;
        let checkpoint = with_head.unwrap_or(checkpoint);
        Ok(Weights { checkpoint, patches, whole: None })
    }

    /// The weights of a part of the checkpoint of `whole`.
    fn part(whole: Weights, checkpoint: Checkpoint) -> Result<Weights> {
        let patches = whole.patches.part(&checkpoint)?;
        Ok(Weights { checkpoint, patches, whole: Some(Box::new(whole)) })
    }

    /// These weights with other patches, which are those of the whole if they are a part.
    fn with(self, change: impl FnOnce(Patches, &Checkpoint) -> Result<Patches>) -> Result<Weights> {
        match self.whole {
            Some(whole) => Weights::part(whole.with(change)?, self.checkpoint),
            None => Ok(Weights { patches: change(self.patches, &self.checkpoint)?, ..self }),
        }
    }

    /// Sets how all tensors that are patched or cast are rounded.
    #[must_use]
    pub fn rounding(mut self, rounding: Rounding) -> Weights {
        self.patches = self.patches.rounding(rounding);
        self.whole = self.whole.map(|whole| Box::new(whole.rounding(rounding)));
        self
    }

    /// Sets whether the scales of patched fp8 weights are kept or recomputed; see [`Patches::scales`].
    ///
    /// # Errors
    /// As [`Patches::scales`].
    pub fn scales(self, policy: ScalePolicy) -> Result<Weights> {
        self.with(|patches, _| patches.scales(policy))
    }

    /// Casts the tensors that `pattern` names to `dtype` while they load. May be called several times; a later call decides for
    /// the tensors that both name. A cast to the type that a tensor has in the checkpoint undoes an earlier one.
    ///
    /// A pattern is one of [`Planner::keep_resident`](crate::Planner::keep_resident), for names of modules and of tensors: `mlp`
    /// and `*.mlp.*` name all tensors of such modules, `*.bias` all biases, and the whole name of a tensor that one. Tensors of
    /// integers, booleans or codes in a named module stay as they are.
    ///
    /// F32, F16, BF16, F8_E4M3 and F8_E5M2 can be cast to one another, and blocks of GGML's types to any of these. A value is
    /// lifted to f32, changed by the adapters, and rounded once, as [`rounding`](Weights::rounding) says; F8_E4M3 and F8_E5M2
    /// saturate beyond their range, which is counted ([`LoadReport::saturated`](crate::load::LoadReport::saturated)), F16 and
    /// BF16 become infinite, and every NaN is stored as one. [`layout`](Weights::layout) has the new types and sizes, so
    /// plans count them. Tensors that share their bytes are of one type: a cast of one of them is a cast of all.
    ///
    /// ```
    /// use tensor_offload::{Checkpoint, DType, Weights};
    /// let weights = Weights::new(Checkpoint::open("examples/data/tiny-llama")?);
    /// let bytes = weights.layout().bytes();
    /// let weights = weights.cast("*", DType::F32)?.cast("mlp", DType::F16)?;
    /// let types = weights.layout().tensors().iter().map(|tensor| tensor.dtype);
    /// assert!(types.eq(weights.layout().tensors().iter().map(|tensor| match tensor.name.contains(".mlp.") {
    ///     true => DType::F16,
    ///     false => DType::F32,
    /// })));
    /// assert!(weights.layout().bytes() > bytes); // the file has bf16
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Missing`] when the pattern names nothing; [`Error::Uncastable`] naming the tensor, with a [`CastFault`]: `dtype` is
    /// none of these types, a tensor is of another floating-point type (F64, say), or all that is named are integers; a tensor holds
    /// codes (a weight with a scale, a packed one) or says what codes stand for.
    pub fn cast(self, pattern: impl Into<String>, dtype: DType) -> Result<Weights> {
        self.cast_all(Which::Named(pattern.into()), dtype)
    }

    /// Casts all tensors of floating-point numbers, blocks of GGML's types among them, to `dtype` while they load, as
    /// [`cast`](Weights::cast) does. Those of integers, booleans or codes in integers stay as they are.
    ///
    /// # Errors
    /// As [`cast`](Weights::cast).
    pub fn cast_floats(self, dtype: DType) -> Result<Weights> {
        self.cast_all(Which::Floats, dtype)
    }

    /// Lets weights in blocks of GGML's types become blocks of the same type again where an adapter changes them: their
    /// values are computed, changed in f32 and [quantised](crate::patch::quantise). That loses more than the first
    /// quantisation did, and small changes may vanish; a [cast](Weights::cast) loses none. Without either, reading or loading
    /// such a weight is an error.
    ///
    /// Codes are the nearest ones, whatever the [`rounding`](Weights::rounding). Weights that are cast are not affected, nor are those
    /// packed into codes, which [`repacked`](Weights::repacked) changes.
    ///
    /// # Errors
    /// [`Error::Unpatchable`] naming a weight whose type values cannot become, with [`AdapterFault::NotWritten`].
    pub fn requantise(self) -> Result<Weights> {
        self.with(|patches, _| patches.requantise())
    }

    /// Leaves the weights that `pattern` names as they are in the file, and keeps what adapters change of them as factors of type
    /// `dtype` (F32, F16 or BF16) beside them: the caller computes `W x + s B (A x)`. May be called several times; a later call decides
    /// for the type of weights that both name. Patterns are those of [`cast`](Weights::cast); what no adapter changes stays as it is.
    ///
    /// So weights in blocks of GGML's types keep every bit that their quantisation left, and adapters every bit of theirs. Any
    /// weight may be deferred: that of another type, too, since the base is then [shared](crate::Loader::derive) between strengths and
    /// adapters. For weights that are packed into codes see [`deferred`](Weights::deferred).
    ///
    /// For `X.weight` of shape [out, in], [`layout`](Weights::layout) has two tensors more in the weight's layer, as the module
    /// `X.lora`: A is `X.lora_A.weight`, [r, in], and B `X.lora_B.weight`, [out, r]. They are planned, placed, streamed and
    /// cached as any others. [`LayerGuard::deferred`](crate::LayerGuard::deferred) and [`Model::deferred`](crate::Model::deferred) give
    /// both with the scale s, a number that is in no tensor. Without rounding, the weight that [`patched`](Weights::patched) gives is
    /// `W + s B A` of the values that W stands for (with its scale, if it has one), both seen as matrices of the first dimension by
    /// all others:
    ///
    /// - All adapters together make one product: r is the sum of their ranks, unless modules for separate rows of a fused
    ///   weight have the same A. The s with the largest magnitude is the scale, and B is made up for the others.
    ///   For a single adapter A and B are its own, rounded once to the nearest, whatever its strength and alpha.
    /// - Of a fused weight of which rows change (q, k and v in one), B has zeros in the other rows.
    /// - Of a convolution, A is [r, in, height, width], a kernel with the stride and padding of the weight's; B is one of one
    ///   element.
    /// - Of a stack of experts [experts, out, in] that are changed one by one, A is [experts, r, in] and B [experts, out, r],
    ///   where r is that of the expert with most and the others have zeros. If the network computes `x W` with it, that is
    ///   `x W + s (x B) A`.
    /// - Of an embedding, row i is `W[i] + s B[i] A`.
    ///
    /// The weight is still cast, if a cast names it, without its changes. The [rounding](Weights::rounding) is not that of the
    /// factors.
    ///
    /// ```
    /// use tensor_offload::{Adapter, Checkpoint, DType, Matching, Weights};
    /// let checkpoint = Checkpoint::open("examples/data/tiny-llama")?;
    /// let adapter = Adapter::open("examples/data/tiny-llama-lora", 0.5)?;
    /// let weights = Weights::patched(checkpoint, vec![adapter], Matching::Strict)?.defer("*", DType::BF16)?;
    /// assert!(weights.patches().iter().next().is_none()); // every tensor of the file stays as it is
    /// for factors in weights.layout().factors() {
    ///     let [w, a, b] = [factors.weight, factors.a, factors.b].map(|tensor| weights.layout().tensor(tensor).unwrap());
    ///     assert_eq!((w.shape[1], w.shape[0], a.shape[0]), (a.shape[1], b.shape[0], b.shape[1]));
    /// }
    /// # assert_eq!(weights.layout().factors().len(), 9);
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Missing`] when the pattern names nothing; [`Error::Unpatchable`] naming the tensor, with an [`AdapterFault`]:
    /// [`NotDeferred`](AdapterFault::NotDeferred) and the kind of change for one that is no product of two factors (DoRA, LoHa, LoKr, GLoRA, OFT, (IA)^3,
    /// whole differences and replacements, padding) or changes a vector (a bias, a norm);
    /// [`FactorType`](AdapterFault::FactorType) for another type; [`FactorRange`](AdapterFault::FactorRange) for a factor that would be infinite
    /// in it; [`FactorName`](AdapterFault::FactorName) when the checkpoint has tensors of the factors' names.
    pub fn defer(self, pattern: impl Into<String>, dtype: DType) -> Result<Weights> {
        let pattern = pattern.into();
        self.with(|patches, checkpoint| patches.defer(checkpoint, pattern, dtype))
    }

    /// Lets a plan keep modules [compressed](crate::Planner::compress) that no file has so, or that adapters change: their codes
    /// are made while the model is loaded. How long they will be is estimated from a few blocks of each tensor, a hundredth too long
    /// rather than too short. What a load does not need is given back, and the [model's plan](crate::Model::plan) has the sizes that
    /// there are. To be called last: what is cast or deferred afterwards is not compressed.
    /// Beside the plan, the load takes host memory for the codes of two modules, for their weights if adapters change them, and for pieces of
    /// 4 MiB, two for each of its workers.
    ///
    /// ```
    /// use tensor_offload::{DType, Machine, Planner, Weights};
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("model.safetensors");
    /// # let specs = [tensor_offload::checkpoint::TensorSpec::new("layers.0.weight", DType::BF16, [512, 512])];
    /// # tensor_offload::checkpoint::write_safetensors(&path, &specs, &Default::default(), |_, out| out.put(&[0x80, 0x3f].repeat(1 << 18)))?;
    /// let weights = Weights::new(tensor_offload::Checkpoint::open(&path)?).compress()?;
    /// let machine = Machine::described(&["cuda:0=24mib,link=25".parse()?, "cpu=64mib".parse()?]);
    /// let planner = Planner::new(weights.layout(), &machine).allocation("cpu,*".parse()?);
    /// let (plain, compressed) = (planner.clone().plan()?, planner.compress(true).plan()?);
    /// assert!(compressed.streamed_bytes() < plain.streamed_bytes() * 7 / 10);
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    ///
    /// # Errors
    /// Any error of reading.
    pub fn compress(mut self) -> Result<Weights> {
        self.patches = self.patches.compress(&self.checkpoint)?;
        Ok(self)
    }

    fn cast_all(self, which: Which, dtype: DType) -> Result<Weights> {
        self.with(|patches, checkpoint| patches.cast(checkpoint, which, dtype))
    }

    /// The unpatched checkpoint. If the [report](Weights::report) tells of an untied head, it has that as a last tensor, with the
    /// embedding's bytes.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// The patches of the tensors that the adapters change or that are cast.
    pub fn patches(&self) -> &Patches {
        &self.patches
    }

    /// The tensors after patching and casting, as they are planned and loaded. The factors of [deferred](Weights::defer) changes are
    /// the last ones; the others have the checkpoint's numbers.
    pub fn layout(&self) -> &Layout {
        self.patches.layout()
    }

    /// How every tensor of the adapters was used.
    pub fn report(&self) -> &MatchReport {
        self.patches.report()
    }

    /// Reads one tensor, merged if an adapter changes it, and cast if it is, or makes a factor. `dst` must be as long as the
    /// tensor of [`layout`](Weights::layout).
    ///
    /// # Errors
    /// [`Error::Missing`] when there is no such tensor; [`Error::WrongSize`] when `dst` is of another length; any error of
    /// reading; as [`TensorPatch::apply`](crate::patch::TensorPatch::apply).
    pub fn read(&self, tensor: TensorId, dst: &mut [u8]) -> Result<PatchOutcome> {
        if let Some((deferral, side)) = self.patches.factor(tensor) {
            let bytes = deferral.bytes(side);
            if bytes.len() != dst.len() {
                let what = Measured::Tensor { name: self.layout().at(tensor).name.clone() };
                return Err(Error::WrongSize { what, needed: bytes.len() as u64, given: dst.len() as u64 });
            }
            dst.copy_from_slice(&bytes);
            return Ok(PatchOutcome::default());
        }
        match self.patches.tensor(tensor) {
            Some(patch) => patch.read(&self.checkpoint, tensor, dst),
            None => self.checkpoint.read(tensor, dst).map(|()| PatchOutcome::default()),
        }
    }
}

impl From<Checkpoint> for Weights {
    fn from(checkpoint: Checkpoint) -> Weights {
        Weights::new(checkpoint)
    }
}
