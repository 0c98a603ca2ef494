"""``hzplan check`` for other systems, ``diff`` and ``doctor``."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hzplan.core.hierarchy import Levels
from hzplan.core.recompute import Recomputed
from hzplan.cost.model import CostModel
from hzplan.formats.certificate import save
from hzplan.formats.plan import Plan, gap_of
from hzplan.formats.profile import Profile
from hzplan.solver import guard as guarding
from hzplan.solver.certificate import certify
from hzplan.solver.emit import emit
from hzplan.solver.evaluate import evaluate, sent_bytes, uniform
from hzplan.solver.guard import guard
from hzplan.solver.solve import Request, Solved, solve
from tests.cli.command import ROOT, hzplan
from tests.instances import random_profile

HOSTILE = "a]]><b>|`$(x)`%\n::error::no"


def solved(folder: Path, name: str = "plan", *, seed: int = 4, **options: object) -> Plan:
    """A plan and its profile in a folder, proven optimal."""
    profile = random_profile(random.Random(seed))
    profile.save(folder / "profile.json")
    request = Request(2**30, profile.mesh.world * 2, gap=0.0, **options)  # type: ignore[arg-type]
    outcome = solve(profile, request)
    assert isinstance(outcome, Solved)
    path = folder / f"{name}.json"
    plan = emit(profile, request, outcome, profile_path=folder / "profile.json", plan_path=path)
    save(plan, certify(profile, outcome), path)
    return plan


def worse(plan: Plan, path: Path, share: float = 0.98) -> None:
    """As if steps had been faster when the plan was recorded."""
    faster = plan.predicted.model_copy(update={"step_s": plan.predicted.step_s * share})
    stated, step_s = plan.proof, faster.step_s
    bounds = {
        name: min(bound_s, step_s)
        for name in ("bound_s", "in_order_bound_s")
        if (bound_s := getattr(stated, name)) is not None
    }
    proof = stated.model_copy(update={**bounds, "gap": gap_of(step_s, max(bounds.values()))})
    plan.model_copy(update={"predicted": faster, "proof": proof}).save(path)


def test_what_changed_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, path = solved(tmp_path), tmp_path / "plan.json"
    assert guard(path).changes == ()

    gather = CostModel.compute_ns
    with monkeypatch.context() as slower:  # a formula
        slower.setattr(CostModel, "compute_ns", lambda *a: round(gather(*a) * 1.02))
        found = guard(path, replay_only=True)
        assert not found.ok and {change.kind for change in found.changes} == {"formula"}
        assert guard(path, replay_only=True, tolerance=0.03).ok

    with monkeypatch.context() as other:  # a solver
        other.setattr("hzplan.solver.emit.version", lambda name: "0.0")
        found = guard(path)
        assert found.ok and {change.kind for change in found.changes} == {"solver", "text"}

    shallow = plan.model_copy(update={"prefetch": plan.prefetch + 1})
    shallow.save(path)  # a choice that nobody would make
    found = guard(path)
    kinds = {change.kind for change in found.changes}
    assert {"choice", "text"} <= kinds
    assert any("prefetch: " in change.what for change in found.changes)

    renamed = plan.model_copy(update={"source": plan.source.model_copy(update={"profile_sha256": "0" * 64})})
    renamed.save(path)
    assert "cost data: " in guard(path, replay_only=True).reason


def test_a_proven_optimum_has_one_text(tmp_path: Path) -> None:
    plan, path = solved(tmp_path), tmp_path / "plan.json"
    assert plan.proof.status == "optimal" and plan.proof.replayed is not None
    path.write_text(path.read_text().replace('"mfu": ', '"mfu":  '))
    found = guard(path)
    assert not found.ok and "text: 2 lines of the file would change, though both are" in found.reason
    assert guard(path, replay_only=True).ok


def test_reports_for_other_systems(tmp_path: Path) -> None:
    plan = solved(tmp_path)
    worse(plan, tmp_path / "plan.json")
    page = tmp_path / "page.md"
    page.write_text("before\n")
    done = hzplan(
        *("check", ".", "--replay-only", "--junit", "out/junit.xml", "--github"),
        cwd=_only_plans(tmp_path),
        GITHUB_STEP_SUMMARY=str(page),
    )
    assert done.code == 1, done.stderr
    suite = ElementTree.parse(tmp_path / "plans/out/junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("1", "1")
    (failure,) = suite.iter("failure")
    assert "formula: replaying the recorded plan gives step" in failure.get("message", "")
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("::"))
    assert line.startswith("::error file=plan.json::formula: replaying") and "%25" in line
    text = page.read_text()
    assert text.startswith("before\n### hzplan check: 1 of 1 plans got worse")
    assert "| plan | objective |" in text


def test_several_at_once_say_what_one_after_another_do(tmp_path: Path) -> None:
    worse(solved(tmp_path), tmp_path / "plan.json")
    plans = _only_plans(tmp_path)
    (plans / "broken.json").write_text("{")
    (plans / "same.json").write_bytes((plans / "plan.json").read_bytes())
    one, several = (hzplan("check", ".", "--replay-only", "--json", "--jobs", n, cwd=plans) for n in "12")
    assert (one.code, one.stdout, one.stderr) == (several.code, several.stdout, several.stderr)
    assert one.code == 2 and '"broken.json"' in one.stdout and "got worse" not in one.stdout


def _only_plans(folder: Path) -> Path:
    """A folder of plans, their profile outside of it."""
    plans = folder / "plans"
    plans.mkdir()
    data = json.loads((folder / "plan.json").read_text())
    data["source"]["profile"] = "../profile.json"
    (plans / "plan.json").write_text(json.dumps(data))
    (plans / "plan.proof").write_bytes((folder / "plan.proof").read_bytes())
    return plans


def test_names_cannot_break_a_report(tmp_path: Path) -> None:
    from hzplan.cli.check_report import _junit, _markdown, report

    change = guarding.Change("choice", HOSTILE, True)
    verdict = guarding.Verdict(Path(f"x{HOSTILE[:5]}.json"), (change,), (1.0, 2.0), (1, 2))
    suite = ElementTree.fromstring(_junit([verdict]).encode())
    assert next(suite.iter("failure")).get("message", "").startswith("choice: a]]><b>")
    rows = _markdown([verdict]).splitlines()
    assert len(rows) == 7 and "<b>" not in "".join(rows) and "`" not in "".join(rows).replace("\\`", "")
    report([verdict], as_json=False, junit=None, summaries=(), github=True)


def test_annotations_are_one_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hzplan.cli.check_report import report

    change = guarding.Change("choice", HOSTILE, True)
    verdict = guarding.Verdict(Path("a:b,c.json"), (change,), (1.0, 2.0), (1, 2))
    report([verdict], as_json=False, junit=None, summaries=(), github=True)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("::")]
    assert said == ["::error file=a%3Ab%2Cc.json::choice: a]]><b>|`$(x)`%25 ::error::no"]


def test_tolerances_by_plan(tmp_path: Path) -> None:
    worse(solved(tmp_path), tmp_path / "plan.json")
    plans = _only_plans(tmp_path)
    arguments = ("check", ".", "--replay-only")
    assert hzplan(*arguments, cwd=plans).code == 1
    (plans / "check.toml").write_text("[tolerance]\nplan = 0.03\n")
    assert hzplan(*arguments, cwd=plans).code == 0
    (plans / "check.toml").write_text("[tolerance]\nplan = 0.001\ndefault = 0.03\n")
    assert hzplan(*arguments, cwd=plans).code == 1
    for text, named in (
        ("[tolerance]\nother = 0.1\n", "tolerance.other"),
        ("[tolerance]\nplan = true\n", "tolerance.plan"),
        ("[tolerance]\nplan = -1\n", "tolerance.plan"),
        ("[else]\n", "one table"),
        ("tolerance = 3\n", "one table"),
        ("[", "not TOML"),
        ("[tolerance]\nplan.v2 = 0.1\n", "dots in quotes"),
        ("a = " + "[" * 5000, "not TOML"),
    ):
        (plans / "check.toml").write_text(text)
        done = hzplan(*arguments, cwd=plans)
        assert done.code == 2
        (line,) = done.stderr.splitlines()
        assert "check.toml" in line and named in line


def test_diff_names_tensors_and_counts_bytes(tmp_path: Path) -> None:
    profile = random_profile(random.Random(4))
    plan = solved(tmp_path)
    path, other = tmp_path / "plan.json", tmp_path / "other.json"
    done = hzplan("diff", path, path, "--exit-code", cwd=tmp_path)
    assert done.code == 0 and "The same choices." in done.stdout

    unit = next(unit for unit in plan.units if unit.buckets)
    world = {"param": profile.mesh.world, "grad": profile.mesh.world, "optim": profile.mesh.world}
    shards = unit.buckets[0].shards
    changed = shards.model_copy(update=world if shards.param != profile.mesh.world else {"param": 1})
    buckets = (unit.buckets[0].model_copy(update={"shards": changed}), *unit.buckets[1:])
    units = tuple(u.model_copy(update={"buckets": buckets}) if u is unit else u for u in plan.units)
    plan.model_copy(update={"units": units, "prefetch": plan.prefetch + 1}).save(other)
    done = hzplan("diff", path, other, "--json", cwd=tmp_path)
    assert done.code == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [choice["unit"] for choice in answer["choices"]] == ["prefetch", unit.name]
    assert answer["choices"][1]["tensors"] == list(unit.buckets[0].tensors)
    sent = {name for name in answer["figures"] if name.startswith("sent_bytes.")}
    assert sent == {f"sent_bytes.{name}" for name in plan.cluster.tier_names}
    assert hzplan("diff", path, other, "--exit-code", cwd=tmp_path).code == 1
    (tmp_path / "profile.json").unlink()  # then there is less to say
    done = hzplan("diff", path, other, cwd=tmp_path)
    assert done.code == 0 and "sent over" not in done.stdout and unit.name in done.stdout


@pytest.mark.parametrize("seed", range(4))
def test_bytes_sent_are_the_closed_forms(seed: int) -> None:
    """DDP: twice (W − 1)/W of the gradients; ZeRO-3: parameters once per forward and backward."""
    profile = random_profile(random.Random(seed))
    world, model = profile.mesh.world, CostModel(profile)
    schedule = model.schedule(prefetch=1, accumulation=1, clip=True)
    trained = [t.spec for unit in profile.units for t in unit.tensors if t.trainable]
    size = sum(spec.numel for spec in trained) * 4
    levels = profile.mesh.levels
    replicas = evaluate(model, uniform(profile, Levels(0, 0, 0)), schedule, profile.micro_batches[0])
    total = sum(sent_bytes(replicas))
    assert 2 * size * (world - 1) / world <= total * 1.001 + 1
    assert total <= 2.3 * size + 8192 * len(trained)
    everything = uniform(profile, Levels(levels, levels, levels))
    sharded = evaluate(model, everything, schedule, profile.micro_batches[0])
    assert sum(sent_bytes(sharded)) >= size * (world - 1) / world


def test_doctor_says_what_is_here(tmp_path: Path) -> None:
    done = hzplan("doctor", "--json", cwd=tmp_path)
    assert done.code == 0, done.stderr
    answer = json.loads(done.stdout)
    assert list(answer) == ["hzplan", "torch", "devices", "links", "solver", "emulation"]
    assert "works" in answer["solver"] and "gloo" in answer["torch"]
    assert not any(text.startswith("failed") for text in answer.values())


@pytest.mark.long
def test_a_slowdown_of_two_per_cent_names_every_golden_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    known = CostModel.collective_ns
    monkeypatch.setattr(CostModel, "collective_ns", lambda *a: round(known(*a) * 1.02))
    compute = CostModel.compute_ns
    monkeypatch.setattr(CostModel, "compute_ns", lambda *a: round(compute(*a) * 1.02))
    plans = sorted((ROOT / "plans").glob("*.json"))
    assert len(plans) >= 2
    for path in plans:
        assert not guard(path, replay_only=True).ok, path


def test_a_profile_is_data_only(tmp_path: Path) -> None:
    """A plan that names a factory is replayed and compared without importing it."""
    plan = solved(tmp_path)
    profile = Profile.load(tmp_path / "profile.json")
    trap = tmp_path / "trap.py"
    trap.write_text("import pathlib\npathlib.Path('sprung').touch()\n")
    named = plan.model.model_copy(update={"name": "trap:factory"})
    plan.model_copy(update={"model": named}).save(tmp_path / "plan.json")
    measured = profile.model.model_copy(update={"name": "trap:factory"})
    profile.model_copy(update={"model": measured}).save(tmp_path / "profile.json")
    for command in (("check", "plan.json"), ("diff", "plan.json", "plan.json")):
        assert hzplan(*command, cwd=tmp_path).code in (0, 1)
    assert not (tmp_path / "sprung").exists()
    assert replace(Request(1, 1), clip=False) != Request(1, 1)
    assert Profile.load(tmp_path / "profile.json")


def test_a_broken_file_does_not_hide_the_others(tmp_path: Path) -> None:
    solved(tmp_path)
    plans = _only_plans(tmp_path)
    (plans / "broken.json").write_text('{"format": ')
    (plans / "alone.json").write_text((plans / "plan.json").read_text().replace("../profile.json", "no.json"))
    done = hzplan("check", ".", "--replay-only", "--json", "--junit", "junit.xml", "--github", cwd=plans)
    assert done.code == 2 and "choose one" in done.stderr  # --github and --json
    done = hzplan("check", ".", "--replay-only", "--json", "--junit", "out/junit.xml", cwd=plans)
    assert done.code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("hzplan: alone.json: field source.profile: no.json") and "1 more like it" in line
    answer = json.loads(done.stdout)
    assert [(p["plan"], p["ok"]) for p in answer["plans"]] == [
        ("alone.json", False),
        ("broken.json", False),
        ("plan.json", True),
    ]
    assert "not valid JSON" in answer["plans"][1]["unreadable"]
    assert answer["plans"][2]["objective_s"]["golden"] > 0 and answer["plans"][1]["objective_s"] is None
    suite = ElementTree.parse(plans / "out/junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "0", "2")
    assert "UNREADABLE" in hzplan("check", ".", "--replay-only", cwd=plans).stdout


def test_changes_are_told_to_machines(tmp_path: Path) -> None:
    plan = solved(tmp_path)
    worse(plan, tmp_path / "plan.json", 1.02)  # better than recorded: worth saying, not failing
    answer = json.loads(hzplan("check", "plan.json", "--replay-only", "--json", cwd=tmp_path).stdout)
    (found,) = answer["plans"]
    assert found["ok"] and found["unreadable"] is None
    (change,) = found["changes"]
    assert change["kind"] == "formula" and not change["fails"] and "step" in change["what"]


@pytest.mark.parametrize(
    "field", ["model.signature", "model.seq_len", "model.name", "cluster.tier_names", "optimizer", "uses"]
)
def test_plan_and_profile_are_of_one_model_and_cluster(tmp_path: Path, field: str) -> None:
    solved(tmp_path)
    path = tmp_path / "plan.json"
    data = json.loads(path.read_text())
    owner, _, name = field.rpartition(".")
    record = data[owner] if owner else data
    record[name] = {
        "seq_len": 7,
        "tier_names": ["x"] * len(data["cluster"]["tier_names"]),
        "uses": data["uses"][:-1],
    }.get(name, "other")
    path.write_text(json.dumps(data))
    done = hzplan("check", path, "--replay-only", cwd=tmp_path)
    assert done.code == 2 and f"field {field} is not that of profile.json" in done.stderr


def test_reports_go_nowhere_that_is_read(tmp_path: Path) -> None:
    solved(tmp_path)
    plans = _only_plans(tmp_path)
    recorded = (plans / "plan.json").read_bytes(), (tmp_path / "profile.json").read_bytes()
    for option in ("--junit", "--summary"):
        for name in ("plan.json", "../profile.json", "."):
            done = hzplan("check", ".", "--replay-only", option, name, cwd=plans)
            assert done.code == 2 and done.stdout == "", done.stderr
    assert recorded == ((plans / "plan.json").read_bytes(), (tmp_path / "profile.json").read_bytes())


def test_file_names_are_data(tmp_path: Path) -> None:
    plan = solved(tmp_path)
    plans = _only_plans(tmp_path)
    worse(plan, plans / "plan.json")
    data = json.loads((plans / "plan.json").read_text())
    data["source"]["profile"] = "../profile.json"
    for file in plans.iterdir():
        file.unlink()
    for name in (b"::error::x", b"a\x1b[31m|`b`", b"\xff\xfe", b"two\nlines"):
        with open(bytes(plans) + b"/" + name + b".json", "w") as file:
            json.dump(data, file)
    done = hzplan(
        "check", ".", "--replay-only", "--github", "--summary", "s.md", "--junit", "j.xml", cwd=plans
    )
    assert done.code == 1 and "Traceback" not in done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.lstrip().startswith("::") for line in lines) == 8  # it is worse, and has no proof
    assert all("file=" in line for line in lines if line.lstrip().startswith("::"))
    assert "\x1b" not in done.stdout + (plans / "s.md").read_text()
    assert len(ElementTree.parse(plans / "j.xml").getroot()) == 4


def test_an_error_of_solving_names_the_plan(tmp_path: Path) -> None:
    plan = solved(tmp_path)
    source = plan.source.model_copy(update={"pins": ("nowhere*=param:world",)})
    plan.model_copy(update={"source": source}).save(tmp_path / "plan.json")
    done = hzplan("check", "plan.json", cwd=tmp_path)
    assert done.code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("hzplan: plan.json: ") and "nowhere" in line


def test_what_no_longer_fits_says_how_much_is_needed(tmp_path: Path) -> None:
    plan = solved(tmp_path)
    source = plan.source.model_copy(update={"memory_budget_bytes": 1})
    plan.model_copy(update={"source": source}).save(tmp_path / "plan.json")
    found = guard(tmp_path / "plan.json")
    assert "no plan within the budget: at least " in found.reason and "needed of 1 B" in found.reason


def test_diff_names_what_was_asked(tmp_path: Path) -> None:
    plan = solved(tmp_path)
    source = plan.source.model_copy(update={"memory_budget_bytes": 2**40, "pins": ("a=param:1",)})
    model = plan.model.model_copy(update={"seq_len": 7})
    plan.model_copy(update={"source": source, "model": model}).save(tmp_path / "other.json")
    done = hzplan("diff", "plan.json", "other.json", "--json", cwd=tmp_path)
    assert [choice["unit"] for choice in json.loads(done.stdout)["choices"]] == [
        "sequence length",
        "memory budget",
        "pins",
    ]


def test_a_plan_contradicts_what_it_says_of_itself(tmp_path: Path) -> None:
    plan = solved(tmp_path)
    source = plan.source.model_copy(update={"recompute": "all"})
    plan.model_copy(update={"source": source}).save(tmp_path / "plan.json")
    profile = Profile.load(tmp_path / "profile.json")
    able = CostModel(profile).recomputable
    assert guard(tmp_path / "plan.json", replay_only=True).ok == (plan.recomputed == Recomputed.of(able))
    unit = next(unit for unit in plan.units if unit.buckets)
    ghost = unit.buckets[0].model_copy(update={"tensors": (*unit.buckets[0].tensors, "ghost.weight")})
    units = [
        u.model_copy(update={"buckets": (ghost, *u.buckets[1:])}) if u is unit else u for u in plan.units
    ]
    plan.model_copy(update={"units": tuple(units)}).save(tmp_path / "plan.json")
    done = hzplan("check", "plan.json", "--replay-only", cwd=tmp_path)
    assert done.code == 2 and "ghost.weight is not in the profile" in done.stderr


def test_a_link_to_a_plan_is_that_plan(tmp_path: Path) -> None:
    solved(tmp_path)
    (tmp_path / "links").mkdir()
    (tmp_path / "links/plan.json").symlink_to(tmp_path / "plan.json")
    found = guard(tmp_path / "links/plan.json")
    assert found.ok and found.changes == ()


def test_reports_do_not_get_in_each_others_way(tmp_path: Path) -> None:
    solved(tmp_path)
    plans = _only_plans(tmp_path)
    check = ("check", ".", "--replay-only")
    for options in (("--junit", "r", "--summary", "r"), ("--junit", "check.toml")):
        (plans / "check.toml").write_text("[tolerance]\n")
        assert hzplan(*check, *options, cwd=plans).code == 2
        assert (plans / "check.toml").read_text() == "[tolerance]\n"
    done = hzplan(*check, "--github", "--summary", "new/folder/s.md", cwd=plans, GITHUB_STEP_SUMMARY="")
    assert done.code == 0 and (plans / "new/folder/s.md").read_text().startswith("### hzplan check")
    (plans / "check.toml").write_text(f"[tolerance]\n{'x' * 400} = 0.1\n")
    done = hzplan(*check, cwd=plans)
    assert done.code == 2 and "Errno" not in done.stderr


def test_no_name_reaches_the_terminal_or_ci_as_a_command(tmp_path: Path) -> None:
    plan = solved(tmp_path)
    data = json.loads((tmp_path / "plan.json").read_text().replace("u0", "u0\\u001b[31m\\n::error::no"))
    (tmp_path / "other.json").write_text(json.dumps(data))
    done = hzplan("diff", "plan.json", "other.json", cwd=tmp_path)
    assert done.code == 0 and plan.units
    assert "\x1b" not in done.stdout and "::error" not in done.stdout
    wide = tmp_path / f"{'x' * 30} ::warning::no.json"
    wide.write_text("{")
    done = hzplan("check", tmp_path, "--replay-only", "--github", cwd=tmp_path)
    assert done.code == 2
    commands = [line for line in done.stdout.splitlines() if line.strip().startswith("::")]
    assert commands and all(line.startswith("::error file=") for line in commands)
