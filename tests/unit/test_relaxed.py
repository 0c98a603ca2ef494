"""Groups that do not wait for each other compute what their equations say, whatever is late or resumed."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hzplan.checkpoint.checkpoints import Checkpoints
from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.relaxed import Policy, Rule, Timetable, parts_of_units
from hzplan.core.wire import Format
from hzplan.errors import UserError
from hzplan.runtime.apply import Choice, apply, full_parameters
from hzplan.runtime.backends.threads import Post, ThreadWorld
from hzplan.runtime.optimizer import ShardedOptimizer
from hzplan.runtime.relaxed import roll, rules, sync
from hzplan.runtime.relaxed.roll import Record, Roll, following
from hzplan.runtime.relaxed.sync import Groups
from tests.long import shorter

STEPS, RATE = 50, 0.01
Values = dict[str, Tensor]


class Net(nn.Module):
    """Blocks of their own sizes, so that units and their slices differ."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [6, 10, 8, 12, 5]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = torch.tanh(layer(values))
        return values


def batch(group: int, step: int, rank: int, index: int) -> Tensor:
    """What a rank trains on."""
    generator = torch.Generator().manual_seed(group * 100_000 + step * 100 + rank * 10 + index)
    return torch.randn(3, 6, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, values: Tensor) -> Tensor:
    return (model(values) - values.sum(1, keepdim=True)).square().mean()


@dataclass
class Run:
    """Groups of two ranks each, as threads. ``accumulations``: of each group."""

    policy: Policy
    accumulations: tuple[int, ...]
    steps: int = STEPS
    ranks: int = 2
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    mesh: str = ""
    levels: Levels | None = None
    others: Mapping[str, Levels] = field(default_factory=dict)  # of some parameters
    clip: bool = False
    store: Any = field(default_factory=dist.HashStore)
    begin: Path | None = None  # the folder of checkpoints to go on from
    skips: tuple[int, int] = (-1, -1)  # the group and the step that is left out
    arguments: dict[str, Any] = field(default_factory=lambda: {"eps": 1e-4})
    sent: list[int] = field(default_factory=list)  # elements in a turn, by rank of the first group
    on_host: dict[tuple[int, int], int] = field(default_factory=dict)  # bytes, by group and rank

    def choice(self, model: nn.Module, group: int) -> Choice:
        mesh = Mesh.parse(self.mesh or str(self.ranks))
        plan = make_plan_of(model, mesh, self.levels or Levels(1, 1, 1), self.accumulations[group], self.clip)
        return Choice(**{**plan, "levels": {**plan["levels"], **self.others}, "relaxed": self.policy})

    def rank(
        self, initial: nn.Module, group: int, number: int, post: Post, each: Callable[..., None] | None = None
    ) -> ShardedOptimizer:
        model = copy.deepcopy(initial)
        groups = Groups(group, lambda: self.store, float(self.accumulations[group]), patience_s=20)
        model, optimizer = apply(
            model,
            self.choice(model, group),
            self.optimizer,
            world=ThreadWorld(post, number),
            among=groups,
            **{"lr": RATE, **self.arguments},
        )
        loaded = None
        if self.begin is not None:
            loaded = Checkpoints(self.begin / f"group-{group}").load(model, optimizer)
            assert loaded is not None
        begun = optimizer.engine.meet_groups(loaded.position.step if loaded else 0)
        step = begun
        while step < self.steps:
            for index in range(self.accumulations[group]):
                loss = loss_of(model, batch(group, step, number, index)) / self.accumulations[group]
                loss.backward()
            if self.clip:
                optimizer.clip_grad_norm_(0.5)
            optimizer.skip_step() if self.skips == (group, step) else optimizer.step()
            if each is not None:
                each(group, number, step, model, optimizer)
            step = max(step + 1, optimizer.engine.meet_groups())
        return optimizer

    def parameters(self, initial: nn.Module) -> list[Values]:
        """What every group has in the end."""
        found: dict[int, Values] = {}
        masks: dict[str, list[Tensor]] = {}

        def one(group: int, number: int, post: Post) -> None:
            optimizer = self.rank(initial, group, number, post)
            values = full_parameters(optimizer)
            self.on_host[group, number] = sum(tensor.nbytes for tensor in optimizer.engine.tasks.on_host)
            relaxed = optimizer.engine.relaxed
            assert relaxed is not None
            if group == 0:
                note_parts(optimizer, masks, initial)
                self.sent.append(sum(places[-1].end for places in relaxed._parts))
                self.numel = sum(bucket.layout.numel for bucket in relaxed._buckets)
            if number == 0:
                found[group] = values
            optimizer.engine.close()

        in_threads(self, one)
        self.masks = masks
        return [found[group] for group in range(self.policy.groups)]


def in_threads(run: Run, one: Callable[[int, int, Post], None]) -> None:
    posts = [Post(run.ranks) for _ in range(run.policy.groups)]
    failed: list[BaseException] = []

    def guarded(group: int, number: int) -> None:
        try:
            one(group, number, posts[group])
        except BaseException as error:
            failed.append(error)
            posts[group].failed.set()

    threads = [
        threading.Thread(target=guarded, args=(group, number), daemon=True)
        for group in range(run.policy.groups)
        for number in range(run.ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    if failed:
        raise failed[0]
    assert not any(thread.is_alive() for thread in threads)


def make_plan_of(
    model: nn.Module, mesh: Mesh, levels: Levels, accumulation: int, clip: bool
) -> Mapping[str, Any]:
    """A choice's fields, everything at the same levels."""
    from hzplan.models.workload import Workload
    from tests.plans import recorded_uses

    workload = Workload(
        name="net",
        build=lambda: copy.deepcopy(model),
        batch=lambda count, generator: torch.randn(count + 1, 6, generator=generator, dtype=torch.float64),
        loss=loss_of,
        seq_len=1,
        vocab=None,
    )
    return {
        "mesh": mesh,
        "levels": {name: levels for name, _ in model.named_parameters()},
        "uses": recorded_uses(workload, copy.deepcopy(model)),
        "prefetch": 1,
        "accumulation": accumulation,
        "clip": clip,
    }


def note_parts(optimizer: ShardedOptimizer, masks: dict[str, list[Tensor]], model: nn.Module) -> None:
    """By parameter the elements of each part: which is the runtime's choice, not its mathematics."""
    relaxed = optimizer.engine.relaxed
    assert relaxed is not None
    shapes = {name: p.shape for name, p in model.named_parameters()}
    for part, places in enumerate(relaxed._parts):
        for place in places:
            start = place.bucket.bounds(place.bucket.layout.levels.optim)[0]
            for index, low, high in (
                piece
                for first, end in place.pieces
                for piece in place.bucket.layout.pieces(start + first, start + end)
            ):
                name = place.bucket.layout.tensors[index].name
                of = masks.setdefault(
                    name, [torch.zeros(shapes[name], dtype=torch.bool) for _ in relaxed._parts]
                )
                origin = place.bucket.layout.offsets[index]
                of[part].view(-1)[low - origin : high - origin] = True


# The same, written down from the equations, for one process.


def simulated(run: Run, initial: nn.Module) -> list[Values]:
    """Every group's parameters in the end."""
    policy, (every, parts, delay) = run.policy, run.policy.timetable
    models = [copy.deepcopy(initial) for _ in range(policy.groups)]
    optimizers = [run.optimizer(model.parameters(), lr=RATE, **run.arguments) for model in models]
    outer = {name: p.detach().clone() for name, p in initial.named_parameters()}
    velocity = {name: torch.zeros_like(p) for name, p in outer.items()}
    drift = [{name: torch.zeros_like(p) for name, p in outer.items()} for _ in models]
    weights = torch.tensor(run.accumulations, dtype=torch.float64)
    weights /= weights.sum()
    posted: dict[int, list[Values]] = {}
    for step in range(run.steps):
        for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            for rank in range(run.ranks):
                for index in range(run.accumulations[group]):
                    loss = loss_of(model, batch(group, step, rank, index))
                    (loss / run.accumulations[group] / run.ranks).backward()
            if run.clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if run.skips != (group, step):
                optimizer.step()
        now = [{name: p.data for name, p in model.named_parameters()} for model in models]

        def apply_round(number: int, now: list[Values] = now) -> None:
            sent = posted.pop(number)
            for name in [*outer]:
                mask = run.masks[name][number % parts]
                mean = sum(w * of[name] for w, of in zip(weights, sent, strict=True))
                if policy.rule == "periodic":
                    step_of = outer[name] - mean  # the mean pseudo-gradient
                    speed = policy.momentum * velocity[name] + step_of
                    new = outer[name] - policy.outer_lr * (step_of + policy.momentum * speed)
                    velocity[name] = torch.where(mask, speed, velocity[name])
                    outer[name] = torch.where(mask, new, outer[name])
                for group, values in enumerate(now):
                    local, had = values[name], sent[group][name]
                    if policy.rule == "periodic":
                        new = policy.mixing * local + (1 - policy.mixing) * outer[name]
                    elif policy.rule == "plain":
                        new = mean
                    elif policy.rule == "delta":
                        new = local + mean - had
                    else:
                        moved = local - had
                        old = drift[group][name]
                        kept = moved if number < parts else policy.decay * old + (1 - policy.decay) * moved
                        drift[group][name] = torch.where(mask, kept, old)
                        new = mean + kept
                    local.copy_(torch.where(mask, new, local))

        done = step + 1
        if delay and done > delay and (done - delay) % every == 0:
            apply_round((done - delay) // every - 1)
        if done % every == 0:
            posted[done // every - 1] = [{n: p.clone() for n, p in values.items()} for values in now]
            if not delay:
                apply_round(done // every - 1)
    return [{name: p.detach().clone() for name, p in model.named_parameters()} for model in models]


def close(mine: list[Values], theirs: list[Values], bound: float = 1e-10) -> None:
    for group, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        for name, value in b.items():
            off = float((a[name] - value).abs().max() / value.abs().max())
            assert off < bound, (group, name, off)


@pytest.fixture(autouse=True)
def lively(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is lost is noticed sooner than over a real link."""
    monkeypatch.setattr(roll, "SILENT_S", 1.0)
    monkeypatch.setattr(roll, "BEAT_S", 0.1)


@pytest.fixture
def initial() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


@pytest.mark.parametrize("rule", ["periodic", "plain", "delta", "ema"])
@pytest.mark.parametrize("table", [(1, 1, 1), (4, 1, 3), (2, 3, 2), (2, 4, 5), (1, 4, 3), (3, 2, 0)], ids=str)
def test_groups_compute_their_equations(initial: nn.Module, rule: Rule, table: tuple[int, int, int]) -> None:
    if rule == "delta" and table[2] == table[0] * table[1]:
        pytest.skip("corrections of the same difference twice: refused")
    run = Run(Policy(rule, 2, Timetable(*table)), (2, 1))
    mine = run.parameters(initial)
    close(mine, simulated(run, initial))


def test_every_step_and_an_outer_step_of_one_is_synchronous_training(initial: nn.Module) -> None:
    """Groups of two ranks, and one process that sees all of their batches."""
    policy = Policy("periodic", 2, Timetable(1, 1, 0), mixing=0.0, outer_lr=1.0, momentum=0.0)
    run = Run(policy, (1, 1), optimizer=torch.optim.SGD, arguments={})
    mine = run.parameters(initial)
    model = copy.deepcopy(initial)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        for group in range(2):
            for rank in range(2):
                (loss_of(model, batch(group, step, rank, 0)) / 4).backward()
        optimizer.step()
    together = {name: p.detach() for name, p in model.named_parameters()}
    close(mine, [together, together])


@pytest.mark.parametrize("rule", ["periodic", "plain", "delta", "ema"])
@pytest.mark.parametrize("table", [(2, 3, 2), (2, 2, 0)], ids=str)
def test_ranks_with_the_same_slices_send_a_share_each(
    initial: nn.Module, rule: Rule, table: tuple[int, int, int]
) -> None:
    """Of four ranks two, all and one have the same slices; shares of eleven elements do not come out even."""
    sharded = {f"layers.{i}.{of}": Levels(0, 0, 2) for i in (0, 3) for of in ("weight", "bias")}
    replicated = {"layers.2.weight": Levels(0, 0, 0), "layers.2.bias": Levels(0, 0, 0)}
    run = Run(Policy(rule, 2, Timetable(*table)), (2, 1), ranks=4, steps=20)
    run.mesh, run.levels, run.others = "2,2", Levels(0, 0, 1), sharded | replicated
    close(run.parameters(initial), simulated(run, initial))
    assert len(run.sent) == 4 and sum(run.sent) == run.numel


@pytest.mark.parametrize("table", [(1, 60, 4), (1, 60, 0)], ids=str)
def test_more_parts_than_a_share_has_elements(initial: nn.Module, table: tuple[int, int, int]) -> None:
    """Ranks with the same slices of five elements: of most parts none sends any."""
    run = Run(Policy("plain", 2, Timetable(*table)), (2, 1), levels=Levels(0, 0, 0))
    close(run.parameters(initial), simulated(run, initial))


def test_values_are_changed_piece_by_piece(initial: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "ELEMENTS", 7)
    run = Run(Policy("ema", 2, Timetable(2, 3, 2)), (2, 1))
    close(run.parameters(initial), simulated(run, initial))


@pytest.mark.parametrize(
    "levels", [Levels(0, 0, 0), Levels(0, 0, 1), Levels(0, 1, 1), Levels(1, 1, 1)], ids=str
)
@pytest.mark.parametrize("clip", [False, True])
def test_inside_of_a_group_all_is_as_planned(initial: nn.Module, levels: Levels, clip: bool) -> None:
    run = Run(Policy("periodic", 2, Timetable(2, 2, 2)), (1, 2), levels=levels, clip=clip)
    close(run.parameters(initial), simulated(run, initial))


def test_a_step_that_is_left_out_leaves_rounds_where_they_are(initial: nn.Module) -> None:
    run = Run(Policy("periodic", 2, Timetable(2, 2, 3)), (1, 2), clip=True, skips=(1, 19))
    close(run.parameters(initial), simulated(run, initial))


def test_parts_are_all_there_is_and_do_not_overlap(initial: nn.Module) -> None:
    for rule in ("periodic", "ema"):
        run = Run(Policy(rule, 2, Timetable(2, 3, 2)), (1, 1), steps=1)
        run.parameters(initial)
        for masks in run.masks.values():
            assert torch.stack(masks).sum(0).eq(1).all()


def test_one_rank_a_group_and_three_groups(initial: nn.Module) -> None:
    run = Run(Policy("ema", 3, Timetable(2, 2, 3)), (1, 2, 1), ranks=1, levels=Levels(0, 0, 0))
    close(run.parameters(initial), simulated(run, initial))


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_what_travels_narrow_leaves_groups_the_same_to_the_bit(initial: nn.Module, wire: Format) -> None:
    policy = Policy("periodic", 2, Timetable(3, 1, 2), wire=wire, mixing=0.0)
    run = Run(policy, (1, 2), steps=STEPS // 3 * 3 + 2)  # the last update applies a round
    first, second = run.parameters(initial)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    exact = Run(policy._replace(wire="exact"), (1, 2), steps=run.steps).parameters(initial)[0]
    apart = max(float((first[n] - exact[n]).abs().max() / exact[n].abs().max()) for n in exact)
    assert 0 < apart < 0.2


@pytest.mark.parametrize(
    "rule", shorter(["periodic", "plain", "delta", "ema"], without={"periodic", "plain", "delta"})
)
def test_copies_on_the_host_are_worth_the_same(initial: nn.Module, rule: Rule) -> None:
    """To the bit; and they are not what a plan counts as the device's."""
    policy = Policy(rule, 2, Timetable(2, 3, 2))
    run = Run(policy, (2, 1))
    there = policy._replace(copies="host")
    host = dataclasses.replace(run, policy=there, store=dist.HashStore(), on_host={})
    for mine, other in zip(run.parameters(initial), host.parameters(initial), strict=True):
        assert all(torch.equal(value, other[name]) for name, value in mine.items())
    assert not any(run.on_host.values())
    everything = sum(parameter.nbytes for parameter in initial.parameters())
    for ranks in (host.on_host[group, 0] + host.on_host[group, 1] for group in range(2)):
        assert ranks >= len(policy.kept()) * everything


@pytest.mark.parametrize("rule", shorter(["periodic", "ema"], without={"periodic"}))
@pytest.mark.parametrize(
    "optimizer", shorter([torch.optim.AdamW, torch.optim.SGD], without={torch.optim.SGD})
)
@pytest.mark.parametrize("same_store", [False, True])
def test_a_run_that_was_saved_goes_on_as_if_it_had_not_been(
    initial: nn.Module,
    rule: Rule,
    optimizer: type[torch.optim.Optimizer],
    same_store: bool,
    tmp_path: Path,
) -> None:
    """Saved while rounds are under way; an optimizer may have no state of its own. The store is new, or still
    knows the groups that have ended."""
    policy = Policy(rule, 2, Timetable(3, 4, 5), copies="host" if same_store else "device")
    run = Run(policy, (2, 1), ranks=1, levels=Levels(0, 0, 0), optimizer=optimizer)
    run.arguments = {"eps": 1e-4} if optimizer is torch.optim.AdamW else {}
    whole = run.parameters(initial)
    saved_after = 26
    assert policy.timetable.in_flight(saved_after)

    def save(group: int, number: int, step: int, model: nn.Module, optimizer: ShardedOptimizer) -> None:
        if step + 1 == saved_after:
            checkpoints = Checkpoints(tmp_path / f"group-{group}")
            checkpoints.save(model, optimizer, saved_after)
            checkpoints.settle()

    store = dist.HashStore()
    half = dataclasses.replace(run, steps=saved_after, store=store)
    in_threads(half, lambda group, number, post: half.rank(initial, group, number, post, save).engine.close())
    rest = dataclasses.replace(run, store=store if same_store else dist.HashStore(), begin=tmp_path)
    for before, after in zip(whole, rest.parameters(initial), strict=True):
        assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Policy("ema", 2, Timetable(3, 4, 5)), Policy("periodic", 2, Timetable(3, 4, 5))),
        (Policy("periodic", 2, Timetable(3, 4, 5)), Policy("periodic", 2, Timetable(2, 2, 3))),
        (Policy("periodic", 2, Timetable(3, 4, 5)), Policy("periodic", 2, Timetable(3, 2, 5))),
    ],
    ids=["another rule", "another timetable", "other parts"],
)
def test_under_another_policy_a_run_goes_on_with_nothing_under_way(
    initial: nn.Module, before: Policy, after: Policy, tmp_path: Path
) -> None:
    """Outer weights are the checkpoint's where the rule keeps any, else those that a group has."""
    saved_after = 26
    assert before.timetable.in_flight(saved_after)
    first = Run(before, (1, 1), ranks=1, levels=Levels(0, 0, 0), steps=saved_after)
    kept: dict[int, dict[str, Tensor]] = {}

    def save(group: int, number: int, step: int, model: nn.Module, optimizer: ShardedOptimizer) -> None:
        if step + 1 == saved_after:
            checkpoints = Checkpoints(tmp_path / f"group-{group}")
            checkpoints.save(model, optimizer, saved_after)
            checkpoints.settle()
            kept[group] = outer_of(optimizer)

    def outer_of(optimizer: ShardedOptimizer) -> dict[str, Tensor]:
        relaxed = optimizer.engine.relaxed
        assert relaxed is not None
        found = {}
        for bucket in relaxed._buckets:
            outer = relaxed._slices[id(bucket)].kept.get("outer", bucket.master)
            found[bucket.layout.tensors[0].name] = outer.clone()
        return found

    def train(group: int, number: int, post: Post) -> None:
        first.rank(initial, group, number, post, save).engine.close()

    in_threads(first, train)
    if before.rule != "periodic":  # groups that differ would not begin together
        shutil.rmtree(tmp_path / "group-1")
        shutil.copytree(tmp_path / "group-0", tmp_path / "group-1")
        kept[1] = kept[0]
    second = Run(after, (1, 1), ranks=1, levels=Levels(0, 0, 0), steps=saved_after, begin=tmp_path)
    found: dict[int, dict[str, Tensor]] = {}

    def begin(group: int, number: int, post: Post) -> None:
        optimizer = second.rank(initial, group, number, post)
        relaxed = optimizer.engine.relaxed
        assert relaxed is not None and not relaxed._in_flight
        found[group] = outer_of(optimizer)
        optimizer.engine.close()

    in_threads(second, begin)
    for group in range(2):
        assert all(torch.equal(value, kept[group][name]) for name, value in found[group].items())


@pytest.mark.parametrize(
    "levels", shorter([Levels(1, 1, 1), Levels(0, 0, 0)], without={Levels(0, 0, 0)}), ids=str
)
def test_a_group_that_dies_is_done_without_and_comes_back(initial: nn.Module, levels: Levels) -> None:
    """In the end groups have the same outer weights, to the bit."""
    policy = Policy("periodic", 2, Timetable(2, 2, 2))
    run = Run(policy, (1, 1), ranks=2, steps=700, levels=levels)
    found: dict[int, list[Tensor]] = {}
    back = threading.Event()
    waited: list[float] = []

    def one(group: int, number: int, post: Post) -> None:
        if group == 1:
            short = dataclasses.replace(run, steps=9)
            optimizer = short.rank(initial, group, number, post)
            optimizer.engine.synchronize()
            die(optimizer)
            time.sleep(1.0)
            assert number or back.set() is None
            again = dataclasses.replace(run)
            optimizer = again.rank(initial, group, number, Posts.second(run, post))
        else:
            optimizer = run.rank(initial, group, number, post, slowed(back))
        relaxed = optimizer.engine.relaxed
        assert relaxed is not None
        optimizer.engine.synchronize()
        found[2 * group + number] = [relaxed._slices[id(b)].kept["outer"] for b in relaxed._buckets]
        waited.append(relaxed.waited_s)
        assert group or relaxed.missed >= 1
        assert relaxed.applied > 20
        optimizer.engine.close()

    in_threads(run, one)
    for number in range(2):
        assert all(torch.equal(a, b) for a, b in zip(found[number], found[2 + number], strict=True))


@pytest.mark.long
def test_a_group_that_others_went_on_without_comes_back_by_itself(
    initial: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its link is gone, and its process is not: it asks to be let in, between two steps."""
    monkeypatch.setattr(sync, "RETRY_S", 0.2)
    run = Run(Policy("periodic", 2, Timetable(2, 2, 2)), (1, 1), steps=700)
    outer: dict[int, list[Tensor]] = {}

    def cut(group: int, number: int, step: int, model: nn.Module, optimizer: ShardedOptimizer) -> None:
        time.sleep(0.002)
        relaxed = optimizer.engine.relaxed
        if group == 1 and step == 20:
            assert relaxed is not None and relaxed._link is not None
            optimizer.engine.synchronize()
            relaxed._link.abandon()

    def one(group: int, number: int, post: Post) -> None:
        optimizer = run.rank(initial, group, number, post, cut)
        optimizer.engine.synchronize()
        relaxed = optimizer.engine.relaxed
        assert relaxed is not None and relaxed._out_since is None
        assert relaxed.missed >= 1 and relaxed.applied > 30
        outer[2 * group + number] = [relaxed._slices[id(b)].kept["outer"] for b in relaxed._buckets]
        optimizer.engine.close()

    in_threads(run, one)
    assert all(
        torch.equal(a, b)
        for number in range(2)
        for a, b in zip(outer[number], outer[2 + number], strict=True)
    )


def test_groups_that_do_not_fit_are_told(initial: nn.Module) -> None:
    run = Run(Policy("periodic", 2, Timetable(2, 2, 2)), (1, 1), ranks=1, levels=Levels(0, 0, 0), steps=4)
    other = dataclasses.replace(run, policy=run.policy._replace(momentum=0.5))

    def one(group: int, number: int, post: Post) -> None:
        (other if group else run).rank(initial, group, number, post).engine.close()

    with pytest.raises(UserError, match="another model, plan or number of ranks"):
        in_threads(run, one)


def test_what_is_not_finite_stays_with_its_group(initial: nn.Module) -> None:
    """The round is not applied anywhere."""
    run = Run(Policy("periodic", 2, Timetable(4, 1, 2)), (1, 1), ranks=1, levels=Levels(0, 0, 0), steps=12)
    found: dict[int, bool] = {}

    def spoil(group: int, number: int, step: int, model: nn.Module, optimizer: ShardedOptimizer) -> None:
        if group == 1 and step == 2:
            optimizer.engine.synchronize()
            optimizer.updates.pieces[0].param.data.fill_(float("nan"))

    def one(group: int, number: int, post: Post) -> None:
        optimizer = run.rank(initial, group, number, post, spoil)
        found[group] = all(bool(value.isfinite().all()) for value in full_parameters(optimizer).values())
        optimizer.engine.close()

    in_threads(run, one)
    assert found == {0: True, 1: False}


class Posts:
    """A group's second start has messages of its own."""

    made: ClassVar[dict[int, Post]] = {}
    lock = threading.Lock()

    @classmethod
    def second(cls, run: Run, first: Post) -> Post:
        with cls.lock:
            return cls.made.setdefault(id(first), Post(run.ranks))


def slowed(back: threading.Event) -> Callable[..., None]:
    """Each step takes a while, so that the other group finds this one training."""

    def each(group: int, number: int, step: int, model: nn.Module, optimizer: ShardedOptimizer) -> None:
        time.sleep(0.002)

    return each


def die(optimizer: ShardedOptimizer) -> None:
    """As a process that is killed: its connections break, and it gives no more signs of life."""
    relaxed = optimizer.engine.relaxed
    assert relaxed is not None and relaxed._link is not None
    relaxed._link.abandon()
    relaxed._link._groups.clear()
    optimizer.engine.executor.close()


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (Policy("periodic", 1, Timetable(2, 2, 1)), "nobody to be late for"),
        (Policy("periodic", 2, Timetable(2, 2, 5)), "sent again after 4"),
        (Policy("delta", 2, Timetable(2, 2, 4)), "before it is sent again"),
        (Policy("periodic", 2, Timetable(0, 2, 1)), "at least 1"),
        (Policy("periodic", 2, Timetable(2, 2, 1), mixing=1.0), "mixing"),
    ],
)
def test_policies_that_make_no_sense(policy: Policy, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        policy.check()


def test_batch_norm_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).double()
    choice = Choice(
        **make_plan_of(model, Mesh.parse("1"), Levels(0, 0, 0), 1, False),
        relaxed=Policy("periodic", 2, Timetable(2, 1, 1)),
    )
    groups = Groups(0, dist.HashStore)
    with pytest.raises(UserError, match="1 has running statistics"):
        apply(model, choice, torch.optim.SGD, world=ThreadWorld(Post(1), 0), among=groups, lr=0.1)


def test_parts_are_dealt_by_size() -> None:
    """Equal layers in turn, and what is larger by itself."""
    assert parts_of_units({"embed": 90, **{f"layer{i}": 30 for i in range(6)}}, 3) == {
        "embed": 0,
        "layer0": 1,
        "layer1": 2,
        "layer2": 1,
        "layer3": 2,
        "layer4": 1,
        "layer5": 2,
    }


@pytest.mark.parametrize("table", [(1, 1, 1), (3, 4, 5), (2, 2, 0), (1, 20, 10)], ids=str)
def test_rounds_that_are_sent_are_due_once_and_in_flight_between(table: tuple[int, int, int]) -> None:
    times = Timetable(*table)
    flying: set[int] = set()
    for updates in range(1, 100):
        if (due := times.due(updates)) is not None and times.delay:
            flying.remove(due)
        if (sent := times.sent(updates)) is not None and times.delay:
            assert times.sent_after(sent) == updates
            flying.add(sent)
        assert flying == {*times.in_flight(updates)}
        assert len(flying) <= max(1, -(-times.delay // times.every))


def test_who_asks_is_let_in_however_long_it_has_trained_before() -> None:
    """Its signs of life as an asker are counted by themselves; one that has ended does not ask any more."""
    store = dist.HashStore()

    def of(group: int) -> Roll:
        return Roll(lambda: store, group, 2, 1, turn=1, weight=1.0, speaks=True, patience_s=5.0)

    first, second = of(0), of(1)
    first._add("beat/1", 1000)
    first._set("wants/1", "a question")
    record = Record(True, (0,), 0)
    asking = threading.Event()

    def ask() -> None:
        while not asking.is_set():
            second._beat("asks/1")
            time.sleep(0.02)

    thread = threading.Thread(target=ask)
    thread.start()
    assert first._questions(record) == {1: "a question"}
    asking.set()
    thread.join()
    assert of(0)._questions(record) == {}


def test_who_was_killed_before_it_connected_is_not_waited_for() -> None:
    """One that lives is, as long as is allowed."""
    store = dist.HashStore()
    first, second = (
        Roll(lambda: store, group, 2, 1, turn=1, weight=1.0, speaks=True, patience_s=60.0) for group in (0, 1)
    )
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"groups \[1\] have ended"):
        first.await_connections(7, 0, (0, 1), 60.0)
    assert time.monotonic() - began < 20
    second._start()
    with pytest.raises(RuntimeError, match=r"groups \[1\] did not connect"):
        first.await_connections(7, 0, (0, 1), 3.0)
    come = threading.Timer(0.5, second.await_connections, (7, 0, (0, 1), 60.0))
    come.start()
    first.await_connections(7, 0, (0, 1), 60.0)
    come.join()
    second.leave()


def test_records_follow_from_each_other() -> None:
    """A group that is lost is not in the next record, and one that asks is, once, with new connections."""
    first = Record(True, (0, 1, 2), 0)
    without = following(first, 7, applied=False, lost={1}, questions={})
    assert (without.members, without.generation, without.applied) == ((0, 2), 7, False)
    same = following(without, 8, applied=True, lost=set(), questions={})
    assert (same.members, same.generation) == ((0, 2), 7)
    again = following(same, 8, applied=False, lost=set(), questions={})
    assert (again.members, again.generation) == ((0, 2), 8)
    back = following(same, 9, applied=True, lost=set(), questions={1: "a"})
    assert (back.members, back.generation, back.since) == ((0, 1, 2), 9, {1: 9})
    once = following(back, 10, applied=True, lost=set(), questions={1: "a"})
    assert (once.members, once.generation, once.since) == ((0, 1, 2), 9, {1: 9})
    assert Record.of(once.text()) == once
    parts = 3
    assert [once.receives(1, n, parts) for n in (9, 11, 12)] == [True, True, False]
    assert [once.weighs(n, parts) for n in (9, 14, 15)] == [(0, 2), (0, 2), (0, 1, 2)]
    by_itself = following(once, 13, applied=False, lost={0, 2}, questions={})
    assert by_itself.weighs(13, parts) == (1,)  # whoever trains, where nobody has for long
    assert by_itself.weighs(10, parts) == ()
