"""The profile file: measured costs of a model's units and a cluster's links. Data only, no formulas."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sized
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hzplan.core import stages
from hzplan.core.hierarchy import Mesh
from hzplan.core.layout import Dtype, TensorSpec
from hzplan.core.recompute import PARTIAL_WAYS, PartialWay, Way
from hzplan.core.schedule import Use
from hzplan.core.wire import Format
from hzplan.formats.base import (
    Document,
    Fraction,
    Measured,
    NonNegativeInt,
    PositiveInt,
    Rate,
    Strict,
)
from hzplan.formats.parallel import ModelParallel, check_context, data_ranks

MAX_TENSOR_BYTES = 2**44

Phase = Literal["forward", "backward"]
Operation = stages.Operation


class TensorEntry(Strict):
    """A parameter tensor; ``name`` as in the model's state_dict. ``matrix``: whether a matrix optimizer
    updates it as one, or as a stack of them; None: element by element."""

    name: str
    shape: tuple[NonNegativeInt, ...]
    dtype: Dtype
    trainable: bool
    matrix: Literal[True] | None = None

    @property
    def spec(self) -> TensorSpec:
        """The tensor as ``core.layout`` takes it."""
        return TensorSpec(self.name, self.shape, self.dtype, self.trainable, bool(self.matrix))


class UnitEntry(Strict):
    """A module that is unsharded as one: its own tensors, and the units that a use of it needs whole.

    ``requires`` holds the unit itself, the units around it, the owners of weights tied to its own, and those
    that it travels with because it, or they, are small.
    """

    name: str
    module: str
    tensors: tuple[TensorEntry, ...]
    requires: tuple[str, ...]


class RecomputeCost(Strict):
    """The cost of a use where its unit is recomputed: it keeps its forward's inputs only. ``seconds``: added
    to those of the use; bytes replace those of ``UseCost``."""

    seconds: Measured
    retained_bytes: Annotated[int, Field(ge=-(2**52), le=2**52)]
    peak_bytes: NonNegativeInt


class UseCost(Strict):
    """One use of a unit at one micro-batch size, over repeats, ranks and uses of the same kind.

    ``retained_bytes``: memory after the use less memory before it (negative where backward frees);
    ``peak_bytes``: the highest memory inside the use less memory before it; ``spread``: half the distance
    between the quartiles of repeats, over their median. ``straggler_seconds``: how much longer the slowest
    rank takes. ``recompute``: None where the unit cannot be recomputed, or that saves nothing; ``partial``:
    of ways that compute a part of its forward again (``core.recompute``) those that save less for less time.
    """

    micro_batch: PositiveInt
    seconds: Measured
    spread: Fraction
    straggler_seconds: Measured = 0.0
    flops: NonNegativeInt
    retained_bytes: Annotated[int, Field(ge=-(2**52), le=2**52)]
    peak_bytes: NonNegativeInt
    recompute: RecomputeCost | None = None
    partial: dict[PartialWay, RecomputeCost] | None = None

    @property
    def again(self) -> dict[Way, RecomputeCost]:
        """By way the cost of recomputation."""
        partial = self.partial or {}
        found: dict[Way, RecomputeCost] = {way: partial[way] for way in PARTIAL_WAYS if way in partial}
        return found if self.recompute is None else found | {"full": self.recompute}

    def with_again(self, change: Callable[[RecomputeCost], RecomputeCost]) -> UseCost:
        """The same with a change of recomputation's cost, whatever the way."""
        partial = {way: change(cost) for way, cost in (self.partial or {}).items()}
        update = {"recompute": self.recompute and change(self.recompute), "partial": partial or None}
        return self.model_copy(update=update)


class UseEntry(Strict):
    """A unit's module call in one forward or backward pass, in the order recorded.

    ``reads_parameters``: whether it reads parameters; an embedding's backward does not.
    """

    unit: str
    phase: Phase
    reads_parameters: bool = True
    costs: tuple[UseCost, ...]

    @property
    def use(self) -> Use:
        """The use as ``core.schedule`` takes it."""
        return Use(self.unit, self.phase, self.reads_parameters)


class CollectivePoint(Strict):
    """Seconds of a collective whose whole buffer (gathered result, or input of the scatter) has ``bytes``.

    ``processor_seconds``: processor time of all ranks that share processors, over the number of these; None
    where nobody measured it, or a device does the work.
    """

    bytes: NonNegativeInt
    seconds: Measured
    spread: Fraction
    processor_seconds: Measured | None = None


class CollectiveCurve(Strict):
    """A collective over the groups between two levels, every sibling group active at once."""

    operation: Operation
    low: NonNegativeInt
    high: PositiveInt
    points: tuple[CollectivePoint, ...] = Field(min_length=1)


class NarrowInterference(Strict):
    """The same of messages that ranks round to blocks (``core.wire``): bytes are fewer, work is not."""

    compute_loss: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    communication_slowdown: Annotated[float, Field(ge=1, le=1000, allow_inf_nan=False)]


class InterferenceEntry(Strict):
    """Interference of one tier with compute while both run, measured on all ranks at once, or modelled.

    ``compute_loss``: the share of compute throughput lost; ``communication_slowdown``: time of a collective
    beside compute over its time alone; ``contention``: time of two collectives at once over their time one
    after the other. ``narrow``: None where nobody measured it. ``ctas``: thread blocks of a collective's
    kernel that this is for, which a run keeps to; None: those that the library takes.
    """

    compute_loss: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    communication_slowdown: Annotated[float, Field(ge=1, le=1000, allow_inf_nan=False)]
    contention: Annotated[float, Field(ge=1, le=1000, allow_inf_nan=False)] = 1.0
    narrow: NarrowInterference | None = None
    ctas: PositiveInt | None = None


class StragglerEntry(Strict):
    """Slow ranks of a host, found while profiling: their compute, or messages to and from them, took
    ``slowdown`` times as long as others'."""

    what: Literal["compute", "links"]
    host: str
    ranks: tuple[NonNegativeInt, ...]
    slowdown: Rate

    def describe(self) -> str:
        """For people, in one line."""
        who = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))} ({self.host})"
        if self.what == "compute":
            return f"{who}: compute takes {self.slowdown:.1f} times as long as on the other ranks"
        return f"{who}: messages to and from there take {self.slowdown:.1f} times as long as others"


class OptimizerPoint(Strict):
    """Seconds of one optimizer step on this many elements."""

    elements: NonNegativeInt
    seconds: Measured
    spread: Fraction


class MatrixPoint(Strict):
    """Seconds to orthogonalise one matrix of this shape by Newton–Schulz, all ranks at once."""

    rows: PositiveInt
    columns: PositiveInt
    seconds: Measured
    spread: Fraction


class MatrixEntry(Strict):
    """A matrix optimizer's updates of matrices: ``begin`` and ``finish`` are what works element by element,
    momentum before and the step after; ``products``: what needs the whole, by shape; ``state_per_element``
    as of ``OptimizerEntry``, which is of all other tensors."""

    state_per_element: Annotated[int, Field(ge=0, le=64)]
    begin: tuple[OptimizerPoint, ...] = Field(min_length=1)
    finish: tuple[OptimizerPoint, ...] = Field(min_length=1)
    products: tuple[MatrixPoint, ...] = Field(min_length=1)


class OptimizerEntry(Strict):
    """The optimizer: state tensors per element, temporaries, and the time of a step.

    Elements are those of the master weights, which a step also casts where the model computes in less.
    ``norm``: seconds of the sum of squares of so many gradients, for clipping; None where not measured.
    ``matrix``: of a matrix optimizer, what it costs on matrices.
    """

    name: str
    state_per_element: Annotated[int, Field(ge=0, le=64)]
    temporary_per_element: Annotated[float, Field(ge=0, le=64, allow_inf_nan=False)]
    points: tuple[OptimizerPoint, ...] = Field(min_length=1)
    norm: tuple[OptimizerPoint, ...] | None = Field(default=None, min_length=1)
    matrix: MatrixEntry | None = None


class CopyPoint(Strict):
    """Seconds of a copy of ``bytes`` to or from the device while as many bytes go the other way."""

    bytes: NonNegativeInt
    seconds: Measured
    spread: Fraction


class HostEntry(Strict):
    """The link between device and host memory, measured with all ranks of a host active."""

    points: tuple[CopyPoint, ...] = Field(min_length=1)


class RoundingPoint(Strict):
    """Seconds in which so many values are rounded to a format, and read back."""

    elements: PositiveInt
    pack_seconds: Measured
    unpack_seconds: Measured


class RoundingEntry(Strict):
    """A format that values can travel in (``core.wire``), measured with all ranks at it."""

    format: Format
    points: tuple[RoundingPoint, ...] = Field(min_length=1)


class ModelEntry(Strict):
    """The model that was measured; ``signature`` is a hash over its parameters' names, shapes and dtypes.

    ``dtype`` is what it computes in; in bfloat16 it is trained with float32 master weights.
    """

    name: str
    parameters: NonNegativeInt
    signature: str
    dtype: Dtype
    seq_len: PositiveInt


class ClusterEntry(Strict):
    """The cluster of a profile. ``memory_bytes``: the memory of one rank, before any reserve;
    ``norm_seconds``: an all-reduce of one number over all ranks, which clipping waits for;
    ``wakeup_seconds``: the wake-up latency of a stream's thread, None where streams are a device's.
    ``context_bytes``, ``communicator_bytes``: memory of a device beside its tensors, of CUDA's context with
    its libraries and of a communicator; None where nobody measured. ``compute_processor_share``: the share
    of the processors that ranks have in common which compute of all of them keeps busy; None where a device
    computes."""

    mesh: str
    tier_names: tuple[str, ...]
    backend: str
    device: str
    memory_bytes: PositiveInt
    peak_flops: Rate
    reduce_scatter_by_exchange: bool
    norm_seconds: Measured | None = None
    wakeup_seconds: Measured | None = None
    context_bytes: NonNegativeInt | None = None
    communicator_bytes: NonNegativeInt | None = None
    compute_processor_share: Annotated[float, Field(ge=0, le=1)] | None = None


class ProvenanceEntry(Strict):
    """When, and with what, the measurement was made. ``ranks_per_host``: how many computed at once on the
    machine that measured the model, and shared its processors; None where that was not noted."""

    created: str
    hzplan: str
    torch: str
    python: str
    cpus: PositiveInt
    ranks_per_host: PositiveInt | None = None


class ModelledEntry(Strict):
    """The sources of modelled seconds: names of files in ``cost_models/``.

    ``device``: None where units were measured and only links are modelled; ``kernels``: each operation's own
    (eager), or fused by a compiler (compiled).
    """

    cluster: str
    device: str | None = None
    kernels: str | None = None

    @property
    def what(self) -> str:
        """What nobody measured, and of which files that is, for people."""
        if self.device is None:
            return f"links are modelled, not measured: {self.cluster}"
        return f"seconds are modelled, not measured: {self.cluster}, {self.device}"


class CalibratedEntry(Strict):
    """The factors of a calibration by a run of ``steps`` steps; tiers fastest first."""

    steps: PositiveInt
    compute: Rate
    tiers: tuple[Rate, ...]
    optimizer: Rate


class Profile(Document):
    """The profile that ``hzplan profile`` writes and ``hzplan solve`` reads.

    ``modelled``: None where seconds were measured; ``calibrated``: None where no run has corrected them;
    ``parallel``: None where a rank has a whole replica of the model, else it is of a rank's share.
    ``host``: None where there is no memory but the device's.
    ``interference`` is by tier, empty where it was not measured; ``stragglers`` held everyone up, and times
    are with them. ``rounding``: of formats that values may travel in; None
    where it was not measured.
    """

    format: Literal["hzplan.profile"] = "hzplan.profile"
    version: Literal[2] = 2
    provenance: ProvenanceEntry
    modelled: ModelledEntry | None = None
    calibrated: CalibratedEntry | None = None
    parallel: ModelParallel | None = None
    model: ModelEntry
    cluster: ClusterEntry
    optimizer: OptimizerEntry
    units: tuple[UnitEntry, ...] = Field(min_length=1)
    uses: tuple[UseEntry, ...] = Field(min_length=1)
    collectives: tuple[CollectiveCurve, ...]
    interference: tuple[InterferenceEntry, ...] = ()
    host: HostEntry | None = None
    rounding: tuple[RoundingEntry, ...] | None = Field(default=None, min_length=1)
    stragglers: tuple[StragglerEntry, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
        """References resolve, sizes are sorted, every curve needed is there."""
        check_cluster(self.cluster, self.collectives, self.interference, self.host)
        names = [unit.name for unit in self.units]
        if len(set(names)) != len(names):
            raise ValueError("units: a name appears twice")
        tensors = [tensor.name for unit in self.units for tensor in unit.tensors]
        if len(set(tensors)) != len(tensors):
            raise ValueError("units: a tensor appears twice")
        known = set(names)
        for tensor in (tensor for unit in self.units for tensor in unit.tensors):
            if tensor.spec.nbytes > MAX_TENSOR_BYTES:
                raise ValueError(f"units: tensor {tensor.name} is larger than {MAX_TENSOR_BYTES >> 40} TiB")
        for unit in self.units:
            if not set(unit.requires) <= known:
                raise ValueError(f"units: {unit.name} requires a unit that is not listed")
        whole: set[str] = set()
        for index, entry in enumerate(self.uses):
            if not entry.reads_parameters and (entry.phase == "forward" or entry.unit not in whole):
                raise ValueError(
                    f"uses.{index}: reads_parameters is true in forward and at a unit's first use"
                )
            whole.add(entry.unit)
        sizes = [cost.micro_batch for cost in self.uses[0].costs]
        if not sizes or sorted(set(sizes)) != sizes:
            raise ValueError("uses.0.costs: micro-batch sizes must be there once each, smallest first")
        for index, use in enumerate(self.uses):
            if use.unit not in known:
                raise ValueError(f"uses.{index}.unit: {use.unit} is not a unit")
            if [cost.micro_batch for cost in use.costs] != sizes:
                raise ValueError(f"uses.{index}.costs: micro-batch sizes differ from those of the first use")
        check_context(self.mesh, self.parallel)
        matrix = self.optimizer.matrix
        named = [("points", self.optimizer.points), ("norm", self.optimizer.norm or ())]
        if matrix is not None:
            named += [("matrix.begin", matrix.begin), ("matrix.finish", matrix.finish)]
        for unit in self.units:
            for tensor in unit.tensors:
                if tensor.matrix and (matrix is None or not tensor.trainable or len(tensor.shape) < 2):
                    raise ValueError(
                        f"units: {tensor.name} is a matrix to the optimizer: it needs two dimensions, to be "
                        "trained, and optimizer.matrix"
                    )
        for name, listed in named:
            elements = [point.elements for point in listed]
            if sorted(set(elements)) != elements:
                raise ValueError(f"optimizer.{name}: sizes not rising")
        check_rounding(self.rounding or ())
        return self

    def replaced(self, **fields: Any) -> Profile:
        """The profile with other fields, validated; ``model_copy`` would keep the cached mesh."""
        return Profile(**{name: getattr(self, name) for name in Profile.model_fields} | fields)

    @cached_property
    def mesh(self) -> Mesh:
        """The cluster's mesh."""
        return Mesh.parse(self.cluster.mesh)

    @cached_property
    def sums_over_tiers(self) -> bool:
        """Whether an all-reduce over all tiers at once was measured."""
        found = {(c.operation, c.low, c.high) for c in self.collectives}
        return self.mesh.whole is not None and ("all_reduce", *self.mesh.whole) in found

    @property
    def data_ranks(self) -> int:
        """How many ranks, or groups of context parallelism, have sequences of their own."""
        return data_ranks(self.mesh, self.parallel)

    @property
    def ctas(self) -> tuple[int, ...] | None:
        """By tier, thread blocks of a collective's kernel; None where they are not known."""
        known = tuple(entry.ctas for entry in self.interference if entry.ctas is not None)
        return known if len(known) == len(self.mesh.tiers) else None

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """The micro-batch sizes that were measured, smallest first."""
        return tuple(cost.micro_batch for cost in self.uses[0].costs)


def check_cluster(
    cluster: ClusterEntry,
    collectives: Iterable[CollectiveCurve],
    interference: Sized,
    host: HostEntry | None,
) -> None:
    """ValueError, naming the field, where the mesh, its tiers and the curves do not fit each other, or sizes
    do not rise."""
    try:
        mesh = Mesh.parse(cluster.mesh)
    except ValueError as error:
        raise ValueError(f"cluster.mesh: {error}") from None
    if len(cluster.tier_names) != len(mesh.tiers):
        raise ValueError(f"cluster.tier_names: {len(mesh.tiers)} names needed, one per tier")
    if len(interference) not in (0, len(mesh.tiers)):
        raise ValueError(f"interference: {len(mesh.tiers)} entries needed, one per tier, or none")
    copied = [point.bytes for point in host.points] if host is not None else []
    if sorted(set(copied)) != copied:
        raise ValueError("host.points: sizes not rising")
    present = set()
    for curve in collectives:
        points = [point.bytes for point in curve.points]
        if sorted(set(points)) != points:
            raise ValueError(f"collectives: {curve.operation} {curve.low}-{curve.high}: sizes not rising")
        present.add((curve.operation, curve.low, curve.high))
    for stage in mesh.stages():
        for operation in ("all_gather", "reduce_scatter"):
            if (operation, *stage) not in present:
                raise ValueError(
                    f"collectives: {operation} between levels {stage.low} and {stage.high} is missing"
                )


def check_rounding(rounding: Iterable[RoundingEntry]) -> None:
    """ValueError, naming the field, where a format is there twice or sizes do not rise."""
    seen: set[Format] = set()
    for one in rounding:
        elements = [point.elements for point in one.points]
        if one.format in seen or sorted(set(elements)) != elements:
            raise ValueError(f"rounding: {one.format} is there twice, or its sizes are not rising")
        seen.add(one.format)


def signature(tensors: Iterable[TensorSpec]) -> str:
    """SHA-256 over names, shapes, dtypes and trainable flags, order-independent, hexadecimal."""
    lines = sorted(f"{t.name} {list(t.shape)} {t.dtype} {t.trainable}" for t in tensors)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
