"""A user's mistake is one line that says what is wrong, and an exit code: no traceback, no half file."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hzplan.core.hierarchy import Levels
from hzplan.formats.base import to_text
from hzplan.formats.plan import Plan
from tests.cli.command import Done, hzplan, python, torchrun
from tests.plans import make_plan

FACTORIES = """
import os, signal, time
from hzplan.models.gpt import GPT, PRESETS

def model():
    return GPT(PRESETS["nano"])

def second():
    return os.environ.get("RANK") == "1"

def raises():
    if second():
        raise RuntimeError("no weights on this host")
    return model()

def exits():
    if second():
        os._exit(7)
    return model()

def killed():
    if second():
        os.kill(os.getpid(), signal.SIGKILL)
    return model()

class Late:
    vocab, seq_len, calls = 256, 32, 0

    def __init__(self):
        self.model = model()

    def loss(self, model, batch):
        from hzplan.models.workload import next_token_loss
        self.calls += 1
        if second() and self.calls == 4:
            raise ValueError("a strange\\nbatch")
        return next_token_loss(model, batch)

class Sleeps(Late):
    def loss(self, model, batch):
        from hzplan.models.workload import next_token_loss
        self.calls += 1
        if second() and self.calls == 4:
            time.sleep(100)
        return next_token_loss(model, batch)
"""


@pytest.fixture(scope="module")
def good() -> Plan:
    """A plan for gpt:nano on 2 ranks."""
    return make_plan("gpt:nano", mesh="2")


@pytest.fixture
def folder(tmp_path: Path, good: Plan) -> Path:
    """An empty folder but for plan.json."""
    good.save(tmp_path / "plan.json")
    return tmp_path


def refuse(folder: Path, *arguments: object, code: int = 2) -> str:
    """Run a command that must fail with one line and leave no file; returns the line."""
    before = set(folder.rglob("*"))
    done = hzplan(*arguments, cwd=folder)
    assert_one_line(done, code)
    assert {path for path in folder.rglob("*") if "__pycache__" not in path.parts} == before
    return done.stderr


def assert_one_line(done: Done, code: int) -> None:
    assert done.code == code, done
    assert len(done.lines) == 1, done.stderr
    assert done.stderr.startswith("hzplan: ")
    assert "Traceback" not in done.stderr + done.stdout
    assert done.stdout == ""


def edited(plan: Plan, change: Callable[[dict[str, Any]], object]) -> str:
    """The plan's text after a change to its JSON object."""
    data = json.loads(to_text(plan))
    change(data)
    return json.dumps(data)


# ---- files ---------------------------------------------------------------------------------------------


def test_missing_plan(folder: Path) -> None:
    assert "nowhere.json: no such file" in refuse(folder, "run", "nowhere.json")


def test_folder_instead_of_plan(folder: Path) -> None:
    assert "folder" in refuse(folder, "run", ".")


def test_truncated_plan(folder: Path, good: Plan) -> None:
    text = to_text(good)
    (folder / "plan.json").write_text(text[: len(text) // 2])
    line = refuse(folder, "run", "plan.json")
    assert "plan.json: not valid JSON at line" in line


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda data: data.update(version=99), "field 'version' is 99"),
        (lambda data: data.update(format="hzplan.profile"), "not a hzplan.plan file"),
        (lambda data: data.update(speed="high"), "field speed"),
        (lambda data: data["batch"].update(extra=1), "field batch.extra"),
        (lambda data: data["predicted"].update(step_s=float("nan")), "NaN"),
        (lambda data: data["predicted"].update(step_s=-1.0), "field predicted.step_s"),
        (lambda data: data["batch"].update(global_batch=5), "global_batch"),
        (lambda data: data.update(optimizer="lion"), "field optimizer: 'lion'"),
        (lambda data: data["units"][0]["buckets"][0]["shards"].update(optim=3), "3 shards"),
        (lambda data: data["uses"].append("F nobody"), "F nobody"),
        (
            lambda data: data.update(wire={"param": ["int4"], "grad": ["exact"], "kept": []}),
            "field wire.param",
        ),
        (lambda data: data.update(wire={"param": ["int8"], "grad": ["fp8"], "kept": []}), "wire.grad: bf16"),
        (lambda data: data.update(wire={"param": [], "grad": ["int8"], "kept": []}), "wire.param: 1 formats"),
        (lambda data: data.update(wire={"param": ["exact"], "grad": ["exact"], "kept": []}), "leave it out"),
        (lambda data: data.update(narrow_sums=True), "narrow_sums: float32 is what"),
    ],
)
def test_spoilt_plan(
    folder: Path, good: Plan, change: Callable[[dict[str, Any]], object], expected: str
) -> None:
    (folder / "plan.json").write_text(edited(good, change))
    line = refuse(folder, "run", "plan.json")
    assert "plan.json" in line
    assert expected in line


def test_plan_that_is_not_text(folder: Path) -> None:
    (folder / "plan.json").write_bytes(b"\xff\xfe\x00plan")
    assert "not UTF-8 text" in refuse(folder, "run", "plan.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_plan(folder: Path) -> None:
    (folder / "plan.json").chmod(0)
    assert "cannot be read" in refuse(folder, "run", "plan.json")


# ---- what does not fit the plan ------------------------------------------------------------------------


def test_plan_for_another_world(folder: Path) -> None:
    line = refuse(folder, "run", "plan.json", "--nproc", 3)
    assert "plan.json: field cluster.mesh: the plan is for 2 ranks, this job has 3" in line


def test_plan_for_another_world_inside_a_job(folder: Path) -> None:
    job = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = hzplan("run", "plan.json", cwd=folder, **job)
    assert_one_line(done, 2)
    assert "plan.json: field cluster.mesh: the plan is for 2 ranks, this job has 1" in done.stderr


def test_only_the_first_rank_says_what_all_know(folder: Path) -> None:
    done = hzplan("run", "plan.json", "--steps", 0, cwd=folder, RANK="1", WORLD_SIZE="2")
    assert (done.code, done.stderr) == (2, "")


def test_plan_for_another_model(folder: Path) -> None:
    line = refuse(folder, "run", "plan.json", "gpt:tiny")
    assert "plan.json: the plan is for another model (gpt:nano): layers.2" in line


def test_unknown_model(folder: Path) -> None:
    assert "gpt:giant: no such preset" in refuse(folder, "run", "plan.json", "gpt:giant")


def test_factory_is_not_run_because_a_plan_names_it(folder: Path, good: Plan) -> None:
    (folder / "dangerous.py").write_text("open('ran', 'w')\n")
    (folder / "plan.json").write_text(
        edited(good, lambda data: data["model"].update(name="dangerous:factory"))
    )
    line = refuse(folder, "run", "plan.json")
    assert "dangerous:factory is a Python factory" in line
    assert "hzplan run plan.json dangerous:factory" in line


def test_empty_data_folder(folder: Path) -> None:
    (folder / "texts").mkdir()
    assert "texts: no text in it" in refuse(folder, "run", "plan.json", "--data", "texts")


def test_missing_data(folder: Path) -> None:
    assert "no such file or folder" in refuse(folder, "run", "plan.json", "--data", "texts")


def test_too_little_data(folder: Path) -> None:
    (folder / "short.txt").write_text("a few words")
    assert "too little text" in refuse(folder, "run", "plan.json", "--data", "short.txt")


# ---- options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("run",), "Missing argument"),
        (("run", "plan.json", "--fast"), "No such option: --fast"),
        (("run", "plan.json", "--steps", "many"), "--steps"),
        (("run", "plan.json", "--steps", "0"), "--steps 0"),
        (("run", "plan.json", "--lr", "nan"), "--lr nan"),
        (("run", "plan.json", "--lr", "-1"), "--lr -1"),
        (("run", "plan.json", "--nproc", "0"), "--nproc 0"),
        (("run", "plan.json", "--timeout", "0"), "--timeout 0"),
        (("run", "plan.json", "--metrics", "."), ".: is a folder"),
        (("run", "plan.json", "--metrics", "plan.json/m.jsonl"), "plan.json/m.jsonl: cannot be written"),
        (("profile",), "MODEL is missing"),
        (("profile", "gpt:nano", "--micro-batch", "x"), "--micro-batch x"),
        (("profile", "gpt:nano", "--micro-batch", "0,1"), "--micro-batch 0,1"),
        (("profile", "gpt:nano", "--micro-batch", ""), "--micro-batch"),
        (("profile", "gpt:nano", "--dtype", "fp16"), "--dtype fp16 is not supported"),
        (("profile", "gpt:nano", "--dtype", "int3"), "--dtype int3 is not known"),
        (("profile", "gpt:nano", "--optimizer", "lion"), "--optimizer lion"),
        (("profile", "gpt:nano", "--mesh", "2|x"), "--mesh"),
        (("profile", "gpt:nano", "--mesh", "2|2"), "--mesh 2|2 has 4 ranks, this job has 1"),
        (("profile", "gpt:nano", "--seq-len", "0"), "--seq-len 0"),
        (("profile", "gpt:nano", "-o", "plan.json/p.json"), "plan.json/p.json: cannot be written"),
        (("profile", "gpt:nano", "-o", "/proc/nowhere/p.json"), "/proc/nowhere/p.json: cannot be written"),
        (("profile", "nano"), "nano: not a model"),
        (("profile", "hf:gpt2"), "hf:gpt2: no such file"),
        (("profile", "nowhere:factory"), "no module `nowhere`"),
        (("plot",), "No such command 'plot'"),
    ],
)
def test_bad_usage(folder: Path, arguments: tuple[str, ...], expected: str) -> None:
    assert expected in refuse(folder, *arguments)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, "RANK is 'zero'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 in a job of 2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
    ],
)
def test_half_a_job_in_the_environment(folder: Path, variables: dict[str, str], expected: str) -> None:
    done = hzplan("run", "plan.json", cwd=folder, **variables)
    assert_one_line(done, 2)
    assert expected in done.stderr


# ---- ranks that fail -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        (
            "raises",
            "rank 1: plan.json: factories:raises: the factory raised RuntimeError: no weights on this",
        ),
        ("exits", "rank 1 ended with exit code 7"),
        ("killed", "rank 1 was ended by SIGKILL"),
    ],
)
def test_rank_that_dies_at_start(folder: Path, factory: str, expected: str) -> None:
    (folder / "factories.py").write_text(FACTORIES)
    line = refuse(folder, "run", "plan.json", f"factories:{factory}", "--steps", 2, code=4)
    assert expected in line


def test_rank_that_fails_in_training(folder: Path) -> None:
    (folder / "factories.py").write_text(FACTORIES)
    done = hzplan("run", "plan.json", "factories:Late", "--steps", 50, "--json", cwd=folder)
    assert done.code == 4
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    said = [line for line in done.lines if line.startswith("hzplan: ")]
    assert said == ["hzplan: rank 1: ValueError: a strange batch (HZPLAN_DEBUG=1 shows where)"]


def test_a_rank_that_does_not_arrive_is_named(folder: Path) -> None:
    (folder / "factories.py").write_text(FACTORIES)
    done = hzplan("run", "plan.json", "factories:Sleeps", "--steps", 50, "--timeout", 3, cwd=folder)
    assert done.code == 4
    assert re.search(
        r"^hzplan: rank 0: stream \w+\.0 \(tier 0\), task .*: rank 1 did not arrive within 3 s$",
        done.lines[-1],
    )


LOOP = """
import datetime, sys
import torch, torch.distributed as dist
import hzplan
from hzplan.errors import JobFailed
from hzplan.models.workload import load

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
workload = load("gpt:nano")
torch.manual_seed(0)
model, optimizer = hzplan.parallelize(workload.build(), "plan.json", lr=0.1)
batch = workload.batch(1, torch.Generator().manual_seed(0))

def evaluate(times):
    with torch.no_grad():
        for _ in range(times):
            workload.loss(model, batch)

try:
    for step in range(4):
STEP
        optimizer.step()
    sys.exit("ranks that went different ways went unnoticed")
except JobFailed as error:
    print(f"said by {dist.get_rank()}: {error}", file=sys.stderr, flush=True)
    sys.exit(error.exit_code)
"""
"""A loop of one's own on two ranks; ``STEP``: what comes before a step's update."""


def ends_naming_a_rank(folder: Path, step: str) -> None:
    """Run the loop: every rank that fails says which one did not come, with exit code 4."""
    (folder / "loop.py").write_text(LOOP.replace("STEP", textwrap.indent(textwrap.dedent(step), " " * 8)))
    done = torchrun(2, "loop.py", cwd=folder)
    assert "unnoticed" not in done.stderr
    assert re.search(r"said by \d: .*rank \d.* (within|in time)", done.stderr), done.stderr[-3000:]
    assert re.search(r"exitcode *: 4 ", done.stderr), done.stderr[-3000:]


@pytest.mark.parametrize("levels", [(0, 0, 0), (0, 1, 1), (1, 1, 1)])
@pytest.mark.parametrize("clips", [True, False])
def test_a_step_that_one_rank_abandons_ends_the_job(
    folder: Path, levels: tuple[int, int, int], *, clips: bool
) -> None:
    make_plan("gpt:nano", mesh="2", levels=Levels(*levels), accumulation=2, clip=clips).save(
        folder / "plan.json"
    )
    step = """
        for micro_batch in range(2):
            workload.loss(model, batch).backward()
            if step == 1 and micro_batch == 0 and dist.get_rank() == 1:
                optimizer.zero_grad()
    """
    clipping = "        optimizer.clip_grad_norm_(1.0)\n" if clips else ""
    ends_naming_a_rank(folder, step.rstrip(" ") + clipping)


@pytest.mark.parametrize(("one", "others"), [(1, 0), (0, 1), (2, 1)])
def test_ranks_that_leave_the_schedule_differently_end_the_job(folder: Path, one: int, others: int) -> None:
    """An evaluation on one rank alone, or of a batch more, whose gathers could meet other ones."""
    make_plan("gpt:nano", mesh="2", levels=Levels(1, 1, 1), clip=True).save(folder / "plan.json")
    step = f"""
        if step == 2:
            evaluate({one} if dist.get_rank() == 1 else {others})
        workload.loss(model, batch).backward()
        optimizer.clip_grad_norm_(1.0)
    """
    ends_naming_a_rank(folder, step)


def test_in_a_ring_nobody_blames_a_rank_that_only_waits(folder: Path) -> None:
    (folder / "factories.py").write_text(FACTORIES)
    make_plan("gpt:nano", mesh="4").save(folder / "plan.json")
    command = ("run", "plan.json", "factories:Sleeps", "--steps", 50, "--timeout", 3)
    done = torchrun(4, "-m", "hzplan", *command, cwd=folder)
    assert done.code != 0
    # torchrun ends the others when the first has failed, some before they have spoken.
    assert {*re.findall(r"rank (\d) did not arrive within 3 s", done.stderr)} == {"1"}


def test_debugging_shows_the_traceback(folder: Path) -> None:
    done = hzplan("run", "nowhere.json", cwd=folder, HZPLAN_DEBUG="1")
    assert done.code == 2
    assert "Traceback" in done.stderr
    assert done.lines[-1] == "hzplan: nowhere.json: no such file"


def test_without_torch_the_command_that_needs_it_says_so(tmp_path: Path) -> None:
    make_plan("gpt:nano", mesh="1").save(tmp_path / "plan.json")
    script = "import sys; sys.modules['torch'] = None; sys.argv = ['hzplan', 'verify', 'plan.json']; "
    done = python("-c", script + "from hzplan.cli import main; main()", cwd=tmp_path)
    assert done.code == 2 and len(done.stderr.strip().splitlines()) == 1
    assert "this command needs torch, which is not installed" in done.stderr
