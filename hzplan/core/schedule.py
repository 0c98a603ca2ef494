"""The step as a DAG of tasks: one order that the simulator times, the ILP optimises and the runtime executes.

The order comes from the recorded sequence of unit uses, the prefetch depth, the accumulation and whether
gradients are clipped; it does not depend on the levels chosen. A stage that a choice leaves empty is a task
of zero length, so the DAG of every choice is the same.

Streams, each first in, first out: ``compute``; ``optim``; for every tier ``unshard.<t>``, ``reduce.<t>``
(one stream ``link.<t>`` under a message order, ``core.order``) and ``gather.<t>`` (all-gathers that carry a
step's results: gradients to replicas, updated parameters); and, where the host's memory is used, ``fetch``
and ``store``, which copy optimizer states to the device before a unit's update and back after it, and
``load`` and ``save``, likewise activations before a unit's backward and after its forward; and, under a
matrix optimizer, ``exchange.<t>``, which brings matrices to who computes their updates, and those back.
``Schedule.tasks`` is the one total launch order, the same on every rank: a compute task, then what its end
launches. It is a topological order of the DAG.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Literal, NamedTuple

import networkx as nx

COMPUTE_STREAM = "compute"
OPTIM_STREAM = "optim"
FETCH_STREAM, STORE_STREAM = "fetch", "store"
LOAD_STREAM, SAVE_STREAM = "load", "save"
EXCHANGE_STREAM = "exchange"
"""First word of the names of the streams of a matrix optimizer's messages, ``exchange.<t>``."""

OFFLOAD_SLOTS = 2
"""Buffers on the device for offloaded optimizer states: one is fetched to while another is stored."""

Interval = tuple[int, int]
"""First and last position of a buffer's use, both included."""


Ahead = tuple[int, ...]
"""By tier, fastest first: how many later uses' parameters go before a unit's gradients."""


class Pace(NamedTuple):
    """How far a step runs ahead, and how large its messages are; see ``build``."""

    prefetch: int
    gradient_buffers: int
    message_bytes: int = 0
    matrix_units: int = 0

    def __str__(self) -> str:
        messages = f", messages of {self.message_bytes:,} bytes" if self.message_bytes else ""
        matrices = f", matrices of {self.matrix_units} units together" if self.matrix_units else ""
        return f"prefetch {self.prefetch}, {self.gradient_buffers} gradient buffers{messages}{matrices}"


HOST_LINK: tuple[tuple[str, str], ...] = ((FETCH_STREAM, LOAD_STREAM), (STORE_STREAM, SAVE_STREAM))
"""The streams that share the link to the host's memory, by direction: to the device, and from it."""


class MessageOrder(NamedTuple):
    """An order of the messages of each tier (``core.order``).

    ``ahead``: the numbers of units; 0 where a unit has none, and of units that are reduced together the
    larger ones. ``sync``: how many uses before a unit's first one its updated parameters are gathered."""

    ahead: tuple[tuple[str, Ahead], ...]
    sync: int


@dataclass(frozen=True)
class Use:
    """A module call in a forward or backward pass; ``reads``: whether it needs the unit's parameters."""

    unit: str
    phase: Literal["forward", "backward"]
    reads: bool = True

    def __str__(self) -> str:
        letter = self.phase[0]
        return f"{letter.upper() if self.reads else letter} {self.unit}"

    @classmethod
    def parse(cls, text: str) -> Use:
        """The inverse of ``str``."""
        letter, _, unit = text.partition(" ")
        return cls(unit, "forward" if letter in "Ff" else "backward", letter.isupper())


class Kind(Enum):
    """The kind of a task; its value is the first word of the task's text form."""

    BEGIN = "begin"
    COMPUTE = "compute"
    STEP = "step"
    UNSHARD = "unshard"
    REDUCE = "reduce"
    FINAL_REDUCE = "final-reduce"
    GRAD_GATHER = "grad_gather"
    FETCH = "fetch"
    UPDATE = "update"
    ASSEMBLE = "assemble"
    ORTHOGONALIZE = "orthogonalize"
    RETURN = "return"
    APPLY = "apply"
    STORE = "store"
    SAVE = "save"
    LOAD = "load"
    PARAM_GATHER = "param_gather"


@dataclass(frozen=True)
class Task:
    """One node of the schedule's DAG.

    ``after``: indices of predecessors in the same step, ``after_previous`` in the step before. ``needs`` and
    ``needs_previous``: the data dependencies among them, without the order of the task's own stream.
    ``position`` counts the uses of the whole step (micro-batch × uses + use), -1 where none applies.
    """

    index: int
    kind: Kind
    stream: str
    units: tuple[str, ...] = ()
    tier: int = -1
    position: int = -1
    after: tuple[int, ...] = ()
    after_previous: tuple[int, ...] = ()
    needs: tuple[int, ...] = ()
    needs_previous: tuple[int, ...] = ()

    def __str__(self) -> str:
        tier = f".{self.tier}" if self.tier >= 0 else ""
        position = f"@{self.position}" if self.position >= 0 else ""
        return " ".join(filter(None, (f"{self.kind.value}{tier}{position}", ",".join(self.units))))


@dataclass(frozen=True)
class Schedule:
    """A step: its tasks in total launch order, and when each unit's buffers are in use.

    ``completed_at``: by use the units whose gradients are complete after it. ``unshard_live_ranges``: closed
    intervals of positions in which a unit's unsharded parameters occupy their buffer;
    ``gradient_live_ranges``: likewise for unreduced gradients, counted in reduces. Both cover
    at most three micro-batches, after which they repeat. ``offload_slots``: by unit the buffer that its
    states are fetched to. ``saved``: by unit whose activations may lie in the host's memory, the first and
    last use during which they are nowhere else. ``order``: the message order (``core.order``), and ``shared``
    the same step without it; None where messages of a tier share its link.
    """

    tasks: tuple[Task, ...]
    uses: tuple[Use, ...]
    tiers: int
    prefetch: int
    gradient_buffers: int
    message_bytes: int
    matrix_units: int
    accumulation: int
    clip: bool
    options_read: int | None
    requires: Mapping[str, tuple[str, ...]]
    completed_at: Mapping[int, tuple[str, ...]] = field(repr=False)
    unshard_live_ranges: Mapping[str, tuple[Interval, ...]] = field(repr=False)
    gradient_live_ranges: Mapping[str, tuple[Interval, ...]] = field(repr=False)
    offload_slots: Mapping[str, int] = field(repr=False)
    saved: Mapping[str, Interval] = field(repr=False)
    copy_uses: int
    order: MessageOrder | None = None
    shared: Schedule | None = field(default=None, repr=False)

    @property
    def pace(self) -> Pace:
        """What was asked of ``build``, and of buffers as many as there is a use for."""
        return Pace(self.prefetch, self.gradient_buffers, self.message_bytes, self.matrix_units)

    @cached_property
    def streams(self) -> dict[str, tuple[Task, ...]]:
        """Every stream's tasks in order."""
        found: dict[str, list[Task]] = {}
        for task in self.tasks:
            found.setdefault(task.stream, []).append(task)
        return {name: tuple(tasks) for name, tasks in found.items()}

    @cached_property
    def distinct(self) -> tuple[list[Task], list[int]]:
        """The tasks without their repetitions in later micro-batches, and for every task the index of the one
        that it repeats."""
        places: dict[object, int] = {}
        first: list[Task] = []
        found = []
        for task in self.tasks:
            position = task.position % len(self.uses) if task.kind is Kind.COMPUTE else -1
            place = places.setdefault((task.kind.value, task.tier, task.units, position), len(first))
            if place == len(first):
                first.append(task)
            found.append(place)
        return first, found

    @cached_property
    def compute(self) -> tuple[Task, ...]:
        """The compute task of every position."""
        return tuple(task for task in self.tasks if task.kind is Kind.COMPUTE)

    def use(self, task: Task) -> Use:
        """The use that a task of a position belongs to."""
        return self.uses[task.position % len(self.uses)]

    def reads(self, use: Use) -> tuple[str, ...]:
        """The units that must be unsharded during a use."""
        return self.requires[use.unit] if use.reads else ()

    def micro_batch(self, task: Task) -> int:
        """The micro-batch that a task of a position belongs to."""
        return task.position // len(self.uses)

    def graph(self) -> nx.DiGraph:
        """The DAG of one step; the edges to the step before are in ``graph["previous"]``."""
        graph = nx.DiGraph(previous=[(u, task.index) for task in self.tasks for u in task.after_previous])
        graph.add_nodes_from((task.index, {"task": task}) for task in self.tasks)
        graph.add_edges_from((u, task.index) for task in self.tasks for u in task.after)
        return graph


def build(
    uses: Sequence[Use],
    requires: Mapping[str, tuple[str, ...]],
    trainable: Collection[str],
    *,
    tiers: int,
    prefetch: int,
    accumulation: int,
    clip: bool,
    gradient_buffers: int | None = None,
    offload: bool = False,
    message_bytes: int = 0,
    gradient_bytes: Mapping[str, int] | None = None,
    saved: Collection[str] = (),
    copy_uses: int = 1,
    matrices: Collection[str] = (),
    matrix_units: int = 0,
) -> Schedule:
    """Order one step.

    ``uses``: the recorded sequence of one forward and backward, in which a unit's first use reads;
    ``requires``: for every unit the units whose parameters a use of it needs, if it reads any; ``trainable``:
    the units with trained tensors; ``prefetch``: how many uses ahead of compute may be unsharded (at least
    1); ``gradient_buffers``: how many reduces' gradients may be there unreduced, the one that is being
    computed included (default: ``prefetch + 1``); ``offload``: whether optimizer states may lie in the host's
    memory; ``message_bytes``: units that follow each other are reduced in one task for as long as their
    gradients (``gradient_bytes``, by unit) have no more bytes together; ``saved``: the units whose
    activations may lie in the host's memory between forward and backward, and ``copy_uses`` how many
    uses a copy of them has time for (at least ``prefetch + 1``); ``matrices``: the units with matrices under
    a matrix optimizer, and ``matrix_units`` how many of them that follow each other have theirs brought
    together and updated in one task (0: all).

    The rules: a unit is unsharded for a use when it is not already whole, at the earliest when compute has
    ended the use ``prefetch + 1`` before; it is kept while its next use is within that window. Gradients are
    reduced after a unit's last use in a micro-batch's backward, and compute runs at most ``gradient_buffers``
    reduces ahead, and never over a unit's own unfinished one. The last micro-batch reduces down the whole
    hierarchy. The first states are fetched in its backward; others when their buffer has been emptied.
    Activations are saved after a unit's forward, before compute begins the use ``copy_uses`` later, and
    loaded when it has ended the use ``copy_uses`` before the backward, so that memory does not depend on how
    fast copies are. Of a group's matrices the update begins with its units' updates; then they are brought
    together while the next group's units are updated, computed, sent back, and applied before the group after
    the next one begins, so that two groups have buffers at a time.
    """
    buffers = prefetch + 1 if gradient_buffers is None else gradient_buffers
    if prefetch < 1 or accumulation < 1 or buffers < 1:
        raise ValueError("prefetch, accumulation and gradient_buffers must be at least 1")
    if message_bytes and gradient_bytes is None:
        raise ValueError("message_bytes needs gradient_bytes")
    completed_at = _last_backward(uses, requires, trainable)
    reduces = _reduces(completed_at, message_bytes, gradient_bytes or {})
    pace = Pace(prefetch, min(buffers, max(1, len(reduces))), message_bytes, matrix_units)
    return _Builder(
        *(tuple(uses), dict(requires), tuple(trainable), completed_at, reduces),
        *(pace, tiers, accumulation, clip, offload),
        max(copy_uses, pace.prefetch + 1),
        *(saved, matrices),
    ).build()


class _Builder:
    """Collects tasks in launch order and knows each stream's tail."""

    def __init__(
        self,
        uses: tuple[Use, ...],
        requires: dict[str, tuple[str, ...]],
        trainable: tuple[str, ...],
        completed_at: dict[int, tuple[str, ...]],
        reduces: list[list[int]],
        pace: Pace,
        tiers: int,
        accumulation: int,
        clip: bool,
        offload: bool,
        copy_uses: int,
        saved: Collection[str],
        matrices: Collection[str],
    ) -> None:
        self.uses, self.requires, self.trainable = uses, requires, trainable
        self.pace, self.prefetch, self.gradient_buffers = pace, pace.prefetch, pace.gradient_buffers
        self.tiers, self.accumulation, self.clip = tiers, accumulation, clip
        self.positions = len(uses) * accumulation
        self.runs = _runs(uses, requires, self.prefetch, accumulation)
        self.runs_at: dict[int, list[str]] = {}  # position -> the units to be unsharded for it
        for unit, runs in self.runs.items():
            for first, _ in runs:
                self.runs_at.setdefault(first, []).append(unit)
        self.completed_at = completed_at
        self.filled_from = {uses[0] for uses in reduces}  # the uses at which a reduce's first gradients come
        self.reduced_at = {  # by index of a use: the units that are reduced after it
            uses[-1]: tuple(unit for use in uses for unit in completed_at[use]) for uses in reduces
        }
        self.tasks: list[Task] = []
        self.tail: dict[str, int] = {}
        self.unsharded: dict[int, int] = {}  # position -> last unshard task
        self.first_unshard: dict[str, int] = {}  # unit -> first unshard task of the step
        self.reduces: list[int] = []  # the last task of every reduce, in order
        self.reduced: dict[str, int] = {}  # unit -> task after which its final gradient is there
        self.first_uses = {
            unit: self.runs[unit][0][0] for units in self.reduced_at.values() for unit in units
        }
        self.order = [unit for units in self.reduced_at.values() for unit in units]  # of updates
        if clip:
            self.order.sort(key=lambda unit: self.first_uses[unit])
        self.offload_slots = {unit: place % OFFLOAD_SLOTS for place, unit in enumerate(self.order) if offload}
        listed = [unit for unit in self.order if unit in matrices]
        size = pace.matrix_units or max(1, len(listed))
        groups = [tuple(listed[start : start + size]) for start in range(0, len(listed), size)]
        self.begins = {group[0] for group in groups}
        self.ends = {group[-1]: group for group in groups}
        self.assembling: list[tuple[tuple[str, ...], int]] = []  # groups and what they wait for
        self.returning: list[tuple[tuple[str, ...], int]] = []
        backward = next((i for i, use in enumerate(uses) if use.phase == "backward"), len(uses) - 1)
        self.fetches_at = len(uses) * (accumulation - 1) + backward  # the compute task that begins them
        self.fetched: dict[str, int] = {}
        self.stored: dict[str, int] = {}
        self.updated: dict[str, int] = {}
        self.param_gathered: dict[str, int] = {}
        self.copy_uses, self.saved = copy_uses, _between(uses, copy_uses, saved)
        self.saved_after = {first - copy_uses: unit for unit, (first, _) in self.saved.items()}
        self.loaded_for = {last + copy_uses: unit for unit, (_, last) in self.saved.items()}
        self.copied: dict[int, list[int]] = {}  # position -> copies to be done before its compute begins
        self.options_read: int | None = (
            None  # the compute task that takes learning rates over for the updates
        )

    def add(self, kind: Kind, stream: str, *, after: Iterable[int] = (), **fields: object) -> int:
        """Append a task; the stream's order is an edge like any other."""
        index = len(self.tasks)
        needs = {*after}
        edges = needs | ({self.tail[stream]} if stream in self.tail else set())
        self.tasks.append(
            Task(index, kind, stream, after=_sorted(edges), needs=_sorted(needs), **fields)  # type: ignore[arg-type]
        )
        self.tail[stream] = index
        return index

    def build(self) -> Schedule:
        begin = self.add(Kind.BEGIN, COMPUTE_STREAM)
        for position in range(min(self.prefetch + 1, self.positions)):
            self.unshard(position, after=begin)
        for position in range(self.positions):
            computed = self.compute(position)
            if position + self.prefetch + 1 < self.positions:
                self.unshard(position + self.prefetch + 1, after=computed)
            self.save(position, computed=computed)
            self.load(position + self.copy_uses, computed=computed)
            if position == self.fetches_at:
                for unit in self.order[:OFFLOAD_SLOTS]:
                    self.fetch(unit, after=[computed], position=position)
            self.reduce(position, computed=computed)
        self.step()
        return Schedule(
            tasks=self.with_wraps(),
            uses=self.uses,
            tiers=self.tiers,
            prefetch=self.prefetch,
            gradient_buffers=self.gradient_buffers,
            message_bytes=self.pace.message_bytes,
            matrix_units=self.pace.matrix_units,
            accumulation=self.accumulation,
            clip=self.clip,
            options_read=self.options_read,
            requires=self.requires,
            completed_at=self.completed_at,
            unshard_live_ranges=self.unshard_live_ranges(),
            gradient_live_ranges=self.gradient_live_ranges(),
            offload_slots=self.offload_slots,
            saved=self.saved,
            copy_uses=self.copy_uses,
        )

    def unshard(self, position: int, *, after: int) -> None:
        """Add the all-gathers of the units used at a position, from the slowest tier to the fastest."""
        units = tuple(self.runs_at.get(position, ()))
        if not units:
            return
        previous = after
        for tier in reversed(range(self.tiers)):
            previous = self.add(
                Kind.UNSHARD, f"unshard.{tier}", after=[previous], units=units, tier=tier, position=position
            )
            for unit in units:
                self.first_unshard.setdefault(unit, previous)
        self.unsharded[position] = previous

    def compute(self, position: int) -> int:
        after = [self.unsharded[position]] if position in self.unsharded else []
        # No more buffers than reduces a micro-batch has: a unit's own last one must be over in any case.
        if position % len(self.uses) in self.filled_from and len(self.reduces) >= self.gradient_buffers:
            after.append(self.reduces[-self.gradient_buffers])
        after += self.copied.get(position, ())
        use = self.uses[position % len(self.uses)]
        return self.add(Kind.COMPUTE, COMPUTE_STREAM, after=after, units=(use.unit,), position=position)

    def save(self, position: int, *, computed: int) -> None:
        """Add the copy of a forward's activations to the host's memory."""
        if (unit := self.saved_after.get(position % len(self.uses))) is not None:
            done = self.add(Kind.SAVE, SAVE_STREAM, after=[computed], units=(unit,), position=position)
            self.copied.setdefault(position + self.copy_uses, []).append(done)

    def load(self, position: int, *, computed: int) -> None:
        """Add the copy of the activations back that a position's backward needs."""
        if (unit := self.loaded_for.get(position % len(self.uses))) is not None and position < self.positions:
            done = self.add(Kind.LOAD, LOAD_STREAM, after=[computed], units=(unit,), position=position)
            self.copied.setdefault(position, []).append(done)

    def reduce(self, position: int, *, computed: int) -> None:
        """Add the reductions of gradients that are complete at a position, from the fastest tier to the
        slowest.

        On the last micro-batch they reduce down the whole hierarchy, and gather back to replicas.
        """
        units = self.reduced_at.get(position % len(self.uses))
        if not units:
            return
        final = position // len(self.uses) == self.accumulation - 1
        kind = Kind.FINAL_REDUCE if final else Kind.REDUCE
        previous = computed
        for tier in range(self.tiers):
            previous = self.add(
                kind, f"reduce.{tier}", after=[previous], units=units, tier=tier, position=position
            )
        self.reduces.append(previous)
        if final:
            for tier in reversed(range(self.tiers)):
                previous = self.add(
                    Kind.GRAD_GATHER,
                    f"gather.{tier}",
                    after=[previous],
                    units=units,
                    tier=tier,
                    position=position,
                )
            self.reduced |= dict.fromkeys(units, previous)
            if not self.clip:
                if self.options_read is None:
                    self.options_read = computed
                for unit in units:
                    self.update(unit, after=[previous], position=position)

    def update(self, unit: str, *, after: Iterable[int], position: int = -1) -> None:
        """Add a unit's optimizer step; with offload also the store of its state, and the fetch of the next
        state into the same offload slot."""
        if unit in self.begins:
            self.apply(position)
        held = [self.fetched[unit]] if unit in self.fetched else []
        updated = self.add(Kind.UPDATE, OPTIM_STREAM, after=[*after, *held], units=(unit,), position=position)
        self.updated[unit] = updated
        if unit in self.offload_slots:
            self.stored[unit] = self.add(
                Kind.STORE, STORE_STREAM, after=[updated], units=(unit,), position=position
            )
            following = self.order.index(unit) + OFFLOAD_SLOTS
            if following < len(self.order):
                # Where this unit's state stays on the device, its fetch and store are idle; the next fetch
                # then still waits for what this one waited for.
                self.fetch(self.order[following], after=[self.stored[unit], *held], position=position)
        if unit in self.ends:
            self.assemble(self.ends[unit], position)

    def assemble(self, units: tuple[str, ...], position: int) -> None:
        """Bring a group's matrices together, and compute the updates of the group before it."""
        after = [self.updated[unit] for unit in units]
        for tier in reversed(range(self.tiers)):
            after = [
                self.add(
                    *(Kind.ASSEMBLE, f"{EXCHANGE_STREAM}.{tier}"),
                    after=after,
                    units=units,
                    tier=tier,
                    position=position,
                )
            ]
        self.orthogonalize(position)
        self.assembling.append((units, after[0]))

    def orthogonalize(self, position: int) -> None:
        """Compute the updates of the matrices that are on their way to their hosts, and send them back."""
        for units, after in self.assembling:
            done = self.add(Kind.ORTHOGONALIZE, OPTIM_STREAM, after=[after], units=units, position=position)
            for tier in range(self.tiers):
                done = self.add(
                    *(Kind.RETURN, f"{EXCHANGE_STREAM}.{tier}"),
                    after=[done],
                    units=units,
                    tier=tier,
                    position=position,
                )
            self.returning.append((units, done))
        self.assembling.clear()

    def apply(self, position: int) -> None:
        """Apply the updates of the matrices that come back from their hosts."""
        for units, after in self.returning:
            done = self.add(Kind.APPLY, OPTIM_STREAM, after=[after], units=units, position=position)
            self.updated |= dict.fromkeys(units, done)
        self.returning.clear()

    def fetch(self, unit: str, *, after: Iterable[int], position: int) -> None:
        """Add the copy of a unit's optimizer state to the device, where the unit has an offload slot."""
        if unit in self.offload_slots:
            self.fetched[unit] = self.add(
                Kind.FETCH, FETCH_STREAM, after=after, units=(unit,), position=position
            )

    def step(self) -> None:
        """Add the end of the step: with clipping all updates, then the gathers of updated parameters, both in
        the order of first use. Without clipping each unit was updated when its gradient was reduced."""
        order = sorted(self.order, key=lambda unit: self.first_uses[unit])
        if not self.clip:
            self.orthogonalize(self.positions - 1)
            self.apply(self.positions - 1)
        step = self.add(Kind.STEP, COMPUTE_STREAM, after=self.reduced.values() if self.clip else ())
        if self.clip:
            self.options_read = step
            for unit in order:
                self.update(unit, after=[step, self.reduced[unit]])
            self.orthogonalize(-1)
            self.apply(-1)
        for _, joined in itertools.groupby(order, key=lambda unit: self.first_uses[unit]):
            units = tuple(joined)
            needed = [step, *(self.updated[unit] for unit in units)]  # which launches it, at the earliest
            for tier in reversed(range(self.tiers)):
                needed = [self.add(Kind.PARAM_GATHER, f"gather.{tier}", after=needed, units=units, tier=tier)]
            self.param_gathered |= dict.fromkeys(units, needed[0])

    def with_wraps(self) -> tuple[Task, ...]:
        """The tasks with their edges from the step before.

        Each stream goes on in order. A unit's first unshard needs its gathered update. Learning rates may
        change when all updates have read them and all states are stored. An offload slot is filled when it
        has been emptied. The first fetches wait for all updates, so that no task is launched while it still
        runs for the step before.
        """
        heads: dict[str, int] = {}
        for task in self.tasks:
            heads.setdefault(task.stream, task.index)
        order = {head: {self.tail[stream]} for stream, head in heads.items()}
        needs: dict[int, set[int]] = {}
        for unit, param_gathered in self.param_gathered.items():
            needs.setdefault(self.first_unshard[unit], set()).add(param_gathered)
        if self.options_read is not None and self.updated:
            needs.setdefault(self.options_read, set()).update(
                [self.tail[OPTIM_STREAM], *self.stored.values()]
            )
        for unit in self.order[:OFFLOAD_SLOTS] if self.offload_slots else ():
            slot = self.offload_slots[unit]
            needs[self.fetched[unit]] = {self.stored[u] for u, of in self.offload_slots.items() if of == slot}
            needs.setdefault(min(self.tasks[self.fetched[unit]].needs), set()).add(self.tail[OPTIM_STREAM])
        tasks = list(self.tasks)
        for index in order.keys() | needs.keys():
            own = needs.get(index, set())
            tasks[index] = replace(
                tasks[index],
                after_previous=_sorted(order.get(index, set()) | own),
                needs_previous=_sorted(own),
            )
        return tuple(tasks)

    def unshard_live_ranges(self) -> dict[str, tuple[Interval, ...]]:
        accumulation = min(self.accumulation, 3)
        runs = _runs(self.uses, self.requires, self.prefetch, accumulation)
        live_ranges = {
            unit: tuple((max(0, first - self.prefetch), last) for first, last in intervals)
            for unit, intervals in runs.items()
        }
        # A unit that no recorded use needs may be used in an evaluation, so its buffer is always alive.
        always = ((0, len(self.uses) * accumulation - 1),)
        return live_ranges | {unit: always for unit in self.requires if unit not in live_ranges}

    def gradient_live_ranges(self) -> dict[str, tuple[Interval, ...]]:
        order = sorted(self.reduced_at)
        micro_batches = min(self.accumulation, 3)
        live_ranges: dict[str, list[Interval]] = {}
        for micro_batch in range(micro_batches):
            for ordinal, position in enumerate(order, start=micro_batch * len(order)):
                for unit in self.reduced_at[position]:
                    live_ranges.setdefault(unit, []).append((ordinal, ordinal + self.gradient_buffers - 1))
        always = [(0, len(order) * micro_batches + self.gradient_buffers)]
        live_ranges |= {unit: always for unit in self.trainable if unit not in live_ranges}
        return {unit: tuple(intervals) for unit, intervals in live_ranges.items()}


def _sorted(indices: Collection[int]) -> tuple[int, ...]:
    return tuple(sorted(indices))


def _runs(
    uses: Sequence[Use], requires: Mapping[str, tuple[str, ...]], prefetch: int, accumulation: int
) -> dict[str, list[Interval]]:
    """For every unit the (first, last) positions between which it stays unsharded."""
    runs: dict[str, list[Interval]] = {}
    for position in range(len(uses) * accumulation):
        use = uses[position % len(uses)]
        for unit in requires[use.unit] if use.reads else ():
            intervals = runs.setdefault(unit, [])
            if intervals and position <= intervals[-1][1] + 1 + prefetch:
                intervals[-1] = (intervals[-1][0], position)
            else:
                intervals.append((position, position))
    return runs


def _last_backward(
    uses: Sequence[Use], requires: Mapping[str, tuple[str, ...]], trainable: Collection[str]
) -> dict[int, tuple[str, ...]]:
    """By index of a use: the units whose gradients are complete after it."""
    last: dict[str, int] = {}
    backward = False
    for index, use in enumerate(uses):
        backward |= use.phase == "backward"
        if backward:  # a forward from here on computes again, and what its unit's backward needed comes after
            last |= dict.fromkeys(requires[use.unit], index)
    # A trained unit that no backward use needs has no gradient to wait for: it goes with the last use.
    seen = {unit for use in uses for unit in requires[use.unit]}
    at: dict[int, list[str]] = {}
    for unit in trainable:
        if unit in seen:
            at.setdefault(last.get(unit, len(uses) - 1), []).append(unit)
    return {index: tuple(at[index]) for index in sorted(at)}


def _between(uses: Sequence[Use], copy_uses: int, saved: Collection[str]) -> dict[str, Interval]:
    """By unit that may save its activations the first and last use during which they are on the host alone:
    of those with one forward and one backward, far enough apart."""
    found = {}
    for unit in saved:
        own = [index for index, use in enumerate(uses) if use.unit == unit]
        phases = [uses[index].phase for index in own]
        if phases == ["forward", "backward"] and own[0] + copy_uses <= own[1] - copy_uses:
            found[unit] = own[0] + copy_uses, own[1] - copy_uses
    return found


def _reduces(
    completed_at: Mapping[int, tuple[str, ...]], message_bytes: int, gradient_bytes: Mapping[str, int]
) -> list[list[int]]:
    """The uses whose gradients are reduced together, in order."""
    found: list[list[int]] = []
    together = 0
    for use, units in completed_at.items():
        nbytes = sum(gradient_bytes.get(unit, 0) for unit in units)
        if message_bytes and found and together + nbytes <= message_bytes:
            found[-1].append(use)
            together += nbytes
        else:
            found.append([use])
            together = nbytes
    return found
