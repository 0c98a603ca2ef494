"""Files: schemas as shipped, older versions, and readers that no file can bring down."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hzplan.errors import UserError
from hzplan.formats import base
from hzplan.formats.accuracy import Accuracy
from hzplan.formats.base import to_text, write_text
from hzplan.formats.cluster import ClusterModel, DeviceModel
from hzplan.formats.links import Links
from hzplan.formats.metrics import read_metrics
from hzplan.formats.plan import Plan
from hzplan.formats.profile import Profile
from hzplan.formats.schema import DOCUMENTS, FOLDER, schema_text
from tests.cli.command import ROOT
from tests.plans import make_plan

GOLDEN = ROOT / "plans"


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_the_schema_that_is_shipped_is_that_of_the_code(kind: str) -> None:
    """Else: python -m hzplan.formats.schema."""
    assert (FOLDER / f"{kind}.schema.json").read_text(encoding="utf-8") == schema_text(kind)
    assert json.loads(schema_text(kind))["properties"]["format"]["const"] == f"hzplan.{kind}"


def test_older_files_are_brought_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan("gpt:nano")
    old = json.loads(to_text(plan))
    old["version"] = -1
    old["depth"] = old.pop("prefetch")  # as if it had been called so two versions ago
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(old))
    with pytest.raises(UserError, match="field 'version' is -1, this hzplan reads 2; make the file again"):
        Plan.load(path)

    def renamed(data: dict[str, Any]) -> dict[str, Any]:
        return {("prefetch" if key == "depth" else key): value for key, value in data.items()}

    monkeypatch.setattr(base, "MIGRATIONS", {"hzplan.plan": {-1: renamed, 0: dict, 1: dict}})
    assert Plan.load(path) == plan
    for version, said in ((3, "made by a newer one"), (True, "make the file again"), (None, "make the file")):
        path.write_text(json.dumps({**old, "version": version}))
        with pytest.raises(UserError, match=said):
            Plan.load(path)


READERS = {
    "plan": Plan.load,
    "profile": Profile.load,
    "links": Links.load,
    "metrics": read_metrics,
    "device": DeviceModel.load,
    "cluster": ClusterModel.load,
    "accuracy": Accuracy.load,
}


def samples() -> dict[str, bytes]:
    """A good file for every reader."""
    profile = Profile.load(GOLDEN / "profiles" / "gpt-tiny-2x2.json")
    links = Links(
        provenance=profile.provenance,
        cluster=profile.cluster,
        collectives=profile.collectives,
        interference=profile.interference,
    )
    line = {"step": 5, "loss": 1.0, "step_s": 0.1, "exposed_comm_s": {"node": 0.01}, "tokens": 4}
    entry = {"backend": "gloo", "where": "x", "plans": 1, "step_mean": 0.1, "step_worst": 0.1}
    entry |= {"calibrated_mean": 0.1, "memory_worst": 0.1}
    accuracy = {"format": "hzplan.accuracy", "version": 1, "date": "d", "commit": "c", "entries": [entry]}
    models = ROOT / "cost_models"
    return {
        "plan": (GOLDEN / "gpt-tiny-2x2.json").read_bytes(),
        "profile": to_text(profile).encode(),
        "links": to_text(links).encode(),
        "metrics": json.dumps(line | {"peak_memory_bytes": 1}).encode(),
        "device": (models / "devices" / "h100-sxm.json").read_bytes(),
        "cluster": (models / "clusters" / "h100-8x400g.json").read_bytes(),
        "accuracy": json.dumps(accuracy).encode(),
    }


SAMPLES = samples()


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("links", {"host": {"points": "two"}}, "host.points: sizes not rising"),
        ("profile", {"host": {"points": "two"}}, "host.points: sizes not rising"),
        ("profile", {"optimizer": {"norm": "two"}}, "optimizer.norm: sizes not rising"),
    ],
)
def test_sizes_of_a_curve_rise(kind: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    data = json.loads(SAMPLES[kind])
    for field, names in changes.items():
        size = "bytes" if field == "host" else "elements"
        points = [{size: 8, "seconds": 1e-6, "spread": 0.0}] * 2
        data[field] = (data.get(field) or {}) | dict.fromkeys(names, points)
    path = tmp_path / "x.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=said):
        READERS[kind](path)


def test_who_reads_a_file_while_it_is_replaced_reads_all_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_text(path, "old" * 9999)
    with path.open(encoding="utf-8") as reader:
        assert reader.read(3) == "old"
        write_text(path, "new")
        assert reader.read() == "old" * 9998
    assert path.read_text(encoding="utf-8") == "new"


@pytest.mark.parametrize("call", ["fsync", "chmod", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "file.json"
    path.write_text("old")
    monkeypatch.setattr(os, call, full)
    with pytest.raises(UserError, match=r"file\.json: cannot be written \(No space left on device\)"):
        write_text(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file.json"]


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def spoilt(kind: str, chance: random.Random, junk: object) -> bytes:
    """A good file with one place of its text or of its tree changed."""
    good = SAMPLES[kind]
    deed = chance.randrange(6)
    if deed == 0:
        return good[: chance.randrange(len(good))]
    if deed == 1:
        at = chance.randrange(len(good))
        return good[:at] + bytes([chance.randrange(256)]) + good[at + 1 :]
    if deed == 2:
        return json.dumps(junk).encode()
    tree = json.loads(good)
    node, key = _place(tree, chance)
    if deed == 3:
        del node[key]
    elif deed == 4 and isinstance(node, dict):
        node[str(junk)] = junk
    else:
        node[key] = junk
    return json.dumps(tree).encode()


def _place(tree: Any, chance: random.Random) -> tuple[Any, Any]:
    node = tree
    while True:
        key = chance.choice(list(node)) if isinstance(node, dict) else chance.randrange(len(node))
        inner = node[key]
        if not isinstance(inner, dict | list) or not inner or chance.random() < 0.2:
            return node, key
        node = inner


@pytest.mark.parametrize("kind", READERS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), junk=JUNK)
def test_no_file_brings_a_reader_down(kind: str, seed: int, junk: object, tmp_path: Path) -> None:
    """A good answer, or one line that names the file."""
    path = tmp_path / "file.json"
    path.write_bytes(spoilt(kind, random.Random(seed), junk))
    try:
        READERS[kind](path)
    except UserError as error:
        text = str(error)
        assert str(path) in text and "\n" not in text and len(text) < 1000


@pytest.mark.parametrize("kind", READERS)
def test_good_files_are_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(SAMPLES[kind])
    assert READERS[kind](path)


def test_a_profile_of_version_1_is_read_with_the_same_values(tmp_path: Path) -> None:
    """Measured profiles cannot be measured again: every renamed field keeps its value."""
    measured = Profile.load(GOLDEN / "profiles" / "gpt-small-4.json")
    cluster = measured.cluster.model_copy(update={"wakeup_seconds": 1e-5})
    now = json.loads(to_text(measured.model_copy(update={"cluster": cluster})))
    old: dict[str, Any] = json.loads(json.dumps(now)) | {"version": 1}
    old["cluster"]["handoff_seconds"] = old["cluster"].pop("wakeup_seconds")
    old["cluster"]["scattered_by_exchange"] = old["cluster"].pop("reduce_scatter_by_exchange")
    for entry in old["interference"]:
        entry["compute_lost"], entry["slowdown"] = (
            entry.pop("compute_loss"),
            entry.pop("communication_slowdown"),
        )
        entry["collision"] = entry.pop("contention")
    for use in old["uses"]:
        use["reads"] = use.pop("reads_parameters")
        for cost in use["costs"]:
            cost["late_seconds"] = cost.pop("straggler_seconds")
            if "recompute" in cost:
                cost["recomputed"] = cost.pop("recompute")
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert json.loads(to_text(Profile.load(tmp_path / "old.json"))) == now
    old["cluster"]["wakeup_seconds"] = 1e-5
    (tmp_path / "old.json").write_text(json.dumps(old))
    with pytest.raises(UserError, match="'version' is 1, but field wakeup_seconds is not of this version"):
        Profile.load(tmp_path / "old.json")


def test_a_plan_of_version_1_gets_the_gap_of_its_predicted_step(tmp_path: Path) -> None:
    plan = Plan.load(GOLDEN / "gpt-tiny-2x2.json")
    old: dict[str, Any] = json.loads(to_text(plan)) | {"version": 1}
    old["proof"]["gap"] = 0.0001  # of the objective, which every file of version 1 has
    (tmp_path / "old.json").write_text(json.dumps(old))
    read = Plan.load(tmp_path / "old.json")
    assert read.proof.gap == pytest.approx(plan.predicted.step_s / plan.proof.bound_s - 1, abs=1e-6)
    assert read.proof.gap > 0.01
    assert read == plan
    del old["predicted"]["step_s"]
    (tmp_path / "old.json").write_text(json.dumps(old))
    with pytest.raises(UserError, match=r"predicted\.step_s"):
        Plan.load(tmp_path / "old.json")


def test_a_plan_of_a_profile_of_version_1_has_its_hash_still() -> None:
    """As golden plans had it before profiles were at version 2."""
    profile = Profile.load(GOLDEN / "profiles" / "gpt-tiny-2x2x2.json")
    assert base.has_fingerprint(profile, base.fingerprint(profile))
    assert base.has_fingerprint(profile, "6adcd952b9ebc5a5ac0c845a26d96253cfbabe7573f1d0a21eeac4f174cd7992")
    assert not base.has_fingerprint(profile, "0" * 64)


def test_one_key_has_one_value(tmp_path: Path) -> None:
    """Two programs would read different ones."""
    path = tmp_path / "plan.json"
    path.write_text('{"format": "hzplan.plan", "proof": {"gap": 1, "gap": 2}}')
    with pytest.raises(UserError, match="the key 'gap' appears twice"):
        base.read_json(path)


@pytest.mark.parametrize("depth", [300, 900, 20_000])
def test_deep_nonsense_of_version_1_is_one_line(depth: int, tmp_path: Path) -> None:
    nested = "[" * depth + "]" * depth
    (tmp_path / "p.json").write_text(f'{{"format": "hzplan.profile", "version": 1, "uses": {nested}}}')
    with pytest.raises(UserError) as caught:
        Profile.load(tmp_path / "p.json")
    assert "\n" not in str(caught.value)
