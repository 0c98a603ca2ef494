"""Bad input that a review found to go wrong: each is one line, and nothing is written."""

from __future__ import annotations

import io
import json
import os
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from hzplan.cli import check, console
from hzplan.cli.paths import check_writable
from hzplan.cli.quantities import parse_bytes
from hzplan.errors import CheckFailed, UserError
from hzplan.formats.base import read_json, write_text
from hzplan.formats.profile import Profile
from hzplan.solver.emit import emit
from hzplan.solver.guard import guard
from hzplan.solver.solve import Infeasible, Request, Solved, solve
from tests.instances import random_profile


@pytest.mark.parametrize("text", ["", "0.4B", "99999999TiB", "9" * 400 + "GiB", "64XB", "1e3GiB", "-1GiB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="--memory"):
        parse_bytes(text, "--memory")


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    heard: list[str] = []
    listener = threading.Thread(target=lambda: heard.append(pipe.read_text()))
    listener.start()
    check_writable(pipe)
    write_text(pipe, "text")
    listener.join(10)
    assert heard == ["text"]
    assert pipe.is_fifo()


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "text"


def test_what_is_read_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("{}")
    with pytest.raises(UserError, match=r"looks like an option; a file of that name is \./--against"):
        check_writable(Path("--against"))
    with pytest.raises(UserError, match="is what is read"):
        check_writable(tmp_path / "p.json", keep=[tmp_path / "p.json"])


def test_an_endless_file_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hzplan.formats.base.MAX_FILE_BYTES", 2**20)
    with pytest.raises(UserError, match="larger than 1 MiB"):
        read_json(Path("/dev/zero"))


def test_names_are_not_markup() -> None:
    table = console.table("of [bold]x[/y]", "unit")
    table.add_row("layers[red].0 :smile:")
    out = console.stdout()
    out.file = io.StringIO()
    out.print(table)
    assert "of [bold]x[/y]" in out.file.getvalue()
    assert "layers[red].0 :smile:" in out.file.getvalue()


def test_enormous_batch() -> None:
    profile = random_profile(random.Random(0))
    with pytest.raises(UserError, match="--global-batch"):
        solve(profile, Request(2**30, 10**9 * profile.mesh.world))


def test_update_says_what_it_cannot_repair(tmp_path: Path) -> None:
    profile = random_profile(random.Random(0))
    profile.save(tmp_path / "profile.json")
    request = Request(2**30, profile.mesh.world * profile.micro_batches[-1])
    solved = solve(profile, request)
    assert isinstance(solved, Solved)
    path = tmp_path / "plan.json"
    plan = emit(profile, request, solved, profile_path=tmp_path / "profile.json", plan_path=path)
    small = plan.source.model_copy(update={"memory_budget_bytes": 1})
    free = plan.proof.model_copy(update={"objective_s": 0.0})
    plan.model_copy(update={"source": small, "proof": free}).save(path)
    before = path.read_text()
    assert "recorded 0 s" in guard(path, replay_only=True).reason  # and no division by it
    with pytest.raises(CheckFailed, match="not updated"):
        check.command(path, update=True)
    assert path.read_text() == before


def test_profiles_beside_plans_are_no_plans(tmp_path: Path) -> None:
    """``solve --nodes`` and others write them there; what nobody can read is said as before."""
    profile = random_profile(random.Random(0))
    profile.save(tmp_path / "a.profile.json")
    with pytest.raises(UserError, match="no plans"):
        check._plans(tmp_path)
    (tmp_path / "b.json").write_text("{")
    (tmp_path / "c.json").write_text('{"format": "other"}')
    assert [path.name for path in check._plans(tmp_path)] == ["b.json", "c.json"]
    assert check._plans(tmp_path / "a.profile.json") == [tmp_path / "a.profile.json"]


def test_profile_that_a_plan_names_is_missing(tmp_path: Path) -> None:
    profile = random_profile(random.Random(0))
    request = Request(2**30, profile.mesh.world * profile.micro_batches[-1])
    solved = solve(profile, request)
    assert isinstance(solved, Solved)
    path = tmp_path / "plan.json"
    emit(profile, request, solved, profile_path=tmp_path / "gone.json", plan_path=path).save(path)
    with pytest.raises(UserError, match=r"plan.json: field source.profile: .*gone.json: no such file"):
        guard(path)


@pytest.mark.parametrize("seed", range(3))
def test_the_smallest_memory_named_is_enough_however_little_time_there_is(seed: int) -> None:
    profile = random_profile(random.Random(seed))
    request = Request(1, profile.mesh.world * profile.micro_batches[-1], time_limit_s=1e-6)
    named = solve(profile, request)
    assert isinstance(named, Infeasible)
    again = solve(profile, replace(request, memory_bytes=named.smallest.memory.peak))
    assert isinstance(again, Solved)
    assert again.best.memory.peak <= named.smallest.memory.peak


def test_measurements_that_nothing_real_comes_near() -> None:
    data = random_profile(random.Random(0)).model_dump(mode="json")
    for field in ("state_per_element", "temporary_per_element"):
        with pytest.raises(ValidationError, match=field):
            Profile.model_validate_json(json.dumps(data | {"optimizer": data["optimizer"] | {field: 1e15}}))
    for curve in data["collectives"]:
        curve["points"] = [{"bytes": n, "seconds": 1e3 * n, "spread": 0.0} for n in (0, 1)]
    profile = Profile.model_validate_json(json.dumps(data))
    with pytest.raises(UserError, match="more than a day"):
        solve(profile, Request(2**40, profile.mesh.world * profile.micro_batches[-1]))
