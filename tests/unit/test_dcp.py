"""Checkpoints of torch.distributed.checkpoint: into sharded models, and out of hzplan's."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from hzplan import Checkpoints, Muon, full_parameters, load_dcp, parallelize
from hzplan.checkpoint import to_dcp
from hzplan.checkpoint.dcp_list import LIST
from hzplan.checkpoint.dcp_source import is_one
from hzplan.checkpoint.folder import whole_at
from hzplan.checkpoint.weights import take
from hzplan.core.hierarchy import Levels
from hzplan.errors import UserError
from hzplan.models.workload import Workload, load
from hzplan.runtime.optimizer import ShardedOptimizer
from tests.plans import make_plan
from tests.threads import in_threads

NANO = load("gpt:nano")
STEPS = 3
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def plain(seed: int = 0, kind: Any = torch.optim.AdamW) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = NANO.build()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return model, kind([{"params": decayed, "lr": 3e-3}, {"params": others, "lr": 1e-2}], weight_decay=0.0)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(STEPS)) -> None:
    for step in steps:
        NANO.loss(model, NANO.batch(1, torch.Generator().manual_seed(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


def save(folder: Path, model: nn.Module, optimizer: Any, options: StateDictOptions | None = None) -> None:
    weights, state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder, no_dist=True)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module, torch.optim.Optimizer]:
    folder = tmp_path_factory.mktemp("theirs") / "dcp"
    model, optimizer = plain()
    trained(model, optimizer)
    save(folder, model, optimizer)
    return folder, model, optimizer


def state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": value
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
    }


def wrong_pieces(ours: ShardedOptimizer, expected: dict[str, torch.Tensor]) -> list[str]:
    """State of this rank's pieces that is not that of one process."""
    wrong = []
    for piece in ours.updates.pieces:
        layout = piece.bucket.layout
        name, offset = layout.tensors[piece.index].name, layout.offsets[piece.index]
        state = ours.updates.state_of(piece)
        wrong += [name] * (not state)
        for key, value in state.items():
            whole = expected[f"{name}.{key}"]
            part = whole if value.dim() == 0 else whole.reshape(-1)[piece.low - offset : piece.high - offset]
            wrong += [f"{name}.{key}"] * (not torch.equal(part.reshape(value.shape), value))
    return wrong


@pytest.mark.parametrize("levels", [Levels(2, 2, 2), Levels(1, 0, 2), Levels(0, 0, 1)])
def test_every_rank_takes_its_slices_of_weights_and_state(
    levels: Levels, theirs: tuple[Path, nn.Module, torch.optim.Optimizer]
) -> None:
    folder, model, optimizer = theirs
    expected = state_by_name(model, optimizer)
    weights = dict(model.named_parameters())

    def rank(_: int, ours: nn.Module, sharded: ShardedOptimizer) -> list[str]:
        assert load_dcp(folder, ours, sharded) == STEPS
        taken = full_parameters(sharded)
        return [n for n, v in taken.items() if not torch.equal(v, weights[n])] + wrong_pieces(
            sharded, expected
        )

    plan = make_plan("gpt:nano", mesh="2|2", levels=levels)
    assert in_threads(plan, plain(seed=5)[0], rank, torch.optim.AdamW) == [[]] * 4


def test_ours_goes_back_to_the_bit_and_with_its_groups(tmp_path: Path) -> None:
    plan = make_plan("gpt:nano", mesh="1")
    torch.manual_seed(0)
    model = NANO.build()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "lr": 3e-3, "betas": (0.8, 0.9)},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 1e-2},
    ]
    model, optimizer = parallelize(model, plan, torch.optim.AdamW, params=groups)
    for step in range(STEPS):
        NANO.loss(model, NANO.batch(2, torch.Generator().manual_seed(step))).backward()
        optimizer.step()
    optimizer.param_groups[1]["lr"] = 7e-3  # as a scheduler does
    checkpoints = Checkpoints(tmp_path / "ours")
    checkpoints.save(model, optimizer, STEPS)
    checkpoints.wait()
    found = whole_at(tmp_path / "ours" / f"step-{STEPS:08d}")
    nbytes = to_dcp.export(found.path, found.index, tmp_path / "dcp")
    tied = next(p for p in model.parameters()).numel() * 4  # the head's: under both of its names
    assert nbytes == sum(t.numel() * 4 * 3 + 4 for t in full_parameters(optimizer).values()) + tied
    for options in (None, FLAT):
        again, plain_optimizer = plain(seed=4)
        weights, state = get_state_dict(again, plain_optimizer, options=options)
        wanted = {"model": weights, "optimizer": state}
        dcp.load(wanted, checkpoint_id=tmp_path / "dcp", no_dist=True)
        set_state_dict(
            again,
            plain_optimizer,
            model_state_dict=wanted["model"],
            optim_state_dict=wanted["optimizer"],
            options=options,
        )
        expected = full_parameters(optimizer)
        assert all(torch.equal(p, expected[n]) for n, p in again.named_parameters())
        assert wrong_pieces(optimizer, state_by_name(again, plain_optimizer)) == []
        assert [group["lr"] for group in plain_optimizer.param_groups] == [3e-3, 7e-3]
        assert [group["betas"] for group in plain_optimizer.param_groups] == [(0.8, 0.9), (0.9, 0.999)]
    optimizer.engine.close()


def test_state_of_matrices_is_taken_by_parameter(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = NANO.build()
    plan = make_plan("gpt:nano", mesh="2|2", levels=Levels(0, 0, 2), optimizer="muon", matrix="exchanged")
    own = {name for unit in plan.units for b in unit.buckets if b.matrix for name in b.tensors}
    named = [*model.named_parameters()]
    matrices, others = ([p for n, p in named if (n in own) is which] for which in (True, False))
    optimizer = Muon([{"params": matrices}, {"params": others, "method": "adamw"}])
    trained(model, optimizer)
    save(tmp_path / "dcp", model, optimizer)
    expected = state_by_name(model, optimizer)

    def rank(number: int, ours: nn.Module, sharded: ShardedOptimizer) -> list[str]:
        assert load_dcp(tmp_path / "dcp", ours, sharded) == STEPS
        return wrong_pieces(sharded, expected)

    assert in_threads(plan, plain(seed=5)[0], rank, Muon) == [[]] * 4


def one_rank(kind: Any = torch.optim.AdamW, **options: Any) -> tuple[nn.Module, ShardedOptimizer]:
    return parallelize(NANO.build(), make_plan("gpt:nano", mesh="1"), kind, lr=1e-2, **options)


def test_names_of_wrappers_folders_of_their_own_and_flat_state(
    theirs: tuple[Path, nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    """As Accelerate keeps them: weights of a compiled model in one folder, the optimizer in another."""
    _, model, optimizer = theirs
    weights, state = get_state_dict(model, optimizer, options=FLAT)
    renamed = {f"_orig_mod.{name}": value for name, value in weights.items()}
    dcp.save({"model": renamed}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": state}, checkpoint_id=tmp_path / "optimizer_0", no_dist=True)
    ours, sharded = one_rank()
    assert is_one(tmp_path) and load_dcp(tmp_path, ours, sharded) == STEPS
    assert wrong_pieces(sharded, state_by_name(model, optimizer)) == []
    assert all(torch.equal(full_parameters(sharded)[n], p) for n, p in model.named_parameters())
    sharded.engine.close()


def test_weights_alone(theirs: tuple[Path, nn.Module, torch.optim.Optimizer], tmp_path: Path) -> None:
    _, model, _ = theirs
    dcp.save({**model.state_dict(), "other": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    ours, sharded = one_rank()
    with pytest.raises(UserError, match=r"no state of the optimizer .* hzplan run --weights"):
        load_dcp(tmp_path / "dcp", ours, sharded)
    assert take(tmp_path / "dcp", ours, sharded) == ["other"]
    assert all(torch.equal(full_parameters(sharded)[n], p) for n, p in model.named_parameters())
    sharded.engine.close()


def test_an_optimizer_without_state_starts_at_nothing(tmp_path: Path) -> None:
    model, optimizer = plain(kind=torch.optim.SGD)
    trained(model, optimizer)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    ours, sharded = one_rank(torch.optim.SGD)
    assert load_dcp(tmp_path / "dcp", ours, sharded) == 0
    with pytest.raises(UserError, match="no state of the optimizer"):
        load_dcp(tmp_path / "dcp", *one_rank(torch.optim.SGD, momentum=0.9))
    sharded.engine.close()


def zeros_like(state: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.zeros_like(value) for name, value in state.items()}


def test_beside_an_average_the_model_is_taken(
    theirs: tuple[Path, nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    _, model, optimizer = theirs
    weights, state = get_state_dict(model, optimizer)
    saved = {"ema": zeros_like(weights), "model": weights, "optimizer": state}
    dcp.save(saved, checkpoint_id=tmp_path / "ema", no_dist=True)
    ours, sharded = one_rank()
    assert load_dcp(tmp_path / "ema", ours, sharded) == STEPS
    assert all(torch.equal(full_parameters(sharded)[n], p) for n, p in model.named_parameters())
    dcp.save({"gen": weights, "critic": zeros_like(weights)}, checkpoint_id=tmp_path / "two", no_dist=True)
    for load_from in (load_dcp, take):
        with pytest.raises(
            UserError, match=r"several models or optimizers have the names: 'gen\.', 'critic\.'"
        ):
            load_from(tmp_path / "two", ours, sharded)  # type: ignore[operator]
    shutil.copytree(tmp_path / "ema", tmp_path / "all" / "step-1")
    shutil.copytree(theirs[0], tmp_path / "all" / "step-2")
    with pytest.raises(UserError, match=r"step-1 and step-2: .* is there twice"):
        load_dcp(tmp_path / "all", ours, sharded)
    sharded.engine.close()


def test_state_has_the_dtype_of_what_is_updated(tmp_path: Path) -> None:
    model, _ = plain()
    model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer)
    save(tmp_path / "dcp", model, optimizer)
    ours, sharded = one_rank()
    assert load_dcp(tmp_path / "dcp", ours, sharded) == STEPS
    trained(ours, sharded)
    sharded.engine.close()


class Odd(nn.Module):
    """A frozen parameter, one that is never used, one without elements, two under one name each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(12))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused, self.late = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(4))
        self.empty = nn.Parameter(torch.ones(0, 4))
        self.adds_late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.late if self.adds_late else x


def odd_steps(model: Odd, optimizer: torch.optim.Optimizer, late: int) -> None:
    for step in range(STEPS):
        model.adds_late = step >= late
        model(torch.full((2, 4), 1.0 + step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_unused_frozen_empty_and_thawed_parameters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    odd_steps(model, optimizer, late=2)
    dcp.save(
        {
            "model": model.state_dict(),
            "optimizer": {"state": {}},
            **{
                f"optimizer.state.{name}.{key}": value
                for name, p in model.named_parameters()
                for key, value in optimizer.state.get(p, {}).items()
            },
        },
        checkpoint_id=tmp_path / "dcp",
        no_dist=True,
    )
    workload = Workload(
        "odd",
        Odd,
        batch=lambda count, generator: torch.ones(count, 4),
        loss=lambda model, batch: model(batch).square().sum(),
        seq_len=1,
        vocab=None,
    )
    plan = make_plan(workload, mesh="1")
    again, sharded = parallelize(Odd(), plan, torch.optim.AdamW, lr=1e-2)
    assert load_dcp(tmp_path / "dcp", again, sharded) == STEPS
    expected = {
        f"{n}.{k}": v for n, p in model.named_parameters() for k, v in optimizer.state.get(p, {}).items()
    }
    unused = {"unused"}
    assert {*wrong_pieces(sharded, expected)} <= unused
    checkpoints = Checkpoints(tmp_path / "ours")
    checkpoints.save(again, sharded, STEPS)
    checkpoints.wait()
    found = whole_at(tmp_path / "ours" / f"step-{STEPS:08d}")
    to_dcp.export(found.path, found.index, tmp_path / "back")
    back, other = parallelize(Odd(), plan, torch.optim.AdamW, lr=1e-2)
    assert load_dcp(tmp_path / "back", back, other) == STEPS
    assert {*wrong_pieces(other, expected)} <= unused
    assert "optimizer.param_groups.frozen.lr" in listed(tmp_path / "back").state_dict_metadata
    for one in (sharded, other):
        one.engine.close()


def test_an_export_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, sharded = one_rank()
    checkpoints = Checkpoints(tmp_path / "ours")
    checkpoints.save(ours, sharded, 1)
    checkpoints.wait()
    found = whole_at(tmp_path / "ours" / "step-00000001")

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hzplan.checkpoint.to_dcp.fill", full)
    with pytest.raises(UserError, match=r"/dcp: cannot be written \(.*No space left on device"):
        to_dcp.export(found.path, found.index, tmp_path / "dcp")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
    sharded.engine.close()


def changing(folder: Path) -> bytes:
    """Of a list, and before it a class that every program has is changed."""
    change = b"cpathlib\nPurePosixPath\n(N}(S'name'\nS'x'\nutb0"
    return b"\x80\x04" + change + (folder / LIST).read_bytes()[2:]


class Harmful:
    """A pickle that would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def listed(folder: Path) -> Metadata:
    found: Metadata = pickle.loads((folder / LIST).read_bytes())  # made by this test
    return found


def elsewhere(folder: Path) -> None:
    found = listed(folder)
    found.storage_data = {
        index: _StorageInfo(f"../{place.relative_path}", place.offset, place.length)
        for index, place in found.storage_data.items()
    }
    (folder / LIST).write_bytes(pickle.dumps(found))


def a_part_missing(folder: Path) -> None:
    found = listed(folder)
    found.state_dict_metadata["model.embed.weight"].chunks.clear()  # type: ignore[union-attr]
    (folder / LIST).write_bytes(pickle.dumps(found))


def no_list(folder: Path) -> None:
    (folder / LIST).write_bytes(pickle.dumps({"model": [MetadataIndex("a")]}))


def cut(folder: Path) -> None:
    (file,) = folder.glob("*.distcp")
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / LIST).write_bytes(pickle.dumps(Harmful(f / "made"))), "it names posix.mkdir"),
        (lambda f: (f / LIST).write_bytes(changing(f)), "not a list of torch"),
        (elsewhere, "is not in the folder"),
        (a_part_missing, "a part of model.embed.weight is not in it"),
        (no_list, "no list"),
        (lambda f: (f / LIST).write_bytes(b"\x80\x05."), "not a list of torch"),
        (lambda f: (f / LIST).unlink(), "no checkpoint of torch.distributed.checkpoint there"),
        (cut, "cannot be read"),
    ],
)
def test_files_of_others_are_data(
    damage: Callable[[Path], Any],
    said: str,
    theirs: tuple[Path, nn.Module, torch.optim.Optimizer],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "dcp"
    shutil.copytree(theirs[0], folder)
    damage(folder)
    ours, sharded = one_rank()
    with pytest.raises(UserError, match=said) as error:
        load_dcp(folder, ours, sharded)
    assert "\n" not in str(error.value) and not (folder / "made").exists()
    assert Path("a/b").name == "b"
    sharded.engine.close()


def test_another_model_is_one_line(
    theirs: tuple[Path, nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    save(tmp_path / "dcp", model, optimizer)
    ours, sharded = one_rank()
    with pytest.raises(UserError, match="is not in it; this is another model's checkpoint"):
        load_dcp(tmp_path / "dcp", ours, sharded)
    with pytest.raises(UserError, match="is there already"):
        to_dcp.export(tmp_path, None, tmp_path / "dcp")  # type: ignore[arg-type]
    sharded.engine.close()
