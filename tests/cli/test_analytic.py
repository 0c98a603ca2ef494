"""Planning for a cluster that is not there, and Hugging Face models, by command."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest

from hzplan.cost.curves import interpolate
from hzplan.formats.base import to_text
from hzplan.formats.cluster import FOLDERS, ClusterModel
from hzplan.formats.profile import ModelledEntry, Profile
from tests.cli.command import hzplan

TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "auto_map": {"AutoModelForCausalLM": "evil.Model"},
}
ANALYTIC = ("--analytic", "--cluster", "h100-8x400g", "--dtype", "bf16", "--micro-batch", "1,2")


@pytest.mark.long
def test_a_plan_for_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    done = hzplan("profile", "hf:llama3-8b", *ANALYTIC, "--nodes", 2, "--json", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert "sequences of 4096 tokens; --seq-len takes another length" in done.stderr
    said = json.loads(done.stdout)
    assert said["parameters"] == 8_030_261_248
    assert said["units"] == 35
    assert prod(int(size) for size in said["mesh"].replace("|", ",").split(",")) == 16
    done = hzplan("solve", "profile.json", "--global-batch", 64, "--gap", 0.05, cwd=tmp_path)
    assert done.code == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "modelled for h100-8x400g" in said and "on 16 GPUs (8 GPUs × 2 nodes)" in said
    assert "published rows of this chip, to which the model was fitted" in said and "headroom" in said
    assert "next: hzplan export plan.json --to fsdp2" in said
    assert "torchrun --nnodes 2" in said and "--nproc-per-node 8 -m hzplan run plan.json" in said
    asked = ("--global-batch", 64, "--gap", 0.05, "-o", "again.json", "--like", "plan.json")
    again = hzplan("solve", "profile.json", *asked, "--baseline", "plan.json", "--json", cwd=tmp_path)
    assert again.code == 0, again.stderr
    told = json.loads(again.stdout)
    least, most = told["expected_step_s"]
    assert 0.7 * told["predicted"]["step_s"] < least < most < 1.5 * told["predicted"]["step_s"]
    assert told["baselines"][-1]["name"] == "yours" and told["baselines"][-1]["allowed"]
    other = hzplan("solve", "profile.json", "--global-batch", 128, "--baseline", "plan.json", cwd=tmp_path)
    assert other.code == 2 and "--baseline plan.json: field batch.global_batch is 64" in other.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["predicted"]["peak_memory_bytes"] <= 0.95 * 79.1 * 2**30


@pytest.mark.long
def test_a_model_measured_on_one_device_is_planned_for_a_cluster_of_them(tmp_path: Path) -> None:
    cluster = ClusterModel.load(FOLDERS[-1] / "clusters" / "h100-8x400g.json")
    mine = cluster.model_copy(update={"name": "mine", "backend": "gloo"})
    (tmp_path / "mine.json").write_text(to_text(mine))
    asked = ("gpt:nano", "--cluster", "mine.json", "--nodes", 2, "--micro-batch", 1)
    done = hzplan("profile", *asked, cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert "links are modelled, not measured: mine" in " ".join(done.stdout.split())
    profile = Profile.load(tmp_path / "profile.json")
    assert profile.modelled == ModelledEntry(cluster="mine") and profile.mesh.world == 16
    analysed = hzplan("profile", *asked, "--analytic", "-o", "analysed.json", cwd=tmp_path)
    assert analysed.code == 0, analysed.stderr
    modelled = Profile.load(tmp_path / "analysed.json")
    size = 1 << 20
    for measured, known in zip(profile.collectives, modelled.collectives, strict=True):
        lines = [[(p.bytes, p.seconds) for p in curve.points] for curve in (measured, known)]
        assert interpolate(lines[0], size) == pytest.approx(interpolate(lines[1], size), rel=0.01)
    assert profile.uses[-1].costs[0].seconds > modelled.uses[-1].costs[0].seconds  # it is no H100
    done = hzplan("profile", *asked, "--known", "profile.json", "-o", "again.json", cwd=tmp_path)
    assert "every unit's times are known at micro-batch 1" in done.stderr
    done = hzplan("solve", "profile.json", "--memory", "1GiB", "--global-batch", 16, cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert "links are modelled for mine" in " ".join(done.stdout.split())
    done = hzplan("rehearse", "plan.json", "--steps", 2, "--json", cwd=tmp_path)
    assert (done.code, json.loads(done.stdout)["world"]) == (0, 16), done.stderr


@pytest.mark.long
def test_a_plan_for_gpus_says_what_it_keeps_free_and_that_nobody_ran_it(tmp_path: Path) -> None:
    """A modelled profile and, as if profiled on GPUs, one without that mark and with its reserve measured."""
    asked = ("gpt:nano", "--analytic", "--cluster", "h100-8x400g", "--nodes", 2, "--micro-batch", 1)
    assert hzplan("profile", *asked, "--dtype", "bf16", cwd=tmp_path).code == 0
    modelled = Profile.load(tmp_path / "profile.json")
    taken = {"context_bytes": 3 * 2**30, "communicator_bytes": 2**30}
    cluster = modelled.cluster.model_copy(update=taken)
    modelled.replaced(modelled=None, cluster=cluster).save(tmp_path / "measured.json")
    for profile, reserve in (
        (
            "profile",
            "less 4.60 GiB for context, NCCL, fragments; assumed: a context of 512 MiB, 7 communicat",
        ),
        (
            "measured",
            "less 10.0 GiB for context, NCCL, fragments; measured: a context of 3.00 GiB, 7 communi",
        ),
    ):
        done = hzplan("solve", f"{profile}.json", "--global-batch", 16, "--gap", 0.05, cwd=tmp_path)
        assert done.code == 0, done.stderr
        said = " ".join(done.stdout.split())
        assert reserve in said, said
        untried = "(hzplan's runtime has not yet run on several GPUs)"
        assert f"on each node of the cluster {untried}: torchrun --nnodes 2" in said
        assert ("expect" in said and "published rows of this chip" in said) == (profile == "profile")
        assert ("outside what rows cover: 32 tokens a sequence" in said) == (profile == "profile")
    old = modelled.replaced(interference=())
    old.save(tmp_path / "old.json")
    done = hzplan("solve", "old.json", "--global-batch", 16, "--gap", 0.05, cwd=tmp_path)
    assert "does not hold for it: profile again" in " ".join(done.stdout.split()), done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--kernels", "fused"), "--kernels fused is not known; use eager, compiled"),
        (("--recompute", "some"), "--recompute some is not known; use full, attention, operations"),
        (("--attention", "flash-9"), "has no such kernel; it has flash-2, flash-3, cudnn, triton, standard"),
    ],
)
def test_options_of_the_model_are_known_by_name(options: tuple[str, str], said: str, tmp_path: Path) -> None:
    done = hzplan("profile", "gpt:nano", *ANALYTIC, *options, cwd=tmp_path)
    assert done.code == 2 and said in " ".join(done.stderr.split()), done.stderr


@pytest.mark.long
def test_kernels_attention_and_recomputation_change_seconds(tmp_path: Path) -> None:
    def profiled(name: str, *options: object) -> Profile:
        done = hzplan("profile", "gpt:small", *ANALYTIC, *options, "-o", name, cwd=tmp_path)
        assert done.code == 0, done.stderr
        return Profile.load(tmp_path / name)

    def seconds(profile: Profile) -> float:
        return sum(use.costs[-1].seconds for use in profile.uses)

    def again(profile: Profile) -> tuple[float, int]:
        costs = [use.costs[-1].recompute for use in profile.uses]
        kept = sum(cost.retained_bytes for cost in costs[: len(costs) // 2] if cost)
        return sum(cost.seconds for cost in costs if cost), kept

    eager, compiled = profiled("eager.json"), profiled("compiled.json", "--kernels", "compiled")
    assert seconds(compiled) < seconds(eager)
    found = [again(profiled(f"{kind}.json", "--recompute", kind)) for kind in ("full", "operations")]
    assert found[0][0] > found[1][0] > 0 and found[0][1] < found[1][1]
    assert seconds(profiled("slow.json", "--attention", "standard", "--seq-len", 4096)) > seconds(
        profiled("fast.json", "--attention", "flash-3", "--seq-len", 4096)
    )


@pytest.mark.distributed
def test_a_hugging_face_model_is_measured_planned_and_trained(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TINY))
    done = hzplan("profile", "hf:tiny", "--nproc", 2, "--micro-batch", 2, "--seq-len", 32, cwd=tmp_path)
    assert done.code == 0, done.stderr
    done = hzplan("solve", "profile.json", "--memory", "1GiB", "--global-batch", 4, cwd=tmp_path)
    assert done.code == 0, done.stderr
    done = hzplan("run", "plan.json", "--steps", 20, "--lr", 1e-2, "--json", cwd=tmp_path)
    assert done.code == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["loss_last"] < result["loss_first"] - 0.5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gpt:nano", "--analytic"), "--analytic and --nodes need --cluster NAME; clusters: a100"),
        (("gpt:nano", "--nodes", 2), "need --cluster NAME"),
        (("gpt:nano", *ANALYTIC, "--nproc", 2), "--nproc is for ranks that measure together"),
        (("gpt:nano", *ANALYTIC, "--links", "l.json"), "choose one"),
        (("gpt:nano", "--cluster", "h100-8x400g"), "has h100-sxm, and here is only a cpu to measure on"),
        (("gpt:nano", "--analytic", "--cluster", "mine"), "--cluster mine: not known; use a100-8x200g"),
        (
            ("gpt:nano", "--analytic", "--cluster", "h100-8x400g-xgmi"),
            "xgmi joins the devices of one node, not nodes",
        ),
        (
            ("gpt:nano", "--analytic", "--cluster", f"h100-8x{'9' * 20}g"),
            "at most 9999 devices a node, and 999999 Gbit/s each",
        ),
        (("gpt:nano", *ANALYTIC, "--nodes", 0), "--nodes 0: a cluster has at least 1 node"),
        (("gpt:nano", *ANALYTIC, "--mesh", "8|2", "--nodes", 2), "leave --nodes out"),
        (("hf:nothing", *ANALYTIC), "hf:nothing: no such file; use a config.json, its folder, or gpt3-175b"),
        (("hf:broken", *ANALYTIC), "broken/config.json: not a model's config.json"),
        (("hf:strange", *ANALYTIC), "strange/config.json: transformers does not take it"),
    ],
)
def test_mistakes_are_one_line(words: tuple[object, ...], said: str, tmp_path: Path) -> None:
    for name, text in (("broken", "[]"), ("strange", '{"model_type": "nobody-knows"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    done = hzplan("profile", *words, cwd=tmp_path)
    assert done.code == 2
    (line,) = done.stderr.strip().splitlines()
    assert said in line
    assert not (tmp_path / "profile.json").exists()


@pytest.mark.long
@pytest.mark.distributed
def test_links_are_measured_once_and_models_on_one_device(tmp_path: Path) -> None:
    done = hzplan("profile", "--only", "links", "--nproc", 2, "-o", "links.json", "--json", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["mesh"] == "2"
    done = hzplan("profile", "gpt:nano", "--links", "links.json", "--micro-batch", 4, cwd=tmp_path)
    assert done.code == 0, done.stderr
    links, profile = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("links", "profile"))
    for found in (links, profile):  # of the machine that measures the model, the peak in the model's dtype
        assert all(found["cluster"].pop(name) > 0 for name in ("peak_flops", "wakeup_seconds"))
    assert all(profile[key] == links[key] for key in ("cluster", "collectives", "interference"))
    done = hzplan("solve", "profile.json", "--memory", "1GiB", "--global-batch", 8, cwd=tmp_path)
    assert done.code == 0, done.stderr
    done = hzplan("run", "plan.json", "--steps", 3, cwd=tmp_path)
    assert done.code == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gpt:nano", "--only", "links"), "--only links stands without MODEL"),
        (("--only", "units"), "--only links stands without MODEL"),
        ((), "MODEL is missing"),
        (("gpt:nano", "--links", "profile.json"), "profile.json: no such file"),
        (("gpt:nano", "--links", "x.json", "--nproc", 4), "--nproc is for ranks that measure together"),
        (("gpt:nano", "--links", "x.json", "--mesh", "2"), "leave --mesh out"),
    ],
)
def test_mistakes_with_links_are_one_line(words: tuple[object, ...], said: str, tmp_path: Path) -> None:
    done = hzplan("profile", *words, cwd=tmp_path)
    assert done.code == 2
    assert said in done.stderr and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.long
@pytest.mark.distributed
def test_a_run_corrects_the_profile(tmp_path: Path) -> None:
    assert hzplan("profile", "gpt:nano", "--nproc", 2, "--micro-batch", 4, cwd=tmp_path).code == 0
    assert hzplan("solve", "profile.json", "--memory", "1GiB", "--global-batch", 8, cwd=tmp_path).code == 0
    done = hzplan(
        "run", "plan.json", "--steps", 12, "--metrics", "m.jsonl", "--trace", "t.json", cwd=tmp_path
    )
    assert done.code == 0, done.stderr
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    shown = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert shown == ["predicted", "rank 0", "rank 1"]
    done = hzplan("calibrate", "plan.json", "m.jsonl", "--json", cwd=tmp_path)
    assert done.code == 0, done.stderr
    found = json.loads(done.stdout)
    wrong = {when: abs(found["step_s"][when] - found["step_s"]["measured"]) for when in ("before", "after")}
    # Twelve short steps on a busy machine: how well a fit is, tests/unit/test_calibrate.py says.
    assert wrong["after"] <= max(wrong["before"], 0.3 * found["step_s"]["measured"])
    said = hzplan("calibrate", "plan.json", "m.jsonl", cwd=tmp_path).stdout
    following = said.strip().splitlines()[-1].split()[1:]
    assert hzplan(*following, cwd=tmp_path).code == 0
    assert hzplan("calibrate", "plan.json", "nowhere.jsonl", cwd=tmp_path).code == 2
    refused = hzplan(
        "calibrate", "plan.json", "m.jsonl", "-o", "calibrated.json", "--profile", "m.jsonl", cwd=tmp_path
    )
    assert refused.code == 2 and len(refused.stderr.strip().splitlines()) == 1
