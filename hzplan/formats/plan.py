"""The plan file: the choice per tensor and its predicted cost. Reviewed and diffed like code."""

from __future__ import annotations

from functools import cached_property
from math import ceil
from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.layout import MASTER_DTYPE, REDUCE_DTYPES, Dtype
from hzplan.core.matrices import NamedWay
from hzplan.core.order import is_ahead
from hzplan.core.recompute import HOST, PartialWay, Recomputed, Way
from hzplan.core.relaxed import Place, Policy, Rule, Timetable
from hzplan.core.schedule import MessageOrder
from hzplan.core.wire import ADMITTED, Format, Wire
from hzplan.formats.base import (
    Document,
    Fraction,
    Gap,
    NonNegativeInt,
    PositiveInt,
    Rate,
    Seconds,
    Strict,
)
from hzplan.formats.parallel import ModelParallel, check_context, data_ranks


class Shards(Strict):
    """Into how many shards parameter, gradient and optimizer state are cut."""

    param: PositiveInt
    grad: PositiveInt
    optim: PositiveInt


class BucketEntry(Strict):
    """A bucket: tensors with the same shards, which are communicated together. ``matrix``: how a matrix
    optimizer's update gets the whole of each (``core.matrices``); None where updates are element by
    element."""

    shards: Shards
    matrix: NamedWay | None = None
    tensors: tuple[str, ...] = Field(min_length=1)


def _true(value: bool) -> bool:
    if not value:
        raise ValueError("it is true, or left out")
    return value


def recompute_entry(way: Way | None) -> bool | PartialWay | None:
    """A way as ``PlanUnit`` has it."""
    return True if way == "full" else way


class PlanUnit(Strict):
    """A unit and its buckets; a unit without tensors of its own (tied weights) has none.

    ``recompute``: true where its forward is computed again in its backward, and what that needs is not kept;
    or the name of a way in which part of it is (``core.recompute``).
    ``offload``: true where its optimizer state, and master weights, lie in the host's memory. ``ahead``: by
    tier, fastest first, how many later uses' parameters are gathered before this unit's gradients are
    reduced (``core.order``).
    """

    name: str
    requires: tuple[str, ...]
    recompute: Annotated[bool, AfterValidator(_true)] | PartialWay | None = None
    offload: Annotated[bool, AfterValidator(_true)] | None = None
    ahead: tuple[NonNegativeInt, ...] | None = None
    buckets: tuple[BucketEntry, ...]


class WireEntry(Strict):
    """What parameters and gradients travel in, by tier, fastest first (``core.wire``). ``kept``: patterns of
    the names of tensors that travel exactly, as all do that have fewer than two dimensions."""

    param: tuple[Format, ...]
    grad: tuple[Format, ...]
    kept: tuple[str, ...]

    @property
    def formats(self) -> Wire:
        """As ``core.wire`` takes it."""
        return Wire(self.param, self.grad, self.kept)


class RelaxedTier(Strict):
    """How ``groups`` of ranks, each under this plan, stay together over ``tier`` without waiting for each
    other: see ``core.relaxed``. A round is sent every ``every`` steps, about one of ``parts`` in turn, and
    applied ``delay`` steps later. ``copies``: whose memory what is kept of the others lies in.

    ``transfer_s``: what a round takes at most; ``step_s``: a step in the mean, and ``busy_s`` one with a
    transfer beside all of it; ``kept_bytes``: what a rank keeps of the others; all predicted.
    """

    rule: Rule
    groups: PositiveInt
    tier: str
    every: PositiveInt
    parts: PositiveInt
    delay: NonNegativeInt
    wire: Format
    mixing: float
    outer_lr: float
    momentum: float
    decay: float
    copies: Place
    transfer_s: Seconds
    step_s: Seconds
    busy_s: Seconds
    kept_bytes: NonNegativeInt

    @property
    def policy(self) -> Policy:
        """As ``core.relaxed`` takes it."""
        timetable = Timetable(self.every, self.parts, self.delay)
        return Policy(
            *(self.rule, self.groups, timetable, self.wire),
            *(self.mixing, self.outer_lr, self.momentum, self.decay),
            copies=self.copies,
        )

    @model_validator(mode="after")
    def _consistent(self) -> RelaxedTier:
        self.policy.check()
        return self


class PlanModel(Strict):
    """The model that the plan is for."""

    name: str
    parameters: NonNegativeInt
    signature: str
    dtype: Dtype
    seq_len: PositiveInt


class PlanCluster(Strict):
    """The data-parallel world that the plan is for."""

    mesh: str
    tier_names: tuple[str, ...]
    backend: str


class Batch(Strict):
    """Sequences per step in all, per rank and forward pass, and forward passes per step."""

    global_batch: PositiveInt
    micro_batch: PositiveInt
    accumulation: PositiveInt


MATRIX_OPTIMIZERS = ("muon",)
"""Optimizers that update matrices by all of their elements."""

Recompute = Literal["choose", "none", "all"]
"""Whether the solver chooses which units compute their forward again, or that is given."""
Target = Literal["fsdp2", "deepspeed", "megatron-fsdp", "megatron-fsdp-v2"]
"""Runtimes that plans are exported to."""


class Source(Strict):
    """The profile that the plan was solved from (path relative to the plan) and the question asked.

    ``host_memory_bytes``: how much of the host's a rank may take, for optimizer state and activations; None:
    none. ``target``: the runtime that the plan is to be exported to; None: it is for ours.
    ``asked_tie``: the share of a step by which predictions may differ and count as equal; None: what the gap
    says.
    """

    profile: str
    profile_sha256: str
    memory_budget_bytes: PositiveInt
    asked_gap: Gap
    asked_tie: Fraction | None = None
    pins: tuple[str, ...] = ()
    recompute: Recompute = "choose"
    host_memory_bytes: PositiveInt | None = None
    target: Target | None = None


class Proof(Strict):
    """How far the plan is from the best choice that was searched, at most, and the solver that proved it.

    ``bound_s``: no choice searched is predicted below it, in whatever order of messages.
    ``in_order_bound_s``: none in the plan's own message order is; None where links are shared. ``gap``: the
    predicted step over the bound, that in its order if it has one, less 1.
    ``objective_s``: what the ILP minimises, a lower bound on the plan's predicted step. ``status``:
    "optimal" where the search found an objective within the gap that was asked for, else "feasible".
    ``replayed``: how many choices were replayed so that none is left that may be faster, with links shared or
    in the plan's message order; None where not all were.
    """

    status: Literal["optimal", "feasible", "given"]
    objective_s: Seconds
    bound_s: Seconds
    in_order_bound_s: Seconds | None = None
    gap: Gap
    replayed: NonNegativeInt | None = None
    solver: str


def gap_of(step_s: float, bound_s: float) -> float:
    """The share by which a step is above a bound, at most: rounded up to six places."""
    return ceil(max(0.0, step_s / max(bound_s, 1e-9) - 1) * 1e6) / 1e6


class Predicted(Strict):
    """The simulator's prediction of one step in steady state, per rank."""

    step_s: Seconds
    exposed_comm_s: dict[str, Seconds]
    peak_memory_bytes: NonNegativeInt
    memory_bytes: dict[str, NonNegativeInt]
    tokens_per_s_per_gpu: Rate
    mfu: Rate


class Plan(Document):
    """The plan that ``hzplan solve`` writes and ``hzplan run`` executes.

    ``reduce_dtype``: the communication dtype of gradients, which are kept in the dtype of master weights, and
    added up in it; ``narrow_sums``: added up in ``reduce_dtype``, where a library does. ``wire``: narrower
    formats, with rounding of their own; None: there are none.
    ``flat_sums``: gradients of which every rank keeps all are summed by one all-reduce over all ranks, as DDP
    does, instead of tier by tier.
    ``sync_ahead``: where messages are sent in an order (``ahead`` of the units), how many uses before a
    unit's first one its updated parameters are gathered; None: a tier's messages share its link.
    ``parallel``: the model parallelism beside this plan, whose units are then those of one rank's share.
    ``message_bytes``: units that follow each other are reduced together for as long as their gradients have
    no more bytes; None: each by itself. ``matrix_units``: of how many units that follow each other matrices
    are brought together in one task, under a matrix optimizer; None: of all. ``copy_uses``: how many uses a
    copy of a unit's activations, to the host or back, has time for; None where there are none on the host.
    ``ctas``: by tier, thread blocks of a collective's kernel at most; None: what the device has room for.
    ``local_norm``: every rank has all reduced gradients and takes their norm by itself, for clipping; else it
    takes that of its slices, which are summed over all ranks. ``replica_sync``: what is beside the mesh;
    mesh, batch, proof and prediction are those of one group.
    """

    format: Literal["hzplan.plan"] = "hzplan.plan"
    version: Literal[2] = 2
    model: PlanModel
    cluster: PlanCluster
    parallel: ModelParallel | None = None
    optimizer: str
    clip: bool
    local_norm: Literal[True] | None = None
    reduce_dtype: Dtype
    narrow_sums: Literal[True] | None = None
    flat_sums: Literal[True] | None = None
    wire: WireEntry | None = None
    batch: Batch
    prefetch: PositiveInt
    gradient_buffers: PositiveInt
    message_bytes: PositiveInt | None = None
    matrix_units: PositiveInt | None = None
    copy_uses: PositiveInt | None = None
    sync_ahead: NonNegativeInt | None = None
    ctas: tuple[PositiveInt, ...] | None = None
    replica_sync: Annotated[
        Annotated[Literal["every_step"], Tag("every_step")] | Annotated[RelaxedTier, Tag("relaxed")],
        Discriminator(lambda one: "relaxed" if isinstance(one, dict | RelaxedTier) else "every_step"),
    ] = "every_step"
    source: Source
    proof: Proof
    predicted: Predicted
    units: tuple[PlanUnit, ...] = Field(min_length=1)
    uses: tuple[str, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        """Shards are levels of the mesh, names resolve, the batch adds up."""
        try:
            mesh = Mesh.parse(self.cluster.mesh)
        except ValueError as error:
            raise ValueError(f"cluster.mesh: {error}") from None
        if len(self.cluster.tier_names) != len(mesh.tiers):
            raise ValueError(f"cluster.tier_names: {len(mesh.tiers)} names needed, one per tier")
        if self.ctas is not None and len(self.ctas) != len(mesh.tiers):
            raise ValueError(f"ctas: {len(mesh.tiers)} numbers needed, one per tier")
        allowed = REDUCE_DTYPES[self.model.dtype]
        if self.reduce_dtype not in allowed:
            raise ValueError(
                f"reduce_dtype: with {self.model.dtype} it is {' or '.join(allowed)}, not {self.reduce_dtype}"
            )
        if self.narrow_sums and self.reduce_dtype == allowed[0]:
            raise ValueError(f"narrow_sums: {self.reduce_dtype} is what gradients are kept in")
        if self.wire is not None:
            for what, listed in (("param", self.wire.param), ("grad", self.wire.grad)):
                if len(listed) != len(mesh.tiers):
                    raise ValueError(f"wire.{what}: {len(mesh.tiers)} formats needed, one per tier")
                for form in listed:
                    if form != "exact" and form not in ADMITTED[what]:
                        raise ValueError(f"wire.{what}: {' or '.join(ADMITTED[what])} or exact, not {form}")
            if self.wire.formats.is_exact:
                raise ValueError("wire: everything is exact; leave it out")
        names = [unit.name for unit in self.units]
        if len(set(names)) != len(names):
            raise ValueError("units: a name appears twice")
        tensors = [name for unit in self.units for bucket in unit.buckets for name in bucket.tensors]
        if len(set(tensors)) != len(tensors):
            raise ValueError("units: a tensor appears twice")
        for unit in self.units:
            if not set(unit.requires) <= set(names):
                raise ValueError(f"units: {unit.name} requires a unit that is not listed")
            if unit.ahead is not None and self.sync_ahead is None:
                raise ValueError(f"units: {unit.name}: ahead: for a message order, sync_ahead is needed too")
            if unit.ahead is not None and not is_ahead(unit.ahead, len(mesh.tiers)):
                raise ValueError(
                    f"units: {unit.name}: ahead: {len(mesh.tiers)} numbers from 0 on needed, one per tier, "
                    "none smaller than the one before"
                )
            for bucket in unit.buckets:
                try:
                    legal = self._levels(mesh, bucket).legal
                except ValueError as error:
                    raise ValueError(f"units: {unit.name}: {error}") from None
                if not legal:
                    raise ValueError(
                        f"units: {unit.name}: optim must have at least the shards of param and grad"
                    )
        matrices = [name for unit in self.units for b in unit.buckets if b.matrix for name in b.tensors]
        if bool(matrices) != (self.optimizer in MATRIX_OPTIMIZERS):
            what = f"{matrices[0]} is a matrix to an optimizer" if matrices else "no tensor is a matrix"
            raise ValueError(f"optimizer: {self.optimizer}, but {what}")
        brought = {
            unit.name
            for unit in self.units
            for bucket in unit.buckets
            if self._levels(mesh, bucket).assembles(mesh)
        }
        if brought & self.offloaded:
            raise ValueError(
                f"units: {min(brought & self.offloaded)} is offloaded, and its matrices are brought together "
                "from slices, for which their state has to stay on the device"
            )
        if self.flat_sums and mesh.whole is None:
            raise ValueError(f"flat_sums: mesh {mesh} has one tier, whose sums are flat; leave it out")
        if self.flat_sums and (self.wire or self.reduce_dtype != MASTER_DTYPE[self.model.dtype]):
            raise ValueError("flat_sums: only where gradients travel as they are kept")
        shards = [b.shards for unit in self.units for b in unit.buckets]
        # Frozen tensors have one number of shards; which are frozen, the model says when the plan is applied.
        trained = [of for of in shards if not of.param == of.grad == of.optim]
        if self.local_norm and not (self.clip and all(of.grad == of.optim == 1 for of in trained)):
            raise ValueError("local_norm: only with clip, and where grad and optim have 1 shard everywhere")
        if self.offloaded and self.source.host_memory_bytes is None:
            raise ValueError(
                f"units: {min(self.offloaded)} is offloaded, but source.host_memory_bytes allows nothing"
            )
        saved = [unit for unit, way in self.recomputed.items() if way == HOST]
        for name in ("source.host_memory_bytes", "copy_uses") if saved else ():
            of = self.copy_uses if name == "copy_uses" else self.source.host_memory_bytes
            if of is None:
                raise ValueError(f"units: activations of {min(saved)} are on the host, but {name} is missing")
        whole: set[str] = set()
        for index, use in enumerate(self.uses):
            phase, _, unit_name = use.partition(" ")
            if phase not in ("F", "B", "b") or unit_name not in names:
                raise ValueError(f"uses.{index}: {use!r} is not 'F <unit>', 'B <unit>' or 'b <unit>'")
            if phase == "b" and unit_name not in whole:
                raise ValueError(f"uses.{index}: {use!r} comes before any use that reads its parameters")
            whole.add(unit_name)
            if phase == "b" and unit_name in self.recomputed:
                raise ValueError(
                    f"units: {unit_name} is recomputed, but its backward ({use!r}) reads no parameters"
                )
        check_context(mesh, self.parallel)
        if self.batch.global_batch != self.data_ranks * self.batch.micro_batch * self.batch.accumulation:
            raise ValueError(
                "batch: global_batch must be ranks with sequences of their own × micro_batch × accumulation"
            )
        return self

    def _levels(self, mesh: Mesh, bucket: BucketEntry) -> Levels:
        shards, matrix = bucket.shards, bucket.matrix or ""
        param, grad, optim = (mesh.level_of(one) for one in (shards.param, shards.grad, shards.optim))
        return Levels(param, grad, optim, matrix, bool(self.flat_sums) and optim == 0)

    @cached_property
    def mesh(self) -> Mesh:
        """The data-parallel mesh."""
        return Mesh.parse(self.cluster.mesh)

    @property
    def relaxed(self) -> Policy | None:
        """How groups of ranks under this plan stay together without waiting; None: there is one group."""
        return None if isinstance(self.replica_sync, str) else self.replica_sync.policy

    @property
    def data_ranks(self) -> int:
        """How many ranks, or groups of context parallelism, have sequences of their own."""
        return data_ranks(self.mesh, self.parallel)

    @property
    def recomputed(self) -> Recomputed:
        """The units whose forward is computed again, each with its way."""
        ways = ((unit.name, unit.recompute) for unit in self.units if unit.recompute)
        return Recomputed((name, "full" if way is True else way) for name, way in ways)

    @property
    def offloaded(self) -> frozenset[str]:
        """The units whose optimizer state lies in the host's memory."""
        return frozenset(unit.name for unit in self.units if unit.offload)

    @property
    def message_order(self) -> MessageOrder | None:
        """The order of messages on each tier; None where they share its link."""
        if self.sync_ahead is None:
            return None
        ahead = tuple((unit.name, unit.ahead) for unit in self.units if unit.ahead is not None)
        return MessageOrder(ahead, self.sync_ahead)

    def levels(self, bucket: BucketEntry) -> Levels:
        """A bucket's shard counts as levels of the mesh."""
        return self._levels(self.mesh, bucket)
