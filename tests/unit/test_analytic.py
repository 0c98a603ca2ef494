"""Profiles that are modelled: counted like measured ones, shapes as published."""

from __future__ import annotations

import json
import subprocess
import sys
from math import log2
from pathlib import Path

import pytest
import torch

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.layout import Dtype
from hzplan.cost.collectives import collectives, nodes_of, with_nodes
from hzplan.cost.curves import interpolate
from hzplan.cost.model import CostModel
from hzplan.errors import UserError
from hzplan.formats.cluster import FOLDERS, CountFigure, DeviceModel, find_cluster, known_clusters
from hzplan.formats.profile import CalibratedEntry, Profile
from hzplan.models.gpt import GPTConfig
from hzplan.models.hf import known_configs
from hzplan.models.workload import Workload, load
from hzplan.profiler import measure
from hzplan.profiler.analytic import analyse
from hzplan.solver.emit import emit
from hzplan.solver.evaluate import evaluate, uniform
from hzplan.solver.solve import Request, Solved, solve
from tests.long import shorter
from tests.unit.memory_tracker import MICRO_BATCH


def analysed(
    workload: Workload, *sizes: int, dtype: Dtype = "bfloat16", cluster: str = "h100-8x400g"
) -> Profile:
    data, device = find_cluster(cluster)
    mesh = Mesh.of_tiers(*(tier.ranks for tier in data.tiers))
    return analyse(workload, data, device, mesh=mesh, micro_batches=sizes, dtype=dtype, optimizer="adamw")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "model",
    shorter(["gpt:nano", "gpt:tiny", "hf:llama", "hf:mixtral"], without={"gpt:nano", "gpt:tiny", "hf:llama"}),
)
def test_counts_are_those_of_a_measured_profile(
    model: str, dtype: Dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if model.startswith("hf:"):
        if (model, dtype) == ("hf:mixtral", "float32"):
            pytest.skip("torch knows the shapes of grouped products in bfloat16 only")
        kind = model.removeprefix("hf:")
        (tmp_path / "config.json").write_text(json.dumps(TINY | {"model_type": kind}))
        model = f"hf:{tmp_path}"
    for name, value in (
        ("model.time.MAX_BLOCKS", 2),
        ("network.links.MAX_REPEATS", 3),
        ("model.optimizer.MAX_REPEATS", 3),
    ):
        monkeypatch.setattr(f"hzplan.profiler.{name}", value)
    measured = measure(
        load(model),
        mesh=Mesh.parse("1"),
        tier_names=("node",),
        micro_batches=[2],
        dtype=dtype,
        optimizer="adamw",
        progress=lambda text, fraction: None,
    )
    modelled = analysed(load(model), 2, dtype=dtype)
    assert modelled.model == measured.model
    assert modelled.units == measured.units
    assert [use.use for use in modelled.uses] == [use.use for use in measured.uses]
    level = [0, 0]
    peak = [0, 0]
    for ours, theirs in zip(modelled.uses, measured.uses, strict=True):
        (mine,), (real,) = ours.costs, theirs.costs
        assert mine.flops == real.flops
        for index, cost in enumerate((mine, real)):
            peak[index] = max(peak[index], level[index] + cost.peak_bytes)
            level[index] += cost.retained_bytes
        if ours.phase == "forward":
            assert mine.retained_bytes == pytest.approx(real.retained_bytes, rel=0.01, abs=4096)
    assert peak[0] == pytest.approx(peak[1], rel=0.02)
    assert (modelled.optimizer.state_per_element, measured.modelled) == (2, None)


def test_saved_activations_of_a_block_are_those_of_the_closed_form() -> None:
    """By hand, in tensors of [tokens, width]: what the two norms, the four products, attention and GELU save.

    norm's input and output (1 + 1), q, k, v (3), attention's result (1), the second norm's input and output
    (1 + 1), GELU's input and output (4 + 4); and per token attention's log-sum-exp of every head, and mean
    and deviation of both norms.
    """
    config = GPTConfig(vocab=256, layers=2, width=96, heads=6, seq_len=64)
    from hzplan.models.gpt import GPT

    base = load("gpt:nano", seq_len=64)
    workload = Workload("mine", lambda: GPT(config), base.batch, base.loss, 64, 256)
    profile = analysed(workload, 3, dtype="float32")
    (block,) = [u.costs[0] for u in profile.uses if (u.unit, u.phase) == ("layers.1", "forward")]
    tokens = 3 * 64
    assert block.retained_bytes == pytest.approx(
        4 * tokens * (16 * config.width + config.heads + 4), rel=0.01
    )


TINY = {  # with fewer keys than queries; Mixtral takes what it knows of it
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}

PUBLISHED = {  # parameters, as their authors state them or safetensors' headers sum up to
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "mixtral-8x7b": 46_702_792_704,
    "moonlight-16b-a3b": 15_960_000_000,
    "gpt3-175b": 174_591_000_000,
}


@pytest.mark.parametrize("name", known_configs())
def test_known_models_have_their_parameters(name: str) -> None:
    with torch.device("meta"):
        model = load(f"hf:{name}").build()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(PUBLISHED[name], rel=0.002)


@pytest.mark.parametrize(("name", "active"), [("llama3-8b", 7_504_924_672), ("mixtral-8x7b", 12_748_000_000)])
def test_flops_are_those_of_the_closed_form(name: str, active: int) -> None:
    """Six for every weight that a token meets (all but the embedding's), and attention's four products:
    forward 4 · length · width for every token and layer, backward twice that."""
    length = 512
    profile = analysed(load(f"hf:{name}", seq_len=length), 1)
    attention = 12 * length * length * 4096 * 32
    counted = sum(use.costs[0].flops for use in profile.uses)
    assert counted == pytest.approx(6 * active * length + attention, rel=0.01)


@pytest.mark.parametrize("name", known_clusters())
def test_clusters_that_come_along_can_be_planned_for(name: str) -> None:
    profile = analysed(load("gpt:tiny"), 1, cluster=name)
    assert profile.modelled is not None and profile.modelled.cluster == name
    request = Request(2**30, profile.mesh.world, gap=0.05, depths=(1,), time_limit_s=5)
    solved = solve(profile, request)
    assert isinstance(solved, Solved) and solved.best.step_s * 1e9 >= solved.bound_ns
    plan = emit(profile, request, solved, profile_path=Path("profile.json"), plan_path=Path("plan.json"))
    known = all(tier.ctas is not None for tier in find_cluster(name)[0].tiers)
    assert (plan.ctas is not None) == bool(profile.interference) == known


def test_a_device_that_says_its_sms_loses_some_to_collectives() -> None:
    """As many blocks as a tier's kernels have; the plan limits communicators to them."""
    cluster, device = find_cluster("h100-8x400g")
    count = CountFigure(value=132, kind="specified", source="data sheet")
    with_sms = device.model_copy(update={"sms": count})
    mesh = Mesh.of_tiers(8, 2)
    profile = analyse(
        *(load("gpt:tiny"), cluster, with_sms),
        mesh=mesh,
        micro_batches=(1,),
        dtype="bfloat16",
        optimizer="adamw",
    )
    losses = [(entry.ctas, entry.compute_loss) for entry in profile.interference]
    assert losses == [(24, round(24 / 132, 4)), (8, round(8 / 132, 4))]
    request = Request(2**30, 16, gap=0.05, depths=(1,), time_limit_s=5)
    solved = solve(profile, request)
    assert isinstance(solved, Solved) and solved.best.step_s * 1e9 >= solved.bound_ns
    plan = emit(profile, request, solved, profile_path=Path("profile.json"), plan_path=Path("plan.json"))
    assert plan.ctas == (24, 8)


def test_every_device_file_is_one() -> None:
    files = [path for folder in FOLDERS for path in (folder / "devices").glob("*.json")]
    assert len(files) >= 3
    for path in files:
        DeviceModel.load(path)


def test_a_slower_network_makes_collectives_slower_and_nothing_else(tmp_path: Path) -> None:
    data, device = find_cluster("h100-8x400g")
    text = json.loads(data.model_dump_json())
    text["tiers"][1]["bytes_per_s"]["value"] /= 2
    (tmp_path / "mine.json").write_text(json.dumps(text))
    slow, same = find_cluster(str(tmp_path / "mine.json"))
    assert same == device
    mesh = Mesh.of_tiers(8, 8)
    found = [
        analyse(load("gpt:nano"), c, device, mesh=mesh, micro_batches=[1], dtype="bfloat16", optimizer="sgd")
        for c in (data, slow)
    ]
    assert found[0].uses == found[1].uses
    for before, after in zip(found[0].collectives, found[1].collectives, strict=True):
        size = before.points[-1].bytes
        slower = interpolate([(p.bytes, p.seconds) for p in after.points], size) > before.points[-1].seconds
        assert slower == (before.low >= mesh.tier_bounds[1][0])


@pytest.mark.parametrize("nodes", [2, 3, 64, 2048])
@pytest.mark.parametrize("nbytes", [1 << 10, 1 << 20, 1 << 28, 1 << 34, 1 << 38])
def test_between_nodes_the_faster_of_ring_and_pat(nodes: int, nbytes: int) -> None:
    """By hand: the ring's n - 1 hops, or PAT's rounds of 4.3 us and 2.8 us a rank at 3/4 of its rate, which
    falls with every doubling; inside a node, without PAT, the ring."""
    mesh = Mesh.of_tiers(8, nodes)
    cluster = find_cluster("h100-8x400g")[0]
    curves = {(c.low, c.high): c for c in collectives(cluster, mesh, 1 << 30)}
    inner, outer = cluster.tiers
    assert inner.congestion is None and outer.congestion is not None
    inside, between = (
        interpolate([(point.bytes, point.seconds) for point in curves[bounds].points], nbytes)
        for bounds in mesh.tier_bounds
    )
    rate = 450e9 * inner.bytes_share.value
    assert inside == pytest.approx(7 * inner.latency_s.value + 7 / 8 * nbytes / rate, rel=1e-3)
    rate = 50e9 * outer.bytes_share.value / (1 + outer.congestion.value * log2(nodes))
    wire = (nodes - 1) / nodes * nbytes / rate
    rounds = {2: 1, 3: 2, 64: 6, 2048: 11}[nodes]
    pat = rounds * 4.3e-6 + nodes * 2.8e-6 + wire / 0.75
    assert between == pytest.approx(min((nodes - 1) * outer.latency_s.value + wire, pat), rel=1e-3)


@pytest.mark.parametrize("nodes", [1, 3, 16])
def test_on_other_nodes_as_if_profiled_there(nodes: int) -> None:
    data, device = find_cluster("h100-8x400g")
    here, there = (
        analyse(
            load("gpt:nano"),
            data,
            device,
            mesh=Mesh.of_tiers(8, size),
            micro_batches=[1],
            dtype="bfloat16",
            optimizer="adamw",
        )
        for size in (4, nodes)
    )
    assert nodes_of(here) == 4
    same = {"provenance": there.provenance, "uses": there.uses}
    moved = with_nodes(here, nodes)
    assert moved.model_copy(update=same) == there and moved.mesh.world == 8 * nodes
    assert (there.uses[0].costs[0].seconds > here.uses[0].costs[0].seconds) == (nodes > 4)
    for mine, theirs in zip(moved.uses, there.uses, strict=True):
        assert mine.costs[0].seconds == pytest.approx(theirs.costs[0].seconds, abs=2e-9)
    entry = CalibratedEntry(steps=1, compute=1.0, tiers=(1.0, 2.0), optimizer=1.0)
    calibrated = with_nodes(here.model_copy(update={"calibrated": entry}), nodes)
    for one, as_modelled in zip(calibrated.collectives, moved.collectives, strict=True):
        times = entry.tiers[moved.mesh.tier_of(one.high - 1)]
        assert [p.seconds for p in one.points] == pytest.approx(
            [times * p.seconds for p in as_modelled.points]
        )


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--cluster nowhere: not known; use .*h100-8x400g"):
        find_cluster("nowhere")
    data, _ = find_cluster("h100-8x400g")
    (tmp_path / "c.json").write_text(
        data.model_copy(update={"device": "../devices/h100-sxm"}).model_dump_json()
    )
    with pytest.raises(UserError, match="field device: String should match pattern"):
        find_cluster(str(tmp_path / "c.json"))
    (tmp_path / "c.json").write_text(data.model_copy(update={"device": "mine"}).model_dump_json())
    with pytest.raises(UserError, match=r"field device: no mine\.json beside it"):
        find_cluster(str(tmp_path / "c.json"))
    text = json.loads(data.model_dump_json())
    text["tiers"][0]["bytes_per_s"]["value"] = 450
    (tmp_path / "c.json").write_text(json.dumps(text))
    with pytest.raises(UserError, match=r"field tiers\.0\.bytes_per_s\.value: .* greater than or equal"):
        find_cluster(str(tmp_path / "c.json"))
    with pytest.raises(UserError, match="no peak for float64"):
        analysed(load("gpt:nano"), 1, dtype="float64")
    with pytest.raises(UserError, match="mesh 2 does not have the 2 tiers"):
        cluster, device = find_cluster("h100-8x400g")
        analyse(
            load("gpt:nano"),
            cluster,
            device,
            mesh=Mesh.parse("2"),
            micro_batches=[1],
            dtype="bfloat16",
            optimizer="adamw",
        )


def test_a_model_that_looks_at_values_is_told_so() -> None:
    base = load("gpt:nano")

    def loss(model: torch.nn.Module, batch: object) -> torch.Tensor:
        found = base.loss(model, batch)
        return found if found.item() > 0 else -found

    with pytest.raises(UserError, match="without values failed"):
        analysed(Workload("mine", base.build, base.batch, loss, 32, 256), 1)


def test_memory_is_what_torch_tracks_of_fsdp2() -> None:
    """Full shards over 64 ranks, against FSDPMemTracker, which runs the real FSDP2 under fake tensors."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.memory_tracker"], capture_output=True, text=True, check=True
    )
    tracked = json.loads(done.stdout)
    data, device = find_cluster("h100-8x400g")
    profile = analyse(
        load("tests.unit.memory_tracker:model"),
        data,
        device,
        mesh=Mesh.of_tiers(8, 8),
        micro_batches=[MICRO_BATCH],
        dtype="float32",
        optimizer="adamw",
    )
    model = CostModel(profile)
    schedule = model.schedule(prefetch=1, accumulation=1, clip=True)
    finest = model.mesh.levels
    levels = Levels(finest, finest, finest)
    memory = evaluate(model, uniform(profile, levels), schedule, MICRO_BATCH).memory
    for category in ("parameters", "gradients", "optimizer"):
        assert getattr(memory, category) == pytest.approx(tracked[category], rel=0.02)
    kept = sum(use.costs[0].retained_bytes for use in profile.uses if use.phase == "forward")
    assert kept == pytest.approx(tracked["activations"], rel=0.02)
