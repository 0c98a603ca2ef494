"""Published rows: read strictly; the model of efficiency that is held against them."""

from __future__ import annotations

import json
from dataclasses import replace
from math import exp, log
from pathlib import Path

import pytest
import torch

from benchmarks.published.fit import Datum, Figure, fit
from benchmarks.published.micro import measured
from benchmarks.published.scored import Coverage, Errors, Question, Scored, order, questions, regret
from benchmarks.published.settings import counted, published_tokens_per_s, settings
from hzplan.core.hierarchy import Mesh
from hzplan.cost.collectives import collectives, lateness
from hzplan.errors import UserError
from hzplan.formats.cluster import find_cluster, known_devices, load_device
from hzplan.formats.expected import expected
from hzplan.formats.published import MicroRow, TrainingRow, device_name, read_rows, shipped_rows
from hzplan.models.workload import load
from hzplan.profiler.model import shapes
from hzplan.profiler.model.kernels import Pricing
from hzplan.profiler.model.operations import Attention, Operated, Product, Stream
from tests.long import shorter

ROWS = shipped_rows() / "rows.jsonl"


def row(**changes: object) -> dict[str, object]:
    return json.loads(ROWS.read_text().splitlines()[0]) | changes


def read(tmp_path: Path, *lines: object) -> tuple[tuple[TrainingRow, ...], tuple[str, ...]]:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    found = read_rows(path, TrainingRow)
    return found.rows, found.problems


def test_rows_that_come_along_are_read_without_a_complaint() -> None:
    training, micro = read_rows(ROWS, TrainingRow), read_rows(shipped_rows() / "micro.jsonl", MicroRow)
    assert (len(training.rows), len(micro.rows)) == (530, 555)
    assert training.problems == micro.problems == ()
    wanted = [one for one in training.rows if counted(one)]
    assert questions(wanted).share >= 0.9
    known = {*known_devices(), None}
    assert {one.device_name for one in (*training.rows, *micro.rows)} <= known


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mfu": 41.2}, "field mfu: Input should be less than or equal to 1, not 41.2; the row is left out"),
        ({"tokens_per_s_per_device": -3}, "field tokens_per_s_per_device"),
        ({"tokens_per_s_per_device": "1007"}, "field tokens_per_s_per_device"),
        ({"devices": 0}, "field devices"),
        ({"speed": 3}, "field speed: Extra inputs are not permitted"),
        ({"global_batch": 4095}, "global_batch 4095 is not micro_batch 8 × accumulation 1 × 512 ranks"),
        ({"global_batch_tokens": 1}, "global_batch_tokens 1 is not global_batch 4096 × seq_len 2048"),
        ({"step_s": 1.0}, "tokens_per_s_per_device 1007, but step_s 1 gives 16384"),
        ({"tp": 3}, "devices 512 are no multiple of tp × pp × cp = 3"),
        ({"kv_heads": 5}, "heads 64 are no multiple of kv_heads 5"),
        (
            {"tflops": 1200.0, "mfu": None, "hidden": None},
            "tflops 1200 is above the 989.4 that h100-sxm reaches at most",
        ),
        ({"memory_gib": 94.0}, "memory_gib 94 is above the 79 GiB of h100-sxm"),
        ({"tokens_per_s_per_device": 9000.0, "step_s": None}, "FLOPs a token; the model has"),
        ({"tflops": 260.0, "mfu": 0.9, "hidden": None}, "tflops 260, but mfu 0.9 of h100-sxm is 890"),
    ],
)
def test_a_row_that_cannot_be_right_is_named_in_one_line(
    change: dict[str, object], said: str, tmp_path: Path
) -> None:
    rows, problems = read(tmp_path, row(id="good"), row(**change))
    assert len(problems) == 1 and said in problems[0]
    assert problems[0].startswith("rows.jsonl:2: foundry-001: ") and "\n" not in problems[0]
    kept = "kept" in problems[0]
    assert [one.id for one in rows] == ["good", *(["foundry-001"] if kept else [])]


def test_lines_that_are_no_rows_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    without = row()
    del without["unit" if "unit" in without else "device"]
    rows, problems = read(tmp_path, "{", without, row(), row())
    assert [one.id for one in rows] == ["foundry-001"]
    assert [problem.split(": ", 1)[1] for problem in problems] == [
        "not JSON (Expecting property name enclosed in double quotes)",
        "foundry-001: field device: Field required; the row is left out",
        "foundry-001: the id appears twice; the row is left out",
    ]
    with pytest.raises(UserError, match="cannot be read"):
        read_rows(tmp_path / "none.jsonl", TrainingRow)


def test_a_microbenchmark_without_a_unit_is_named(tmp_path: Path) -> None:
    line = json.loads((shipped_rows() / "micro.jsonl").read_text().splitlines()[30])
    path = tmp_path / "micro.jsonl"
    lines = [line | {"id": "a", "unit": None}, line | {"id": "b", "unit": "furlongs"}, line]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = read_rows(path, MicroRow)
    assert "micro.jsonl:1: a: field unit" in found.problems[0]
    assert "micro.jsonl:2: b: unit 'furlongs' is not one of busbw" in found.problems[1]
    assert found.marked == {"b"}


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80g"),
        ("NVIDIA A100-SXM4-40GB (AWS p4d)", "a100-sxm-40g"),
        ("NVIDIA A800 80GB", "a800-sxm-80g"),
        ("NVIDIA H100 (memory not stated; 8xH100)", "h100-sxm"),
        ("NVIDIA H800 80GB", "h800-sxm"),
        ("NVIDIA H800/H100 80GB (not stated in table; 989.4 peak)", None),
        ("NVIDIA H100 NVL 94GB", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100-94GB NVL", None),
        ("H100 PCI-e", None),
        ("H100 (PCIe)", None),
        ("A100-40G", "a100-sxm-40g"),
        ("A100-SXM4-40GiB", "a100-sxm-40g"),
        ("8xH100", "h100-sxm"),
        ("NVIDIA_H100_80GB", "h100-sxm"),
        ("dgx_h100", "h100-sxm"),
        ("NVIDIA H100 96GB HBM2e (500 W)", "h100-hbm2e-96g"),
        ("NVIDIA B200 (table says H200; prose says B200)", "b200-sxm"),
        ("NVIDIA GB200 192GB/186GiB-class (NVL72)", "gb200-nvl72"),
        ("AMD MI300X 192GB", "mi300x"),
        ("NVIDIA A100 PCIe", None),
        ("Huawei Ascend 910B 64GB", None),
    ],
)
def test_devices_are_known_by_many_spellings(said: str, name: str | None) -> None:
    assert device_name(said) == name


SHARDING = (
    ("FSDP (reshard_after_forward=False)", "zero2", False),
    ("SHARD_GRAD_OP", "zero2", False),
    ("FSDP, not HSDP", "zero3", False),
    ("FSDP (no CPU offload)", "zero3", False),
    ("ZeRO-3 (hpZ off)", "zero3", False),
    ("zero_stage=3", "zero3", False),
    ("ZeRO stage 1", "zero1", False),
    ("fully_shard", "zero3", False),
    ("HSDP inside the node", "zero3", True),
    ("DDP (not FSDP)", "ddp", False),
    ("NO_SHARD", "ddp", False),
)
"""As sources write it."""


def test_what_a_row_leaves_open_stays_a_set_of_options() -> None:
    given = TrainingRow.model_validate(row())
    said = settings(given)
    assert isinstance(said, list) and [(one.micro_batch, one.accumulation) for one in said] == [(8, 1)]
    assert (said[0].cluster, said[0].scheme, said[0].recompute) == ("h100-8x400g-infiniband", "zero3", "full")
    unsaid = given.model_copy(update={"micro_batch": None, "accumulation": None})
    several = settings(unsaid)
    assert isinstance(several, list) and [one.micro_batch for one in several] == [8, 4, 2]
    grouped = settings(given.model_copy(update={"sharding": "zero1 within 8 GPUs (one node), DDP across"}))
    assert isinstance(grouped, list) and (grouped[0].scheme, grouped[0].inside) == ("zero1", True)
    for change in (
        {"tp": 3},
        {"ep": 8},
        {"device": "NVIDIA V100"},
        {"layers": None},
        {"sharding": "diagonal"},
        {"sharding": "zero3 (ZeRO++ qwZ)"},
        {"devices_per_node": 16},
        {"arch": "qwen3-moe"},
        {"arch": "gpt", "kv_heads": 8},
    ):
        assert isinstance(settings(given.model_copy(update=change)), str)
    for text, scheme, inside in SHARDING:
        read_as = settings(given.model_copy(update={"sharding": text}))
        assert isinstance(read_as, list), text
        assert (read_as[0].scheme, read_as[0].inside) == (scheme, inside), text
    alone = settings(given.model_copy(update={"devices": 1, "global_batch": 8}))
    assert isinstance(alone, list) and alone[0].scheme == "ddp"
    counted_out = questions([given], marked={given.id})
    assert not counted_out.questions and counted_out.left_out[0][1] == "it contradicts itself"
    step = given.model_copy(update={"tokens_per_s_per_device": None, "step_s": 16.27})
    assert published_tokens_per_s(step) == pytest.approx(1007, rel=0.01)
    flops = given.model_copy(update={"tokens_per_s_per_device": None})
    assert published_tokens_per_s(flops) == pytest.approx(1007, rel=0.02)


# ---- the model of efficiency -------------------------------------------------------------------------------


def pricing(stem: str = "h100-sxm", **how: object) -> Pricing:
    return Pricing(load_device(stem), "bfloat16", **how)  # type: ignore[arg-type]


def rate(product: Product) -> float:
    return product.flops / pricing().operation(product)


def test_products_know_tiles_waves_and_alignment() -> None:
    def square(side: int, inner: int = 8192) -> Product:
        return Product(1, side, side, inner, 2 * (2 * side * inner + side * side))

    peak = load_device("h100-sxm").flops_per_s["bfloat16"].value
    assert 0.4 * peak < rate(square(8192)) < 0.9 * peak
    assert rate(square(8192)) > rate(square(1024)) > rate(square(256))
    assert rate(square(8192, 512)) < rate(square(8192))  # a begin and an end for every tile
    sms = int(load_device("h100-sxm").sms.value)  # type: ignore[union-attr]
    full, over = (Product(1, 256 * tiles, 128, 4096, 0) for tiles in (sms, sms + 1))
    assert pricing().operation(over) > 1.3 * pricing().operation(full)  # another wave
    odd = square(8192)._replace(n=8190)
    assert rate(odd) < 0.75 * rate(square(8192))


def test_attention_knows_length_width_mask_and_generation() -> None:
    def of(keys: int, *, width: int = 128, causal: bool = True, kernel: str = "flash-2") -> float:
        one = Attention(16 * 16384 // keys, keys, keys, width, causal, 2, 0)
        return one.flops / (2 if causal else 1) / pricing(attention=kernel).operation(one) / 1e12

    assert of(512) < of(2048) < of(16384) < of(16384, causal=False) * 1.02
    assert of(16384, width=64) < of(16384)
    assert of(16384, kernel="triton") < of(16384) < of(16384, kernel="flash-3")
    assert of(16384) == pytest.approx(330, rel=0.1)  # as published
    with pytest.raises(UserError, match="--attention flash-9"):
        pricing(attention="flash-9")


def test_a_compiler_fuses_what_only_moves_bytes() -> None:
    operated = Operated({Stream(10**9): 8}, {Stream(3 * 10**9): 1})
    eager, compiled = pricing().seconds(operated), pricing(kernels="compiled").seconds(operated)
    assert compiled < 0.5 * eager
    small = Operated({Stream(10): 1000}, {Stream(10): 1})
    assert pricing().seconds(small) == pytest.approx(1000 * load_device("h100-sxm").launch_s.value)


def test_models_say_more_bytes_in_eager_mode_than_compiled() -> None:
    traced = shapes.trace_shapes(load("gpt:tiny"), torch.bfloat16, [2], 1)
    for operated in traced.operations[2]:
        moved = [
            sum(one.nbytes * count for one, count in some.items() if isinstance(one, Stream))
            for some in operated
        ]
        assert moved[1] <= moved[0]
        products = [{o: n for o, n in some.items() if isinstance(o, Product)} for some in operated]
        assert products[0] == products[1]


@pytest.mark.parametrize("model", shorter(["gpt:small", "moe:tiny"], without={"moe:tiny"}))
def test_blocks_that_are_traced_once_cost_as_if_all_had_run(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded = shapes.trace_shapes(load(model, seq_len=32), torch.bfloat16, [1, 2], 8)
    monkeypatch.setattr(shapes, "fold", lambda model: None)
    assert folded == shapes.trace_shapes(load(model, seq_len=32), torch.bfloat16, [1, 2], 8)


def test_blocks_that_only_look_alike_all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from hzplan.models.gpt import MLP

    plain, seen = MLP.forward, []

    def every_third(self: MLP, x: torch.Tensor) -> torch.Tensor:
        seen.append(self)
        return plain(self, x.relu() if seen.index(self) % 3 == 2 else x)

    monkeypatch.setattr(MLP, "forward", every_third)
    traced = shapes.trace_shapes(load("gpt:small", seq_len=32), torch.bfloat16, [1], 8)
    assert len({use.unit for use in traced.uses if use.unit.startswith("layers.")}) == 8


def test_clusters_are_composed_by_name() -> None:
    cluster, device = find_cluster("a100-8x50g-roce")
    assert device.name == "NVIDIA A100 SXM 80 GB"
    assert [tier.ranks for tier in cluster.tiers] == [8, 8]
    assert cluster.tiers[1].bytes_per_s.value == 50e9 / 8
    assert find_cluster("gb200-72x400g")[0].tiers[0].name == "rack"
    for name in ("z9-8x50g", "a100-8x50g-pigeon", "a100", "h100-200x400g"):
        with pytest.raises(UserError):
            find_cluster(name)


def test_a_device_of_ones_own_has_a_name_of_its_own(tmp_path: Path) -> None:
    cluster, device = find_cluster("h100-8x400g")
    cluster.model_copy(update={"device": "mine"}).save(tmp_path / "here.json")
    device.save(tmp_path / "mine.json")
    with pytest.raises(UserError, match="NVIDIA H100 SXM 80 GB is the device h100-sxm that comes with"):
        find_cluster(str(tmp_path / "here.json"))
    device.model_copy(update={"name": "mine"}).save(tmp_path / "mine.json")
    assert find_cluster(str(tmp_path / "here.json"))[1].name == "mine"


def test_flat_rings_pass_every_rank_and_late_ranks_are_waited_for() -> None:
    cluster, _ = find_cluster("a100-8x50g-roce")
    near, far = Mesh.of_tiers(8, 2), Mesh.of_tiers(8, 128)
    assert 1 < lateness(cluster, near) < lateness(cluster, far) < 1.1

    def latency(mesh: Mesh, *, flat: bool) -> float:
        curves = collectives(cluster, mesh, 1 << 20, flat=flat)
        return next(c for c in curves if (c.low, c.operation) == (1, "all_gather")).points[0].seconds

    assert latency(far, flat=True) > 4 * latency(far, flat=False)
    assert latency(far, flat=True) > 20 * latency(near, flat=True)


# ---- the fit, and what is said of it -----------------------------------------------------------------------


def test_a_fit_finds_figures_again_and_is_not_outvoted() -> None:
    truth = {"a.x": 3.0, "a.y": 0.5}

    def datum(group: str, weight: float, error: float = 0.0) -> Datum:
        def of(values: dict[str, float]) -> float:
            return log(values["a.x"] / truth["a.x"]) + weight * log(values["a.y"] / truth["a.y"]) + error

        return Datum(group, frozenset({"a"}), of, of)

    figures = [Figure("a.x", 1.0, 2.0), Figure("a.y", 1.0, 2.0)]
    found = fit([datum("one", w / 10) for w in range(20)], figures)
    assert found.values == pytest.approx(truth, rel=0.01)
    low, high = found.interval("a.x")
    assert low < 3.0 < high and found.touched == {"a.x": 20, "a.y": 19}
    noisy = [datum("one", w / 10) for w in range(20)] + [datum("one", 0.5, 2.0)]
    assert fit(noisy, figures).values == pytest.approx(truth, rel=0.1)


def test_order_and_regret_are_of_rows_that_can_be_compared() -> None:
    given = TrainingRow.model_validate(row())
    options = settings(given)
    assert isinstance(options, list)
    prediction = replace_prediction()

    def one(published: float, predicted: float, **changes: object) -> Scored:
        changed = given.model_copy(update=changes)
        return Scored(Question(changed, options, published), replace(prediction, tokens_per_s=predicted))

    scored = [one(100, 90), one(110, 100), one(101, 120), one(500, 1, model="other")]
    found = order(scored)
    assert (found.pairs, found.right) == (2, 1) and found.low < 0.5 < found.high
    others = [*scored, one(200, 180, devices=1024), one(300, 280, seq_len=1024)]
    assert order(others).pairs > 2 and order(others, alike=True) == found
    lost = regret(scored)
    assert lost.groups == 1 and lost.worst == pytest.approx(110 / 101 - 1)
    errors = Errors.of([log(1.1), log(1.2), log(0.9)])
    assert errors.rows == 3 and errors.median == pytest.approx(0.1)
    assert Coverage((), ()).share == 0.0


def replace_prediction() -> object:
    from benchmarks.published.predict import Prediction

    return Prediction(1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1, 1, True, True)


def test_microbenchmarks_are_near_the_model_that_was_fitted_to_them() -> None:
    found = measured(read_rows(shipped_rows() / "micro.jsonl", MicroRow).rows)
    attention = [log(one.of({}) / one.value) for one in found if one.kind.startswith("flash")]
    assert len(attention) > 90
    assert exp(sorted(map(abs, attention))[len(attention) // 2]) < 1.06
    network = [log(one.of({}) / one.value) for one in found if one.kind == "network"]
    assert len(network) > 50 and exp(sorted(map(abs, network))[len(network) // 2]) < 1.1


def test_what_to_expect_comes_along() -> None:
    found = expected()
    assert found is not None
    entry = found.of("NVIDIA H100 SXM 80 GB")
    assert entry is not None and entry.rows > 20 and entry.low < entry.high
    assert found.covered.seq_len.most >= entry.seq_len.most and "compiled" in found.covered.kernels
    assert 2048 in entry.seq_len and 10**7 not in entry.seq_len
    assert found.of("a device without rows") is None
    assert found.few.keys() >= {"NVIDIA B200 SXM 180 GB"} and 0 < found.pairs < 420
    for known in found.entries:
        assert known.own <= known.rows and set(known.kernels) <= {"eager", "compiled"}
