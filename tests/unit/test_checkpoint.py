"""Checkpoints of one rank: what is saved is loaded, what is damaged is not."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from hzplan import Checkpoints, full_parameters, parallelize
from hzplan.checkpoint.data import fill
from hzplan.checkpoint.entries import whole
from hzplan.checkpoint.extra import packed, unpacked
from hzplan.checkpoint.folder import LOCK, listed, newest_whole
from hzplan.checkpoint.position import Position
from hzplan.checkpoint.staging import Staging
from hzplan.checkpoint.storage import Reader
from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.schedule import Use
from hzplan.errors import JobFailed, Preempted, UserError
from hzplan.formats.base import fingerprint
from hzplan.formats.checkpoint import FILE, Checkpoint, data_file
from hzplan.models.workload import load
from hzplan.runtime.apply import Choice, apply
from hzplan.runtime.optimizer import ShardedOptimizer
from hzplan.runtime.updates import ELEMENTWISE
from hzplan.training.loop import NothingLeft, train
from hzplan.training.run import RunOptions, RunResult, Saving, StepStats, Watcher
from tests.plans import make_plan
from tests.unit.test_training import corpus

PLAN = make_plan("gpt:nano", mesh="1", clip=True)


def made(
    optimizer_class: Any = torch.optim.AdamW, dtype: str = "float32"
) -> tuple[nn.Module, ShardedOptimizer]:
    torch.manual_seed(0)
    plan = make_plan("gpt:nano", mesh="1", clip=True, dtype=dtype)
    return parallelize(load("gpt:nano").build(), plan, optimizer_class, lr=1e-2)


def steps(model: nn.Module, optimizer: ShardedOptimizer, numbers: range) -> None:
    nano = load("gpt:nano")
    for step in numbers:
        nano.loss(model, nano.batch(1, torch.Generator().manual_seed(step))).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()


def state_of(optimizer: ShardedOptimizer) -> list[torch.Tensor]:
    return [
        v
        for piece in optimizer.updates.pieces
        for _, v in sorted(optimizer.updates.state_of(piece).items())
        if v is not None
    ]


def equal(one: ShardedOptimizer, other: ShardedOptimizer) -> bool:
    values = [[*full_parameters(o).values(), *state_of(o)] for o in (one, other)]
    return all(torch.equal(a, b) for a, b in zip(*values, strict=True))


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_saved_is_loaded_to_the_bit(name: str, dtype: str, tmp_path: Path) -> None:
    optimizer_class = getattr(torch.optim, name)
    model, optimizer = made(optimizer_class, dtype)
    steps(model, optimizer, range(3))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(model, optimizer, 3, samples=24, extra={"mine": [1, "two"]})
    steps(model, optimizer, range(3, 5))  # while it is written
    checkpoints.wait()
    again, other = made(optimizer_class, dtype)
    loaded = Checkpoints(tmp_path).load(again, other)
    assert loaded is not None and loaded.same_world and loaded.extra == {"mine": [1, "two"]}
    assert (loaded.position.step, loaded.position.samples) == (3, 24)
    steps(again, other, range(3, 5))
    assert equal(optimizer, other)
    for one in (optimizer, other):
        one.engine.close()


@pytest.mark.parametrize(
    "schedule",
    [
        partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5),
        partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[2, 4], gamma=0.5),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=100),
                torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[50], gamma=0.5),
            ],
            milestones=[4],
        ),
    ],
)
def test_a_scheduler_goes_on_from_the_rate_that_was_saved(schedule: Any, tmp_path: Path) -> None:
    """Many of torch's multiply the rate that the optimizer has."""

    def with_schedule() -> tuple[nn.Module, ShardedOptimizer, Any]:
        model, optimizer = made()
        return model, optimizer, schedule(optimizer)

    model, optimizer, scheduler = with_schedule()
    for number in range(3):
        steps(model, optimizer, range(number, number + 1))
        scheduler.step()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(model, optimizer, 3, extra={"scheduler": scheduler.state_dict()})
    checkpoints.wait()
    again, other, its = with_schedule()
    loaded = Checkpoints(tmp_path).load(again, other)
    assert loaded is not None
    its.load_state_dict(dict(loaded.extra["scheduler"]))
    for one, of in ((optimizer, scheduler), (other, its)):
        steps(model if one is optimizer else again, one, range(3, 4))
        of.step()
        assert [group["lr"] for group in one.param_groups] == [scheduler.get_last_lr()[0]]
    assert equal(optimizer, other)
    for one in (optimizer, other):
        one.engine.close()


def test_a_rank_keeps_its_data_loaders_state(tmp_path: Path) -> None:
    model, optimizer = made()
    state = {"_snapshot": {"_sampler_iter_yielded": 3, "generator": torch.get_rng_state()}, "done": False}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(model, optimizer, 1, own=state)
    checkpoints.wait()
    loaded = checkpoints.load(model, optimizer)
    assert loaded is not None and loaded.own is not None
    assert torch.equal(loaded.own["_snapshot"].pop("generator"), state["_snapshot"].pop("generator"))  # type: ignore[attr-defined, index]
    assert loaded.own == state
    with pytest.raises(UserError, match=r"^own: only numbers, texts, tensors, and what holds them"):
        checkpoints.save(model, optimizer, 2, own={"loader": Path("an object")})
    checkpoints.move_to(tmp_path / "elsewhere")
    assert checkpoints.load(model, optimizer) is None
    checkpoints.save(model, optimizer, 2)
    checkpoints.wait()
    again = checkpoints.load(model, optimizer)
    assert again is not None and again.own is None and again.path.parent == tmp_path / "elsewhere"
    assert [path.name for path in listed(tmp_path)] == ["step-00000001"]
    optimizer.engine.close()


def test_torch_reads_it_by_the_models_names(tmp_path: Path) -> None:
    model, optimizer = made()
    steps(model, optimizer, range(2))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(model, optimizer, 2)
    checkpoints.wait()
    plain = load("gpt:nano").build()
    wanted = {"model": plain.state_dict()}
    dcp.load(wanted, storage_reader=Reader(tmp_path / "step-00000002"), no_dist=True)
    expected = full_parameters(optimizer)
    assert all(torch.equal(wanted["model"][name], value) for name, value in expected.items())
    optimizer.engine.close()


class Heard(Watcher):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []
        self.remarks: list[str] = []

    def on_step(self, stats: StepStats) -> None:
        self.steps.append(stats)

    def on_remark(self, text: str) -> None:
        self.remarks.append(text)


def run(
    folder: Path, until: int, *, resume: bool = True, every: int = 2, keep: int = 2
) -> tuple[RunResult, Heard]:
    heard = Heard()
    options = RunOptions(until, lr=1e-2, heldout_tokens=1024, saving=Saving(folder, every, keep, resume))
    return train(PLAN, load("gpt:nano"), corpus(), options, heard), heard


def test_a_run_that_is_resumed_ends_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The learning rate depends on the number of steps; these runs have several.
    monkeypatch.setattr("hzplan.training.loop.learning_rate", lambda step, options: 1e-2)
    whole, _ = run(tmp_path / "whole", 7)
    first, _ = run(tmp_path / "parts", 4)
    second, heard = run(tmp_path / "parts", 7)
    assert heard.remarks == [f"going on from {tmp_path / 'parts' / 'step-00000004'}"]
    assert second.resumed_from == 4 and [stats.step for stats in heard.steps] == [4, 5, 6]
    assert first.losses + second.losses == whole.losses
    assert second.heldout_losses == whole.heldout_losses
    found = [_values(tmp_path / name / "step-00000007") for name in ("parts", "whole")]
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    with pytest.raises(NothingLeft, match="all 7 steps were trained before"):
        run(tmp_path / "parts", 7)


def _values(path: Path) -> dict[str, torch.Tensor]:
    index = Checkpoint.load(path)
    room = {
        name: torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))
        for name, tensor in index.tensors.items()
    }
    fill(path, index, [whole(name, tensor) for name, tensor in room.items()])
    return room


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    run(tmp_path, 9, keep=3)
    assert [path.name for path in listed(tmp_path)] == [f"step-0000000{step}" for step in (9, 8, 6)]
    run(tmp_path, 11, keep=2)
    assert [path.name for path in listed(tmp_path)] == ["step-00000011", "step-00000010"]
    assert named(tmp_path) == ["step-00000010", "step-00000011"]


def named(folder: Path) -> list[str]:
    """What lies in a folder of checkpoints, besides its lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints after steps 2 and 4."""
    folder = tmp_path_factory.mktemp("saved")
    run(folder, 4)
    return folder


def cut(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


def nothing(folder: Path) -> tuple[Checkpoint, tuple[str, ...]]:
    found = newest_whole(folder, 0, 1, lambda mine: [mine])
    assert found is not None
    return found.index, found.passed_over


@pytest.mark.parametrize("damage", [cut, flip, remove])
@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_checkpoint_is_passed_over(
    damage: Callable[[Path, random.Random], None], seed: int, saved: Path, tmp_path: Path
) -> None:
    rng = random.Random(f"{damage.__name__}{seed}")
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    newest = folder / "step-00000004"
    names = [data_file(0)]
    damage(newest / rng.choice([*names, FILE]), rng)
    index, passed_over = nothing(folder)
    assert index.step == 2
    assert len(passed_over) == 1 and "step-00000004" in passed_over[0] and "\n" not in passed_over[0]
    older = folder / "step-00000002"
    damage(older / rng.choice([*names, FILE]), rng)
    with pytest.raises(
        UserError, match=r"^no whole checkpoint: .*step-00000004.* \(and 1 older ones are dam"
    ):
        nothing(folder)


def test_what_is_no_checkpoint_is_left_alone(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    (folder / "step-latest").mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / ".step-00000006.partial").mkdir()
    index, passed_over = nothing(folder)
    assert index.step == 4 and not passed_over


def test_a_checkpoint_of_another_model_is_refused_before_anything_changes(saved: Path) -> None:
    torch.manual_seed(0)
    tiny = load("gpt:tiny")
    model, optimizer = parallelize(tiny.build(), make_plan("gpt:tiny", mesh="1", clip=True), lr=1e-2)
    before = full_parameters(optimizer)
    with pytest.raises(UserError, match=r"step-00000004: of another model: embed.weight is \[\d+, \d+\] in"):
        Checkpoints(saved).load(model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in full_parameters(optimizer).items())
    optimizer.engine.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (("files", 0, "nbytes"), 1000),
        (("mesh",), "8|2048"),
        (("mesh",), "1x"),
        (("buckets", 0, "slices"), 2),
        (("buckets", 0, "slices"), 3),
        (("buckets", 0, "numel"), 10**12),
        (("buckets", 0, "numel"), 64),
        (("buckets", 0, "tensors", 0, "shape", 0), 1 << 40),
        (("buckets", 2, "tensors", 1, "offset"), 1),
        (("buckets", 2, "tensors", 1, "name"), "embed.weight"),
        (("buckets", 0, "arrays", 0, "dtype"), "Tensor"),
        (("buckets", 0, "arrays", 0, "dtype"), "float64"),
        (("buckets", 0, "arrays", 0, "tensors", 0), 99),
        (("buckets", 1, "arrays", 0, "tensors"), [1, 1]),
        (("buckets", 1, "arrays", 1, "first_byte"), 64),
        (("buckets", 0, "arrays", 2, "first_byte"), 10**12),
        (("buckets", 0, "arrays", 2, "key"), "exp_avg"),
        (("values", "rng.cpu.0", "rank"), 1),
        (("values", "rng.cpu.0", "first_byte"), 64),
        (("values", "rng.cpu.0", "first_byte"), 10**12),
        (("values", "rng.cpu.0", "shape"), [1 << 40]),
        (("values", "rng.cpu.0", "dtype"), "object"),
        (("aliases", "model.head.weight"), "model.nothing"),
        (("aliases", "rng.cpu.0"), "model.embed.weight"),
        (("step",), -1),
    ],
)
def test_an_index_that_makes_no_sense_is_refused(
    field: tuple[Any, ...], value: Any, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved / "step-00000004", tmp_path / "step-00000004")
    path = tmp_path / "step-00000004" / FILE
    data = json.loads(path.read_text())
    place = data
    for key in field[:-1]:
        place = place[key]
    place[field[-1]] = value
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=rf"{FILE}: field "):
        Checkpoint.load(path.parent)


def test_a_failed_save_is_said_and_leaves_the_older_ones(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)

    def full(*arguments: object, **more: object) -> None:
        raise OSError(28, "No space left on device", "data")

    monkeypatch.setattr("hzplan.checkpoint.save.write", full)
    result, heard = run(folder, 6)
    assert result.unsaved is not None and "No space left on device" in result.unsaved
    assert any(
        "step 6 was not saved (rank 0: data: No space left" in line or "data: No space left" in line
        for line in heard.remarks
    )
    assert named(folder) == ["step-00000002", "step-00000004"]
    index, _ = nothing(folder)
    assert index.step == 4 and index.sha256 == fingerprint(index.model_copy(update={"sha256": ""}))


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()  # inodes: a file keeps its own when it is renamed
    unsynced: dict[str, list[str]] = {}
    fsync, replace_file = os.fsync, os.replace

    def noted_fsync(handle: int) -> None:
        synced.add(os.fstat(handle).st_ino)
        fsync(handle)

    def noted_replace(source: Path, target: Path) -> None:
        if Path(source).is_dir():
            files = {file.name: file.stat().st_ino for file in Path(source).iterdir()}
            files["."] = Path(source).stat().st_ino
            unsynced[Path(target).name] = [name for name, inode in files.items() if inode not in synced]
            synced.discard(tmp_path.stat().st_ino)
        replace_file(source, target)

    model, optimizer = made()
    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(model, optimizer, 1)
    checkpoints.wait()
    assert unsynced == {"step-00000001": []}
    assert tmp_path.stat().st_ino in synced  # and so is the name
    optimizer.engine.close()


def test_training_goes_on_where_sigterm_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(Heard):
        def on_step(self, stats: StepStats) -> None:
            super().on_step(stats)
            if stats.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("hzplan.training.loop.learning_rate", lambda step, options: 1e-2)
    before = signal.getsignal(signal.SIGTERM)
    try:
        options = RunOptions(50, heldout_tokens=1024, saving=Saving(tmp_path, 100, 2, True))
        with pytest.raises(
            Preempted, match=r"^SIGTERM: the run has ended after \d steps and is saved in"
        ) as caught:
            train(PLAN, load("gpt:nano"), corpus(), options, Ended())
        assert caught.value.exit_code == 5
        done = nothing(tmp_path)[0].step
        assert 4 <= done <= 6
    finally:
        signal.signal(signal.SIGTERM, before)
    options = replace(options, steps=done + 2)
    result = train(PLAN, load("gpt:nano"), corpus(), options)
    assert result.resumed_from == done


def test_what_training_cannot_go_on_from_is_not_saved(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    model, optimizer = made()
    checkpoints = Checkpoints(folder)
    assert checkpoints.load(model, optimizer) is not None
    optimizer.updates.pieces[0].param.data[3] = float("nan")
    checkpoints.save(model, optimizer, 6)
    with pytest.raises(UserError, match=r"step-00000006: not saved: model\.\S+ is not finite"):
        checkpoints.wait()
    assert [path.name for path in listed(folder)] == ["step-00000004", "step-00000002"]
    optimizer.engine.close()


def test_another_optimizers_state_is_refused(saved: Path) -> None:
    model, optimizer = made(torch.optim.Adam)
    with pytest.raises(UserError, match="was trained with AdamW, whose state Adam cannot go on with"):
        Checkpoints(saved).load(model, optimizer)
    optimizer.engine.close()


@pytest.mark.parametrize(
    ("extra", "place"),
    [({1: 2}, "extra: its keys are texts"), ({"x": [torch.zeros(1)]}, r"extra\['x'\]\[0\]: a Tensor")],
)
def test_extra_that_cannot_be_kept_is_refused(extra: dict[Any, Any], place: str, tmp_path: Path) -> None:
    model, optimizer = made()
    with pytest.raises(UserError, match=f"^{place}"):
        Checkpoints(tmp_path).save(model, optimizer, 1, extra=extra)
    optimizer.engine.close()


@given(
    st.dictionaries(
        st.text(),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
            lambda of: (
                st.lists(of)
                | st.lists(of).map(tuple)
                | st.dictionaries(st.text(), of)
                | st.dictionaries(st.just("!"), of)
                | st.dictionaries(st.integers() | st.tuples(st.integers()), of)
            ),
        ),
    )
)
def test_extra_comes_back_as_it_was(extra: dict[str, Any]) -> None:
    assert unpacked(json.loads(json.dumps(packed(extra), allow_nan=False))) == extra


def test_of_extra_a_damaged_kind_is_refused() -> None:
    assert repr(unpacked(packed({"best": float("nan")}))) == "{'best': nan}"
    for kind in (["float", "1e9"], ["set", []], ["dict", [[1]]], ["dict", [[[], 1]]], "tuple", ["tuple", 3]):
        with pytest.raises(UserError, match="field extra is damaged"):
            unpacked({"x": {"!": kind}})


def test_two_runs_do_not_save_into_one_folder(tmp_path: Path) -> None:
    model, optimizer = made()
    first, second = Checkpoints(tmp_path), Checkpoints(tmp_path)
    first.save(model, optimizer, 1)
    first.wait()
    second.save(model, optimizer, 2)
    with pytest.raises(UserError, match="another run is saving there"):
        second.wait()
    del first
    second.save(model, optimizer, 2)
    second.wait()
    assert [path.name for path in listed(tmp_path)] == ["step-00000002", "step-00000001"]
    optimizer.engine.close()


def test_a_lower_step_than_the_last_stays_when_it_was_written_last(tmp_path: Path) -> None:
    model, optimizer = made()
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (7, 3, 3):
        checkpoints.save(model, optimizer, step)
        checkpoints.wait()
    assert named(tmp_path) == ["step-00000003"]
    optimizer.engine.close()


def test_a_checkpoint_that_lost_its_name_gets_it_back(saved: Path, tmp_path: Path) -> None:
    """A process was killed between the two renames of a checkpoint that replaces another."""
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    (folder / "step-00000004").rename(folder / ".step-00000004.old")
    assert nothing(folder) == (Checkpoint.load(folder / ".step-00000004.old"), ())
    result, _ = run(folder, 5, every=9, keep=3)
    assert result.resumed_from == 4  # and not 2, whose name nobody took
    assert [path.name for path in listed(folder)] == [f"step-0000000{step}" for step in (5, 4, 2)]


def test_a_kill_between_the_renames_of_a_checkpoint_loses_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(model, optimizer, 3, samples=1)
    checkpoints.wait()
    replace_file = os.replace

    def killed(source: Path, target: Path) -> None:
        if str(source).endswith(".partial"):
            raise SystemExit
        replace_file(source, target)

    with monkeypatch.context() as interrupted:
        interrupted.setattr(os, "replace", killed)
        checkpoints.save(model, optimizer, 3, samples=2)
        checkpoints.settle()
    assert [outcome.problem for outcome in checkpoints.outcomes()] == ["SystemExit"]
    found = checkpoints.load(model, optimizer)
    assert found is not None and found.position == Position(3, 1) and not found.passed_over
    checkpoints.save(model, optimizer, 3, samples=3)
    checkpoints.wait()
    assert named(tmp_path) == ["step-00000003"]
    assert nothing(tmp_path)[0].samples == 3
    optimizer.engine.close()


def test_a_checkpoint_that_was_being_removed_does_not_come_back(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    half = folder / ".step-00000001.pruned"
    half.mkdir()
    shutil.copy(folder / "step-00000002" / data_file(0), half)
    run(folder, 5, keep=3)
    assert named(folder) == [f"step-0000000{n}" for n in (2, 4, 5)]


@pytest.mark.parametrize("way", ["too large", "cut short"])
def test_what_could_not_be_read_back_is_not_published(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made()
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(model, optimizer, 1)
    checkpoints.wait()
    with monkeypatch.context() as broken:
        if way == "too large":
            broken.setattr("hzplan.formats.checkpoint.MAX_FILE_BYTES", 30_000)
        else:
            write_text = "hzplan.formats.checkpoint.write_text"
            broken.setattr(write_text, lambda path, text: path.write_text(text[:3000]))
        checkpoints.save(model, optimizer, 2, extra={"seen": "x" * 30_000})
        with pytest.raises(UserError, match=r"would be 0 MiB, at most|checkpoint.json: not valid JSON"):
            checkpoints.wait()
    assert named(tmp_path) == ["step-00000001"]
    assert nothing(tmp_path)[0].step == 1
    optimizer.engine.close()


def test_ranks_whose_optimizers_keep_other_state_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first update a rank keeps nothing, and another one is said to keep something."""
    model, optimizer = made()
    monkeypatch.setattr("hzplan.checkpoint.save._union", lambda kept: {"exp_avg": {"float32": [0]}})
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(model, optimizer, 1)
    with pytest.raises(UserError, match=r"not saved: optimizer\.state\.embed\.weight\.exp_avg: other ranks"):
        checkpoints.wait()
    optimizer.engine.close()


def test_torch_reads_any_box_of_a_tensor(saved: Path) -> None:
    path = saved / "step-00000004"
    reader = Reader(path)
    values = _values(path)
    for name, offsets, sizes in (
        ("model.embed.weight", (3, 5), (40, 7)),
        ("optimizer.state.embed.weight.exp_avg", (255, 0), (1, 32)),
        ("model.layers.0.norm1.bias", (9,), (20,)),
        ("optimizer.state.embed.weight.step", (), ()),
    ):
        box = dcp.metadata.ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        stored = reader.read_metadata().state_dict_metadata[name]
        assert isinstance(stored, dcp.metadata.TensorStorageMetadata)
        (item,) = create_read_items_for_chunk_list(name, stored, [box])
        cut = tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
        assert torch.equal(reader.box(item), values[name][cut])


def test_what_a_device_has_is_copied_to_one_pinned_buffer_and_waited_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made_bytes: list[int] = []
    waits: list[None] = []

    def pinned(nbytes: int) -> torch.Tensor:
        made_bytes.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr("hzplan.checkpoint.staging._on_device", lambda values: values.dtype != torch.uint8)
    monkeypatch.setattr("hzplan.checkpoint.staging._pinned", pinned)
    monkeypatch.setattr("hzplan.checkpoint.staging._wait", lambda: waits.append(None))
    staging = Staging()
    for turn in range(2):
        values = [torch.full((3,), float(turn)), torch.arange(5, dtype=torch.bfloat16), torch.tensor(7.0)]
        values += [torch.zeros(2, 4).t(), torch.get_rng_state()]
        copies = staging.copies([whole(str(number), value) for number, value in enumerate(values)])
        assert all(torch.equal(copy.values, value) for copy, value in zip(copies, values, strict=True))
        memory = {copy.values.untyped_storage().data_ptr() for copy in copies}
        assert len(memory) == 2 and not memory & {value.untyped_storage().data_ptr() for value in values}
    assert made_bytes == [4 * 256] and len(waits) == 2


class Odd(nn.Module):
    """A parameter without elements, one of no dimension, a complex buffer, one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 256)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("waves", torch.randn(5, dtype=torch.complex64))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale + self.empty.sum()


def test_tensors_of_any_shape_come_back(tmp_path: Path) -> None:
    torch.manual_seed(1)
    first = Odd()
    second = copy.deepcopy(first)
    with torch.no_grad():
        second.waves.zero_()
        second.scale.zero_()
    mesh = Mesh.parse("1")
    names = [name for name, _ in first.named_parameters()]
    found = []
    for model in (first, second):
        choice = Choice(mesh, dict.fromkeys(names, Levels(0, 0, 0)), (Use("inner", "forward"),), 1, 1, True)
        found.append(apply(model, choice, torch.optim.AdamW, lr=0.1)[1])
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(first, found[0], 1)
    checkpoints.wait()
    assert Checkpoints(tmp_path).load(second, found[1]) is not None
    assert torch.equal(first.waves, second.waves) and float(full_parameters(found[1])["scale"]) == 1.0
    for optimizer in found:
        optimizer.engine.close()


def test_buffers_may_hold_infinities(tmp_path: Path) -> None:
    def with_mask() -> tuple[nn.Module, ShardedOptimizer]:
        torch.manual_seed(0)
        model = load("gpt:nano").build()
        model.register_buffer("mask", torch.tensor([0.0, float("-inf"), float("nan")]))
        return parallelize(model, PLAN, lr=1e-2)

    model, optimizer = with_mask()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(model, optimizer, 1)
    checkpoints.wait()
    optimizer.engine.close()
    again, other = with_mask()
    again.mask.zero_()  # type: ignore[operator,union-attr]
    assert Checkpoints(tmp_path).load(again, other) is not None
    assert str(again.mask.tolist()) == "[0.0, -inf, nan]"  # type: ignore[operator,union-attr]
    other.engine.close()


def test_a_run_whose_first_save_fails_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = RunOptions(4, lr=1e-2, heldout_tokens=1024, saving=Saving(tmp_path, 1, 3, True))
    check = "hzplan.checkpoint.save._check_finite"

    def full(snapshot: object) -> None:
        raise UserError("no space is left")

    with monkeypatch.context() as broken:
        broken.setattr(check, full)
        with pytest.raises(JobFailed, match=r"the first checkpoint was not saved \(no space is left\)"):
            train(PLAN, load("gpt:nano"), corpus(), options)
    assert train(PLAN, load("gpt:nano"), corpus(), replace(options, steps=2)).resumed_from == 0
    with monkeypatch.context() as broken:  # there is an earlier one: said, and it goes on
        broken.setattr(check, full)
        train(PLAN, load("gpt:nano"), corpus(), options)


@pytest.mark.parametrize(
    ("name", "options", "missing"),
    [
        ("AdamW", {"amsgrad": True}, "max_exp_avg_sq"),
        ("RMSprop", {"momentum": 0.9}, "momentum_buffer"),
        ("RMSprop", {"centered": True}, "grad_avg"),
    ],
)
def test_state_that_these_options_want_and_nobody_saved_is_refused(
    name: str, options: dict[str, Any], missing: str, tmp_path: Path
) -> None:
    optimizer_class = getattr(torch.optim, name)
    model, optimizer = made(optimizer_class)
    steps(model, optimizer, range(1))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(model, optimizer, 1)
    checkpoints.wait()
    optimizer.engine.close()
    again, other = parallelize(load("gpt:nano").build(), PLAN, optimizer_class, lr=1e-2, **options)
    with pytest.raises(UserError, match=f"has no {missing} of "):
        Checkpoints(tmp_path).load(again, other)
    other.engine.close()


def edited(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the index of a checkpoint, with its own checksum."""
    path = folder / FILE
    content = json.loads(path.read_text())
    change(content)
    content["sha256"] = ""
    path.write_text(json.dumps(content | {"sha256": fingerprint(Checkpoint.model_validate(content))}))


def test_an_index_that_says_other_dtypes_or_another_step_is_refused(tmp_path: Path) -> None:
    model, optimizer = made()
    steps(model, optimizer, range(1))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(model, optimizer, 1)
    checkpoints.wait()
    folder = tmp_path / "step-00000001"
    before = (folder / FILE).read_text()

    def parameters_as(dtype: str, key: str) -> Callable[[dict[str, Any]], None]:
        def change(content: dict[str, Any]) -> None:
            for bucket in content["buckets"]:
                for array in bucket["arrays"]:
                    if array["key"] == key:
                        array["dtype"] = dtype

        return change

    cases = [
        (parameters_as("int32", ""), "int32, no dtype of a parameter"),
        (parameters_as("int32", "exp_avg"), "exp_avg .*int32, no dtype"),
        (lambda content: content.update(step=5), "field step: 5"),
    ]
    for change, said in cases:
        (folder / FILE).write_text(before)
        edited(folder, change)
        with pytest.raises(UserError, match=said):
            Checkpoints(tmp_path).load(model, optimizer)
    optimizer.engine.close()


def test_shapes_that_no_tensor_can_have_are_refused() -> None:
    from hzplan.formats.checkpoint import StoredValue

    for shape in [(0, 2**52, 2**52), (1,) * 65]:
        with pytest.raises(ValueError, match="no tensor can have the shape"):
            StoredValue(dtype="float32", shape=shape, rank=0, first_byte=0)


def test_nothing_is_saved_past_gradients_that_end_the_run(tmp_path: Path) -> None:
    """A norm is looked at a step later, and before a save."""
    nano, calls = load("gpt:nano"), [0]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        found = nano.loss(model, batch)
        calls[0] += torch.is_grad_enabled()
        if calls[0] == 4 and torch.is_grad_enabled():
            found = found + (model.head.weight.float() * 0).sum() * float("inf")  # type: ignore[union-attr,operator]
        return found

    options = RunOptions(8, heldout_tokens=64, saving=Saving(tmp_path, 4, 2, False))
    with pytest.raises(UserError, match=r"step 3: gradients of .* are not finite"):
        train(PLAN, replace(nano, loss=loss), corpus(), options, Heard())
    assert listed(tmp_path) == []


def test_a_step_that_was_skipped_says_nothing_of_the_next_one() -> None:
    model, optimizer = made(torch.optim.RMSprop)
    nano = load("gpt:nano")
    (nano.loss(model, nano.batch(1, torch.Generator())) * float("nan")).backward()
    assert optimizer.clip_grad_norm_(1.0, skip_nonfinite=True).isnan()
    optimizer.skip_step()
    before = full_parameters(optimizer)
    steps(model, optimizer, range(1))
    after = full_parameters(optimizer)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    optimizer.engine.close()
