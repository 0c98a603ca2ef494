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
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

from hzplan import Checkpoints, full_parameters, parallelize
from hzplan.checkpoint.folder import listed, newest_whole
from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.schedule import Use
from hzplan.errors import JobFailed, Preempted, UserError
from hzplan.formats.base import fingerprint
from hzplan.formats.checkpoint import FILE, Checkpoint
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
        for v in optimizer.updates.state_of(piece).values()
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


def test_torch_reads_it_by_the_models_names(tmp_path: Path) -> None:
    model, optimizer = made()
    steps(model, optimizer, range(2))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(model, optimizer, 2)
    checkpoints.wait()
    plain = load("gpt:nano").build()
    wanted = {"model": plain.state_dict()}
    dcp.load(wanted, checkpoint_id=str(tmp_path / "step-00000002"), no_dist=True)
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
    dcp.load(room, checkpoint_id=str(path), no_dist=True)
    return room


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    run(tmp_path, 9, keep=3)
    assert [path.name for path in listed(tmp_path)] == [f"step-0000000{step}" for step in (9, 8, 6)]
    run(tmp_path, 11, keep=2)
    assert [path.name for path in listed(tmp_path)] == ["step-00000011", "step-00000010"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000010", "step-00000011"]


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
    names = [file.name for file in Checkpoint.load(newest).files]
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
        (("files", 0, "name"), "../../secret"),
        (("files", 0, "name"), "/etc/passwd"),
        (("tensors", "model.embed.weight", "chunks", 0, 0), 99),
        (("tensors", "model.embed.weight", "chunks", 0, 2), 10**12),
        (("tensors", "model.embed.weight", "chunks", 0, 3), 1),
        (("tensors", "model.positions.weight", "chunks", 0, -1), 1),
        (("tensors", "model.embed.weight", "shape", 0), 1 << 40),
        (("tensors", "model.embed.weight", "dtype"), "Tensor"),
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

    monkeypatch.setattr("hzplan.checkpoint.save.save", full)
    result, heard = run(folder, 6)
    assert result.unsaved is not None and "No space left on device" in result.unsaved
    assert any(
        "step 6 was not saved (rank 0: data: No space left" in line or "data: No space left" in line
        for line in heard.remarks
    )
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000004"]
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


@pytest.mark.parametrize("extra", [{"best": float("inf")}, {"at": (1, 2)}, {1: 2}, {"x": torch.zeros(1)}])
def test_extra_is_kept_as_it_is_or_refused(extra: dict[Any, Any], tmp_path: Path) -> None:
    model, optimizer = made()
    with pytest.raises(UserError, match=r"^extra: JSON "):
        Checkpoints(tmp_path).save(model, optimizer, 1, extra=extra)
    optimizer.engine.close()


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
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000003"]
    optimizer.engine.close()


def test_a_checkpoint_that_lost_its_name_gets_it_back(saved: Path, tmp_path: Path) -> None:
    """A process was killed between the two renames of a checkpoint that replaces another."""
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    (folder / "step-00000004").rename(folder / ".step-00000004.old")
    run(folder, 5, every=9)
    assert [int(path.name[-1]) for path in listed(folder)] == [5, 4, 2]
    assert nothing(folder)[0].step == 5


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
