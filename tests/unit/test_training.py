"""What the training loop is made of: batches by place, the learning rate, a run of one rank."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
import torch

from hzplan.checkpoint.position import Position
from hzplan.errors import UserError
from hzplan.formats.plan import Plan
from hzplan.models.workload import Workload, load
from hzplan.runtime.apply import full_parameters, parallelize
from hzplan.runtime.updates import fused_by_default
from hzplan.training.batches import SyntheticBatches, TextBatches, reads_bytes
from hzplan.training.data import Corpus, heldout_windows
from hzplan.training.loop import learning_rate, train
from hzplan.training.run import RunOptions, RunResult, StepStats, Watcher
from tests.plans import make_plan


def corpus() -> Corpus:
    """A text that repeats the bytes 0 … 99."""
    text = torch.arange(100, dtype=torch.uint8).repeat(50)
    return Corpus(text, text[:1000], "counting", 4.6)


def test_text_is_for_models_that_know_every_byte() -> None:
    nano = load("gpt:nano")
    assert reads_bytes(nano)
    assert reads_bytes(replace(nano, vocab=50257))
    assert not reads_bytes(replace(nano, vocab=255))
    assert not reads_bytes(replace(nano, vocab=None))
    assert not reads_bytes(replace(nano, batch=lambda n, generator: torch.zeros(n, 7)))


def test_text_batches_depend_on_place_alone() -> None:
    data = TextBatches(corpus(), micro_batch=2, seq_len=8, seed=1, world=2, accumulation=2)
    places = [(step, index, rank) for step in range(3) for index in range(2) for rank in range(2)]
    batches = [data.train(*place) for place in places]
    assert all(torch.equal(batch, data.train(*place)) for batch, place in zip(batches, places, strict=True))
    assert len({tuple(batch.flatten().tolist()) for batch in batches}) == len(places)


def test_a_step_has_the_same_sequences_however_many_ranks_share_them() -> None:
    def of_step(
        world: int, micro_batch: int, accumulation: int, since: Position, step: int
    ) -> list[list[int]]:
        data = TextBatches(corpus(), micro_batch, 8, 1, world, accumulation, since)
        found = [data.train(step, index, rank) for index in range(accumulation) for rank in range(world)]
        return [window.tolist() for batch in found for window in batch]

    whole = of_step(4, 2, 1, Position(0, 0), 3)
    assert len(whole) == 8
    assert whole == of_step(2, 1, 4, Position(0, 0), 3) == of_step(1, 8, 1, Position(3, 24), 3)
    assert of_step(2, 8, 1, Position(3, 24), 3)[:8] == whole  # a larger step goes on from the same place


def test_a_run_stays_in_its_place_when_its_steps_grow() -> None:
    small = TextBatches(corpus(), 1, 8, 1, 1, 2)
    large = TextBatches(corpus(), 1, 8, 1, 1, 4, Position(2, 4))
    taken = [small.train(step, index, 0) for step in range(2) for index in range(2)]
    taken += [large.train(2, index, 0) for index in range(4)]
    wanted = [small.train(number // 2, number % 2, 0) for number in range(8)]
    assert all(torch.equal(one, other) for one, other in zip(taken, wanted, strict=True))


def test_ranks_share_the_heldout_windows() -> None:
    data = TextBatches(corpus(), micro_batch=2, seq_len=8, seed=1, world=2, accumulation=1)
    mine = [data.heldout(3, rank, 2) for rank in range(2)]
    assert [[tuple(batch.shape) for batch in share] for share in mine] == [[(2, 9)] * 3] * 2
    taken = sorted(window.tolist() for share in mine for batch in share for window in batch)
    assert taken == sorted(heldout_windows(corpus().heldout, 8, 12).tolist())


def test_synthetic_batches_of_training_and_heldout_differ() -> None:
    data = SyntheticBatches(load("gpt:nano"), micro_batch=2, seed=1)
    first, again, other = data.train(0, 0, 0), data.train(0, 0, 0), data.heldout(1, 0, 2)[0]
    assert isinstance(first, torch.Tensor) and isinstance(again, torch.Tensor)
    assert isinstance(other, torch.Tensor)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_no_two_places_of_a_run_have_the_same_synthetic_batch() -> None:
    data = SyntheticBatches(load("gpt:nano"), micro_batch=2, seed=1)
    drawn = [data.train(*place) for place in itertools.product(range(2), range(2), range(3))]
    drawn += [batch for rank in range(3) for batch in data.heldout(2, rank, 3)]
    tokens = [batch for batch in drawn if isinstance(batch, torch.Tensor)]
    assert len({tuple(batch.flatten().tolist()) for batch in tokens}) == len(drawn) == 2 * 2 * 3 + 2 * 3


def test_learning_rate_warms_up_and_decays() -> None:
    options = RunOptions(steps=200, lr=1.0)
    rates = [learning_rate(step, options) for step in range(200)]
    assert rates[0] == pytest.approx(0.05)
    assert max(rates) == rates[19] == pytest.approx(1.0)
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert 0.1 <= rates[-1] < 0.11
    assert learning_rate(0, RunOptions(steps=1, lr=1.0)) == 1.0


class Heard(Watcher):
    """Keeps the steps that it hears of."""

    def __init__(self, steps: list[StepStats]) -> None:
        self.steps = steps

    def on_step(self, stats: StepStats) -> None:
        self.steps.append(stats)


def trained(
    plan: Plan, workload: Workload, options: RunOptions, heard: list[StepStats] | None = None
) -> RunResult:
    return train(plan, workload, corpus(), options, Heard([] if heard is None else heard))


def test_one_rank_learns_to_count() -> None:
    plan = make_plan("gpt:nano", mesh="1", micro_batch=8, accumulation=2, clip=True)
    heard: list[StepStats] = []
    options = RunOptions(steps=60, lr=1e-2, evaluate_every=30, heldout_tokens=4096)
    result = trained(plan, load("gpt:nano"), options, heard)
    assert [stats.step for stats in heard] == list(range(60))
    assert json.dumps([stats.exposed_comm_s for stats in heard])
    assert result.losses == tuple(stats.loss for stats in heard)
    assert [step for step, _ in result.heldout_losses] == [29, 59]
    assert result.heldout_loss < 1.5 < 5 < result.loss_first + 1
    assert result.tokens_per_s == pytest.approx(8 * 2 * 32 / result.step_s)
    assert result.unplanned_steps == 0
    parameters = plan.model.parameters * 4
    assert result.peak_memory_bytes > 4 * parameters  # parameter, gradient, two moments; and activations
    assert {stats.peak_memory_bytes for stats in heard} == {result.peak_memory_bytes}


def test_a_plan_in_bfloat16_learns_as_well() -> None:
    losses = {}
    for dtype in ("float32", "bfloat16"):
        plan = make_plan("gpt:nano", mesh="1", micro_batch=8, clip=True, dtype=dtype)
        result = trained(plan, load("gpt:nano"), RunOptions(steps=40, lr=1e-2, heldout_tokens=1024))
        losses[dtype] = result.heldout_loss
    assert losses["bfloat16"] == pytest.approx(losses["float32"], abs=0.2)
    assert losses["bfloat16"] < 3


def test_master_weights_start_from_float32() -> None:
    plan = make_plan("gpt:nano", mesh="1", dtype="bfloat16")
    with pytest.raises(UserError, match=r"embed.weight is bfloat16, but master weights are float32; pass"):
        parallelize(load("gpt:nano").build().bfloat16(), plan, lr=1e-3)
    with pytest.raises(UserError, match="a shape, dtype or requires_grad differs"):
        parallelize(load("gpt:nano").build().double(), plan, lr=1e-3)
    model = load("gpt:nano").build()
    model.register_buffer("table", torch.ones(3))
    expected = {name: value.detach().clone() for name, value in model.named_parameters()}
    model, optimizer = parallelize(model, plan, lr=1e-3)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.table.dtype == torch.float32
    found = full_parameters(optimizer)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    optimizer.engine.close()


def test_the_same_seed_is_the_same_run() -> None:
    plan = make_plan("gpt:nano", mesh="1")
    runs = [trained(plan, load("gpt:nano"), RunOptions(steps=5, seed=3)).losses for _ in range(2)]
    other = trained(plan, load("gpt:nano"), RunOptions(steps=5, seed=4)).losses
    assert runs[0] == runs[1] != other


def test_a_loss_that_is_no_number_ends_the_run() -> None:
    nano = load("gpt:nano")
    broken = replace(nano, loss=lambda model, batch: nano.loss(model, batch) * float("nan"))
    with pytest.raises(UserError, match="loss of step 0 is nan"):
        train(make_plan("gpt:nano", mesh="1"), broken, corpus(), RunOptions(steps=5))


class _Poisoned(torch.autograd.Function):
    """Passes values on, and NaN back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradients[0] * float("nan")


def poisoned(steps: Collection[int], unit: str = "layers.1") -> Workload:
    """gpt:nano, in some steps (of one micro-batch each) with gradients that are NaN from a unit on."""
    nano, calls = load("gpt:nano"), itertools.count()

    def loss(model: torch.nn.Module, batch: object) -> torch.Tensor:
        if not torch.is_grad_enabled() or next(calls) not in steps:
            return nano.loss(model, batch)
        module = model.get_submodule(unit)
        handle = module.register_forward_hook(lambda module, inputs, output: _Poisoned.apply(output))
        try:
            return nano.loss(model, batch)
        finally:
            handle.remove()

    return replace(nano, loss=loss)


def test_gradients_that_are_not_finite_are_reported_with_their_unit() -> None:
    plan = make_plan("gpt:nano", mesh="1", clip=True)
    with pytest.raises(
        UserError, match=r"^step 2: gradients of units layers.1, layers.0, positions and 1 more are"
    ):
        train(plan, poisoned([2]), corpus(), RunOptions(steps=5))


def test_steps_without_finite_gradients_can_be_skipped() -> None:
    plan = make_plan("gpt:nano", mesh="1", clip=True)
    heard: list[StepStats] = []
    options = RunOptions(steps=8, skip_nonfinite=True)
    result = trained(plan, poisoned([2, 5]), options, heard)
    skipped = {stats.step: stats.skipped for stats in heard if stats.skipped}
    assert skipped == dict.fromkeys([2, 5], "units layers.1, layers.0, positions and 1 more")
    assert result.skipped_steps == 2
    assert all(math.isfinite(loss) for loss in result.losses)
    with pytest.raises(UserError, match=r"^step 21: .*are not finite \(21 steps in a row\)"):
        train(plan, poisoned(range(1, 99)), corpus(), replace(options, steps=50))


def test_a_skipped_step_changes_nothing() -> None:
    nano, bad = load("gpt:nano"), poisoned([1])
    model, optimizer = parallelize(nano.build(), make_plan("gpt:nano", mesh="1", clip=True), lr=0.1)
    batch = nano.batch(1, torch.Generator().manual_seed(0))
    weights = []
    for step in range(3):
        bad.loss(model, batch).backward()
        finite = bool(optimizer.clip_grad_norm_(1.0).isfinite())
        assert finite == (step != 1)
        if finite:
            optimizer.step()
        else:
            optimizer.skip_step()
        weights.append(full_parameters(optimizer))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert any(not torch.equal(weights[1][name], weights[2][name]) for name in weights[0])
    assert all(value.isfinite().all() for value in weights[2].values())
    optimizer.engine.close()


def test_clipping_twice_is_clipping_to_the_smaller_norm() -> None:
    nano = load("gpt:nano")
    batch = nano.batch(1, torch.Generator().manual_seed(0))
    ends = []
    for norms in ((1e-3,), (1e9, 2e-3, 1e-3)):
        torch.manual_seed(0)
        model, optimizer = parallelize(
            nano.build(), make_plan("gpt:nano", mesh="1", clip=True), torch.optim.SGD, lr=1.0
        )
        nano.loss(model, batch).backward()
        found = [float(optimizer.clip_grad_norm_(norm)) for norm in norms]
        assert found == pytest.approx([found[0], found[0], 2e-3][: len(norms)], rel=1e-3)
        optimizer.step()
        ends.append(full_parameters(optimizer))
        nano.loss(model, batch).backward()
        optimizer.clip_grad_norm_(1e9)  # of this step alone
        optimizer.step()
        ends.append(full_parameters(optimizer))
        optimizer.engine.close()
    for once, twice in zip(ends[:2], ends[2:], strict=True):
        assert all(torch.allclose(once[name], value, atol=1e-6) for name, value in twice.items())
    assert all(any(not torch.equal(a[name], b[name]) for name in a) for a, b in itertools.pairwise(ends[:2]))


def test_what_a_skipped_step_was_clipped_to_is_forgotten() -> None:
    nano = load("gpt:nano")
    batch = nano.batch(1, torch.Generator().manual_seed(0))
    ends = []
    for skipped in (False, True):
        torch.manual_seed(0)
        model, optimizer = parallelize(
            nano.build(), make_plan("gpt:nano", mesh="1", clip=True), torch.optim.SGD, lr=1.0
        )
        for norm in ([1e-6] if skipped else []) + [1e-2]:
            nano.loss(model, batch).backward()
            optimizer.clip_grad_norm_(norm)
            if norm == 1e-2:
                optimizer.step()
            else:
                optimizer.skip_step()
        ends.append(full_parameters(optimizer))
        optimizer.engine.close()
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_without_clipping_the_first_step_without_finite_gradients_is_named() -> None:
    with pytest.raises(
        UserError,
        match=r"^the loss of step 3 is nan \(gradients of units layers.1, .* not finite since step 2\)",
    ):
        train(make_plan("gpt:nano", mesh="1"), poisoned([2]), corpus(), RunOptions(steps=6))


def test_without_clipping_no_step_can_be_skipped() -> None:
    nano = load("gpt:nano")
    model, optimizer = parallelize(nano.build(), make_plan("gpt:nano", mesh="1"), lr=0.1)
    nano.loss(model, nano.batch(1, torch.Generator().manual_seed(0))).backward()
    with pytest.raises(UserError, match="a step is skipped, but the plan was solved without clipping"):
        optimizer.skip_step()
    optimizer.engine.close()


def test_the_optimizer_is_compared_with_the_plans() -> None:
    nano = load("gpt:nano")
    with pytest.raises(
        UserError, match=r"AdamW keeps 2 tensors .* for sgd, counts 0; profile with --optimizer"
    ):
        parallelize(nano.build(), make_plan("gpt:nano", mesh="1", optimizer="sgd"), lr=1e-3)
    for optimizer_class, arguments, said in (
        (torch.optim.SGD, {}, "keeps 0 tensors .* more memory than that needs"),
        (torch.optim.AdamW, {"amsgrad": True}, "keeps 3 tensors .* may not suffice"),
        (torch.optim.Adagrad, {}, "Adagrad keeps 1 tensors"),
    ):
        with pytest.warns(UserWarning, match=said):
            _, made = parallelize(
                nano.build(), make_plan("gpt:nano", mesh="1"), optimizer_class, lr=1e-3, **arguments
            )
        made.engine.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, made = parallelize(nano.build(), make_plan("gpt:nano", mesh="1"), torch.optim.Adam, lr=1e-3)
    made.engine.close()


def test_optimizers_that_can_be_are_fused_where_a_device_queues_work() -> None:
    def fused(optimizer: Any, group: dict[str, Any] | None = None, **arguments: Any) -> bool | None:
        found: bool | None = fused_by_default(optimizer, [group or {}], arguments).get("fused")
        return found

    assert fused(torch.optim.AdamW, lr=1.0) and fused(torch.optim.SGD, lr=1.0)
    assert not fused(torch.optim.AdamW, foreach=True) and not fused(torch.optim.AdamW, fused=False)
    assert not fused(torch.optim.RMSprop)
    assert not fused(torch.optim.SGD, momentum=0.9)  # its fused kernel leaves momentum unmade
    assert not fused(torch.optim.SGD, {"momentum": 0.9})
