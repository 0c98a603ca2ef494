"""A slowest tier that nobody waits for: one group's plan, and how often groups can exchange parameters so
that the link is never waited for.

With T(b) the seconds of exchanging b bytes and t those of a step beside it, a round of P/n bytes that is due
d steps later hides where T(P/n) ≤ d·t, and rounds every h steps do not pile up where T(P/n) ≤ h·t. *periodic*
has h = d + 1, so that each round is applied before the next is sent; every parameter is then exchanged each

    H = n·h ≥ n·(⌈T(P/n)/t⌉ + 1) steps.

Of all n the one is taken with which groups are the least out of date: H/2 steps on average and d, of which
each counts as ``STEPS_OF_DELAY``, for it was seen to harm as much. With outer momentum H is at least
``LEAST_INTERVAL``, however fast the link is: what groups move in a few steps points the same way round after
round, and momentum adds it up.

What a group keeps of the others lies on the device; where the host's memory may be taken and a group's step
is shorter by more than the gap when the plan has that room, on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

from hzplan.core.layout import bucketise
from hzplan.core.relaxed import (
    DECAY,
    MIXING,
    OUTER_LR,
    OUTER_MOMENTUM,
    PLACES,
    RULES,
    Place,
    Policy,
    Rule,
    Timetable,
    parts_of_units,
)
from hzplan.core.wire import FORMATS, Format, packed_bytes
from hzplan.cost.collectives import with_ranks
from hzplan.cost.curves import interpolate
from hzplan.cost.interference import MAX_COMPUTE_LOSS
from hzplan.errors import UserError
from hzplan.formats.plan import RelaxedTier
from hzplan.formats.profile import Profile
from hzplan.solver.search import Request
from hzplan.solver.solve import Outcome, Solved

MOST_PARTS = 256
"""Parts that are tried."""
LOOKS = 4
"""How many messages of next to no bytes it takes to agree on what became of a round."""
STEPS_OF_DELAY = 10.0
"""How many steps of the interval one step of the delay harms as much as: in docs/relaxed.md nine steps of
delay cost more than eighty of the interval."""
LEAST_INTERVAL = 16
"""Steps between two exchanges of a parameter under outer momentum, at least: with 8 to 32 groups took as many
steps to a loss, with 4 1.3 times as many (docs/relaxed.md)."""
LEAST_GAIN = 0.05
"""By how much more sequences a second groups have to train that do not wait, else they wait."""

NUMBERS: Mapping[str, str] = {
    "interval": "interval",
    "fragments": "parts",
    "delay": "delay",
    "mixing": "mixing",
    "outer_lr": "outer_lr",
    "momentum": "momentum",
    "decay": "decay",
}

NAMES: Mapping[str, Sequence[str]] = {"wire": FORMATS, "copies": PLACES}


@dataclass(frozen=True)
class Allowed:
    """What a user allows by ``--allow-stale``: a rule, and what of it is decided already."""

    rule: Rule
    wire: Format = "exact"
    interval: int | None = None
    parts: int | None = None
    delay: int | None = None
    mixing: float = MIXING
    outer_lr: float = OUTER_LR
    momentum: float = OUTER_MOMENTUM
    decay: float = DECAY
    copies: Place | None = None

    @property
    def kept(self) -> int:
        """How many values a rank keeps of the other groups for each of its slice of the parameters."""
        return len(Policy(self.rule, 2, Timetable(1, 1, 1), momentum=self.momentum).kept())

    @classmethod
    def parse(cls, text: str) -> Allowed:
        """Read ``periodic``, or as in ``periodic,interval=40,fragments=4,wire=int8``; UserError where it
        makes no sense."""
        name, *given = [part.strip() for part in text.split(",")]
        rule = next((one for one in RULES if one == name), None)
        if rule is None:
            raise UserError(f"--allow-stale {text}: begin with {', '.join(RULES)}")
        found = cls(rule)
        for part in given:
            key, _, value = part.partition("=")
            if key in NAMES:
                if value not in NAMES[key]:
                    raise UserError(f"--allow-stale {part}: {key} is {', '.join(NAMES[key])}")
                named: dict[str, Any] = {key: value}
                found = replace(found, **named)
                continue
            if key not in NUMBERS:
                known = ", ".join([*NUMBERS, *NAMES])
                raise UserError(f"--allow-stale {part}: write {known}, each with =")
            whole = key in ("interval", "fragments", "delay")
            try:
                number = int(value) if whole else float(value)
            except ValueError:
                raise UserError(f"--allow-stale {part}: {value!r} is no number") from None
            if whole and number < 1:
                raise UserError(f"--allow-stale {part}: at least 1")
            given_now: dict[str, Any] = {NUMBERS[key]: number}
            found = replace(found, **given_now)
        return found


@dataclass(frozen=True)
class Relaxed:
    """``profile``, ``request`` and ``solved``: of one group. ``tier``: what is beside its plan; ``alone``:
    the answer of one group that keeps nothing of others, and ``together`` where all ranks wait for each
    other: None where nothing fits or was found."""

    profile: Profile
    request: Request
    solved: Solved
    tier: RelaxedTier
    alone: Solved | None
    together: Solved | None

    @property
    def step_s(self) -> dict[str, float]:
        """Seconds of a step by who trains: one group by itself, all waiting for each other, all without."""
        found = {"one group": (self.alone or self.solved).best.step_s}
        if self.together is not None:
            found["all, waiting"] = self.together.best.step_s
        return found | {"all, relaxed": self.tier.step_s}

    @property
    def sequences_per_s(self) -> dict[str, float]:
        """As ``step_s``."""
        groups = {"one group": 1}
        return {
            name: self.request.global_batch * groups.get(name, self.tier.groups) / step_s
            for name, step_s in self.step_s.items()
        }

    @property
    def pays(self) -> bool:
        """Whether not waiting is faster by enough."""
        found = self.sequences_per_s
        others = [rate for name, rate in found.items() if name != "all, relaxed"]
        return found["all, relaxed"] > (1 + LEAST_GAIN) * max(others)


def relax(
    allowed: Allowed, profile: Profile, request: Request, solve: Callable[[Profile, Request], Outcome]
) -> Relaxed | Outcome:
    """The plan of one group, and its timetable with the others, under a rule; what one group's question came
    to where it has no plan. ``request`` is of all groups; host's memory is for optimizer state and
    activations of who waits or is alone, and for what groups keep of each other.

    UserError where there are no groups, or where what is decided already does not hide.
    """
    groups = prod(profile.mesh.tiers[-1])
    if groups < 2:
        raise UserError(
            f"--allow-stale: mesh {profile.mesh} has one group in its slowest tier, so there is nobody to be "
            "late for; profile on several, or leave it out"
        )
    if profile.parallel is not None or request.target is not None:
        raise UserError("--allow-stale: not with --model-parallel or --for; leave those out, or it")
    if allowed.copies == "host" and profile.host is None:
        raise UserError(
            "--allow-stale copies=host: the profile knows no link to the host's memory; profile again, on "
            "GPUs or with --analytic"
        )
    if request.global_batch % groups:
        raise UserError(f"--global-batch {request.global_batch}: {groups} groups have equal shares of it")
    by_itself = with_ranks(profile, profile.mesh.world // groups)
    questions = 3 + (allowed.copies is None and bool(request.host_bytes))
    request = replace(request, time_limit_s=request.time_limit_s / questions)
    together = solve(profile, request)
    request = replace(request, global_batch=request.global_batch // groups)
    alone = solve(by_itself, request)
    asked = replace(request, host_bytes=0)
    if profile.cluster.device != "cpu":  # where the gather of shares, over the host, has not been measured
        asked = replace(asked, pins=(*request.pins, f"*=*,*,{by_itself.mesh.world}"))

    def relaxed(place: Place) -> Relaxed | Outcome:
        one = by_itself if place == "host" else _keeping(by_itself, allowed)
        outcome = solve(one, asked)
        if not isinstance(outcome, Solved):
            return outcome
        costs = _Costs.of(profile, outcome)
        tier = timetable(replace(allowed, copies=place), costs)
        if place == "host" and request.host_bytes and tier.kept_bytes > request.host_bytes:
            raise UserError(
                f"--allow-stale copies=host: a rank keeps {tier.kept_bytes} bytes of other groups, and "
                f"--host-memory is {request.host_bytes}; allow as much, or leave copies=host out"
            )
        return Relaxed(one, asked, outcome, tier, *(_solved(found) for found in (alone, together)))

    if allowed.copies is not None:
        return relaxed(allowed.copies)
    found = relaxed("device")
    if profile.host is None or not request.host_bytes:
        return found
    try:
        other = relaxed("host")
    except UserError:  # a shorter step may hide less, and copies may be too large
        return found
    near = isinstance(found, Relaxed) and (
        not isinstance(other, Relaxed) or found.tier.step_s <= (1 + request.gap) * other.tier.step_s
    )
    return found if near or not isinstance(other, Relaxed) else other


def _solved(outcome: Outcome) -> Solved | None:
    return outcome if isinstance(outcome, Solved) else None


def _keeping(one: Profile, allowed: Allowed) -> Profile:
    """The profile of a group whose optimizer keeps outer state beside its own: of the parameters' size, in
    float32, and cut like it."""
    optimizer = one.optimizer
    more: dict[str, Any] = {"state_per_element": optimizer.state_per_element + allowed.kept}
    if (matrix := optimizer.matrix) is not None:
        of_matrices = {"state_per_element": matrix.state_per_element + allowed.kept}
        more["matrix"] = matrix.model_copy(update=of_matrices)
    return one.replaced(optimizer=optimizer.model_copy(update=more))


def timetable(allowed: Allowed, costs: _Costs) -> RelaxedTier:
    """How often and in which parts groups exchange what one has under its plan, with copies in a place that
    is decided; UserError where that does not hide, with the least that does."""
    profile, chosen = costs.profile, _chosen(allowed, costs)
    share = min(1.0, chosen.transfer_s / (chosen.every * costs.busy_s))
    step_s = costs.step_s + share * (costs.busy_s - costs.step_s) + chosen.inside_s / chosen.every
    try:
        return RelaxedTier(
            rule=allowed.rule,
            groups=prod(profile.mesh.tiers[-1]),
            tier=profile.cluster.tier_names[-1],
            every=chosen.every,
            parts=chosen.parts,
            delay=chosen.delay,
            wire=allowed.wire,
            mixing=allowed.mixing,
            outer_lr=allowed.outer_lr,
            momentum=allowed.momentum,
            decay=allowed.decay,
            copies=allowed.copies or "device",
            transfer_s=round(chosen.transfer_s, 9),
            step_s=round(step_s, 9),
            busy_s=round(costs.busy_s, 9),
            kept_bytes=4 * allowed.kept * sum(sum(of.values()) for of in costs.slices.values()),
        )
    except ValueError as error:
        raise UserError(f"--allow-stale: {_first(str(error))}") from None


@dataclass(frozen=True)
class _Costs:
    """What a timetable is made of: seconds of one group's step by itself, and while something travels
    throughout; by unit the elements that a rank exchanges, and by level those of its slices; how many times
    as long a transfer takes beside compute, and the seconds in which groups agree."""

    profile: Profile
    one: Profile
    step_s: float
    busy_s: float
    elements: Mapping[str, int]
    slices: Mapping[str, Mapping[int, int]]
    slowdown: float
    agreed_s: float

    @classmethod
    def of(cls, profile: Profile, solved: Solved) -> _Costs:
        """``profile``: of all groups; ``solved``: of one."""
        best, one = solved.best, solved.best.model.profile
        world = one.mesh.world
        disturbs = profile.interference[-1] if profile.interference else None
        loss = min(MAX_COMPUTE_LOSS, disturbs.compute_loss) if disturbs is not None else 0.0
        compute_ns = sum(best.model.compute_ns(use, best.micro_batch) for use in range(len(profile.uses)))
        compute_s = compute_ns * best.schedule.accumulation / 1e9
        slices: dict[str, Counter[int]] = {}
        for unit, levels in best.levels.items():
            specs = best.model.tensors[unit]
            for bucket in bucketise(zip(specs, levels, strict=True), one.mesh) if specs else ():
                if bucket.trainable:
                    level = bucket.levels.optim
                    slices.setdefault(unit, Counter())[level] += bucket.numel // one.mesh.shards[level]
        shards = one.mesh.shards
        return cls(
            profile,
            one,
            best.step_s,
            best.step_s + compute_s * loss / (1 - loss),
            {unit: sum(n * shards[k] for k, n in of.items()) // world for unit, of in slices.items()},
            slices,
            disturbs.communication_slowdown if disturbs is not None else 1.0,
            LOOKS * exchange_s(profile, 1, "exact"),
        )

    def option(self, allowed: Allowed, parts: int) -> _Option:
        """Rounds of so many parts, as often and as early as they hide."""
        if allowed.rule == "periodic":
            loads = [0] * parts
            for unit, part in parts_of_units(self.elements, parts).items():
                loads[part] += self.elements[unit]
            most = max(loads)
        else:
            most = -(-sum(self.elements.values()) // parts)
        transfer_s = self.slowdown * exchange_s(self.profile, most, allowed.wire) + self.agreed_s
        steps = max(1, ceil(transfer_s / self.busy_s - 1e-9))
        hides = steps + (allowed.rule == "periodic")
        adds_up = allowed.rule == "periodic" and allowed.momentum > 0
        every = max(hides, ceil(LEAST_INTERVAL / parts)) if adds_up else hides
        return _Option(parts, transfer_s, steps, hides, every, self._inside_s(allowed, parts))

    def _inside_s(self, allowed: Allowed, parts: int) -> float:
        """Seconds that a round takes of a group's ranks themselves, in the mean: ranks with the same slices
        gather what each of them has received a share of; where copies lie on the host what is kept goes both
        ways, and what is sent once more than it does anyway."""
        by_level: dict[int, float] = {}
        for of in self.slices.values():
            for level, count in of.items():
                by_level[level] = by_level.get(level, 0) + 4 * count / parts
        found = sum(self._gathered_s(level, nbytes) for level, nbytes in by_level.items())
        if allowed.copies == "host" and self.profile.host is not None:
            curve = [(point.bytes, point.seconds) for point in self.profile.host.points]
            found += (2 * allowed.kept - 1) * interpolate(curve, sum(by_level.values()))
        return found

    def _gathered_s(self, level: int, nbytes: float) -> float:
        """Seconds in which ranks with the same slices at a level have so many bytes of each other's."""
        mesh = self.one.mesh
        stages = (mesh.stage_in_tier(tier, level, mesh.levels) for tier in range(len(mesh.tiers)))
        return sum(_curve_s(self.one, "all_gather", *stage, nbytes) for stage in stages if stage)


def _chosen(allowed: Allowed, costs: _Costs) -> _Option:
    """The least out of date of what hides and is as the user has it."""
    units = len(costs.elements)
    most = units if allowed.rule == "periodic" else MOST_PARTS
    if allowed.parts is not None and allowed.parts > most:
        why = f"{units} units are trained, and each fragment has one" if most == units else "each is tried"
        raise UserError(f"--allow-stale fragments={allowed.parts}: at most {most}; {why}")
    least = 2 if allowed.rule == "delta" else 1  # a difference is mended before it is sent again
    counts = [allowed.parts] if allowed.parts else range(min(least, most), min(most, MOST_PARTS) + 1)
    options = [costs.option(allowed, parts) for parts in counts]
    chosen = min(options, key=lambda one: one.age)
    if (interval := allowed.interval) is not None:
        fitting = [one for one in options if interval % one.parts == 0 and one.hides <= interval // one.parts]
        if not fitting:
            shortest = min(one.hides * one.parts for one in options)
            raise UserError(
                f"--allow-stale interval={interval}: transfers over the "
                f"{costs.profile.cluster.tier_names[-1]} do not hide: they take {chosen.transfer_s:.3g} s "
                f"each, a step {costs.busy_s:.3g} s; the shortest interval that hides is {shortest}"
            )
        chosen = min((replace(one, every=interval // one.parts) for one in fitting), key=lambda one: one.age)
    if (delay := allowed.delay) is not None:
        if delay < chosen.delay:
            raise UserError(
                f"--allow-stale delay={delay}: a transfer takes {chosen.transfer_s:.3g} s, a step "
                f"{costs.busy_s:.3g} s; the shortest delay that hides it is {chosen.delay}"
            )
        every = max(chosen.every, delay + 1) if allowed.rule == "periodic" else chosen.every
        chosen = replace(chosen, delay=delay, every=chosen.every if allowed.interval is not None else every)
    return chosen


def _first(text: str) -> str:
    """The line of pydantic's report that says what is wrong."""
    lines = [line.strip() for line in text.splitlines() if "Value error, " in line]
    return lines[0].removeprefix("Value error, ").partition(" [type=")[0] if lines else text


@dataclass(frozen=True)
class _Option:
    """A number of parts: seconds of a round, steps until it is due, the least steps between two with which
    they hide, and those taken; seconds that a round takes inside of a group."""

    parts: int
    transfer_s: float
    delay: int
    hides: int
    every: int
    inside_s: float

    @property
    def age(self) -> tuple[float, int]:
        """Steps that a group's view of the others is old, those of the delay weighed; fewer parts where that
        is equal."""
        return self.every * self.parts / 2 + STEPS_OF_DELAY * self.delay, self.parts


def exchange_s(profile: Profile, elements: int, wire: Format) -> float:
    """Seconds in which ranks at the same place of all groups of the slowest tier average so many values."""
    low, high = profile.mesh.tier_bounds[-1]
    nbytes = packed_bytes(wire, elements, 4)
    return sum(_curve_s(profile, how, low, high, nbytes) for how in ("reduce_scatter", "all_gather"))


def _curve_s(profile: Profile, operation: str, low: int, high: int, nbytes: float) -> float:
    found = [c for c in profile.collectives if (c.operation, c.low, c.high) == (operation, low, high)]
    if not found:
        raise UserError(
            f"--allow-stale: the profile has no {operation} between levels {low} and {high}; profile again"
        )
    return interpolate([(point.bytes, point.seconds) for point in found[0].points], nbytes)
