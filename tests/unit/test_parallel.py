"""One rank's share of a model under tensor, pipeline and context parallelism."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hzplan.core.hierarchy import Mesh
from hzplan.cost.collectives import with_nodes
from hzplan.cost.model import CostModel
from hzplan.cost.parallel import _parts, share
from hzplan.errors import UserError
from hzplan.formats.cluster import TierModel, find_cluster
from hzplan.formats.parallel import ModelParallel
from hzplan.formats.plan import Plan
from hzplan.formats.profile import CalibratedEntry, Profile
from hzplan.solver.emit import emit
from hzplan.solver.solve import Request, Solved, solve

PROFILES = Path(__file__).resolve().parents[2] / "plans" / "profiles"
# On eight nodes of eight, with links as cost_models has them now.
MODELLED = with_nodes(Profile.load(PROFILES / "llama3-8b-h100-8.json"), 8)
MEASURED = Profile.load(PROFILES / "gpt-tiny-2x2x2.json")


def numel(profile: Profile) -> int:
    return sum(tensor.spec.numel for unit in profile.units for tensor in unit.tensors)


@pytest.mark.parametrize("profile", [MODELLED, MEASURED], ids=["modelled", "measured"])
def test_no_parallelism_changes_nothing(profile: Profile) -> None:
    same = share(profile, ModelParallel())
    assert (same.units, same.uses, same.collectives) == (profile.units, profile.uses, profile.collectives)
    assert (same.cluster, same.model) == (profile.cluster, profile.model)


def test_tensor_parallel_ranks_hold_their_part_of_every_matrix() -> None:
    shared = share(MODELLED, ModelParallel(tensor=4))
    matrices, vectors = 0, 0
    for unit, whole in zip(shared.units, MODELLED.units, strict=True):
        for tensor, of in zip(unit.tensors, whole.tensors, strict=True):
            matrix = len(of.shape) == 2
            assert tensor.spec.numel * (4 if matrix else 1) == of.spec.numel
            matrices, vectors = matrices + matrix, vectors + (not matrix)
    assert matrices == 2 + 7 * 32 and vectors == 1 + 2 * 32
    assert shared.model.parameters == numel(shared)
    assert shared.mesh == Mesh.of_tiers(2, 8) and shared.cluster.tier_names == MODELLED.cluster.tier_names
    assert share(MODELLED, ModelParallel(tensor=16)).mesh == Mesh.of_tiers(4)
    for size in MODELLED.micro_batches:
        assert CostModel(shared).flops(size) == pytest.approx(CostModel(MODELLED).flops(size) / 4, rel=1e-6)
    first, whole_first = shared.uses[1].costs[0], MODELLED.uses[1].costs[0]
    assert first.seconds > whole_first.seconds / 4  # there are messages between the four
    assert first.retained_bytes == whole_first.retained_bytes // 4


def test_measured_curves_are_those_of_the_levels_that_are_left() -> None:
    """Mesh 2|2,2: with tp=2 the ranks left are on four nodes, with pp=2 on two of them."""
    shared = share(MEASURED, ModelParallel(tensor=2))
    assert str(shared.mesh) == "2,2" and shared.cluster.tier_names == MEASURED.cluster.tier_names[1:]
    assert shared.interference == MEASURED.interference[1:]
    before = {(c.operation, c.low, c.high): c.points for c in MEASURED.collectives}
    after = {(c.operation, c.low + 1, c.high + 1): c.points for c in shared.collectives}
    assert after == {key: points for key, points in before.items() if key[1] >= 1}
    outer = share(MEASURED, ModelParallel(pipeline=2))
    assert str(outer.mesh) == "2|2" and outer.cluster.tier_names == MEASURED.cluster.tier_names
    assert {(c.operation, c.low, c.high): c.points for c in outer.collectives} == {
        key: points for key, points in before.items() if key[2] <= 2
    }


@pytest.mark.parametrize("what", ["a cluster of the user's", "corrected by a run"])
def test_curves_that_nobody_can_model_anew_stay(what: str) -> None:
    assert MODELLED.modelled is not None
    fields = {name: getattr(MODELLED, name) for name in Profile.model_fields}
    if what == "corrected by a run":
        fields["calibrated"] = CalibratedEntry(steps=9, compute=1.0, tiers=(1.0, 2.0), optimizer=1.0)
    else:
        fields["modelled"] = MODELLED.modelled.model_copy(update={"cluster": "ours"})
    profile = Profile(**fields)
    shared, again = share(profile, ModelParallel(tensor=8)), share(MODELLED, ModelParallel(tensor=8))
    assert shared.mesh.world == 8 and shared.uses == again.uses  # the same curve, read another way
    before = {(c.operation, c.low, c.high): c.points for c in MODELLED.collectives}
    assert {(c.operation, c.low + 2, c.high + 2): c.points for c in shared.collectives} == {
        key: points for key, points in before.items() if key[1] >= 2
    }
    with pytest.raises(UserError, match=r"no level of the mesh 2,4\|2,4 has that many ranks"):
        share(profile, ModelParallel(tensor=4))


def test_the_first_stage_keeps_activations_of_as_many_micro_batches_as_there_are_stages() -> None:
    one, four = (share(MODELLED, ModelParallel(pipeline=stages)) for stages in (1, 4))
    names = [unit.name for unit in four.units]
    assert names == [unit.name for unit in one.units][: len(names)] and "lm_head" not in names
    assert len(names) in (9, 10)  # of 32 layers, an embedding and a head that is worth some layers
    kept = sum(use.costs[0].retained_bytes for use in four.uses if use.phase == "forward")
    single = sum(
        use.costs[0].retained_bytes for use in one.uses if use.phase == "forward" and use.unit in names
    )
    assert kept == 4 * single
    peak = CostModel(four).activations.peak_bytes(1)
    assert kept <= peak <= kept + max(use.costs[0].peak_bytes for use in one.uses)
    assert sum(use.costs[0].retained_bytes for use in four.uses) == pytest.approx(0, abs=kept * 0.01)


@pytest.mark.parametrize(("ranks", "across"), [(2, ()), (4, ()), (8, ()), (16, (2,)), (32, (4,))])
def test_messages_of_tensor_parallelism_take_what_a_ring_takes(ranks: int, across: tuple[int, ...]) -> None:
    """A gather and a reduce-scatter of [micro-batch, sequence, hidden], for each of a layer's two parts; over
    nodes what a rank of eight has of it, by the faster of ring and PAT."""
    cluster, _ = find_cluster("h100-8x400g")
    nbytes = MODELLED.model.seq_len * 4096 * 2

    def rate_of(tier: TierModel, size: int) -> float:
        congestion = tier.congestion.value if tier.congestion is not None else 0.0
        return tier.bytes_per_s.value * tier.bytes_share.value / (1 + congestion * math.log2(size))

    def ring(tier: TierModel, size: int, carried: int) -> float:
        rate = rate_of(tier, size)
        return (size - 1) * (tier.latency_s.value + carried / size / rate)

    def pat(tier: TierModel, size: int, carried: int) -> float:
        assert tier.pat is not None
        rate = rate_of(tier, size) * tier.pat.bytes_share.value
        latency = math.log2(size) * tier.pat.latency_s.value + size * tier.pat.rank_s.value
        return latency + (size - 1) / size * carried / rate

    expected = ring(cluster.tiers[0], min(ranks, 8), nbytes)
    for size in across:
        expected += min(algorithm(cluster.tiers[1], size, nbytes // 8) for algorithm in (ring, pat))
    layer, whole = (p.uses[1].costs[0] for p in (share(MODELLED, ModelParallel(tensor=ranks)), MODELLED))
    assert layer.seconds - whole.seconds / ranks == pytest.approx(2 * 2 * expected, rel=1e-3)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=9), st.data())
def test_the_longest_stage_is_as_short_as_can_be(lengths: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(lengths)))
    sizes = list(_parts(lengths, count))
    assert len(sizes) == count and sum(sizes) == len(lengths) and min(sizes) >= 1

    def longest(sizes: list[int]) -> float:
        ends = [0, *itertools.accumulate(sizes)]
        return max(sum(lengths[low:high]) for low, high in itertools.pairwise(ends))

    best = min(
        longest([high - low for low, high in itertools.pairwise([0, *cuts, len(lengths)])])
        for cuts in itertools.combinations(range(1, len(lengths)), count - 1)
    )
    assert longest(sizes) == pytest.approx(best, rel=1e-9)


def test_ranks_that_share_a_sequence_shard_and_have_no_batch_of_their_own(tmp_path: Path) -> None:
    alone, shared = MODELLED, share(MODELLED, ModelParallel(context=2))
    assert (alone.data_ranks, shared.data_ranks) == (64, 32) and shared.mesh == alone.mesh
    request = Request(MODELLED.cluster.memory_bytes, 64)
    solved = solve(shared, request)
    assert isinstance(solved, Solved)
    plan = emit(shared, request, solved, profile_path=tmp_path / "p.json", plan_path=tmp_path / "plan.json")
    assert plan.batch.micro_batch * plan.batch.accumulation == 2
    assert plan.parallel == ModelParallel(context=2)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    tokens = plan.batch.global_batch * plan.model.seq_len / plan.predicted.step_s / 64
    assert plan.predicted.tokens_per_s_per_gpu == pytest.approx(tokens, rel=1e-6)


@pytest.mark.parametrize(
    ("profile", "parallel", "said"),
    [
        (MODELLED, ModelParallel(tensor=3), "tp=3 does not divide"),
        (MODELLED, ModelParallel(tensor=128), "tp=128 does not divide"),
        (with_nodes(MODELLED, 3), ModelParallel(tensor=3), "tp=3 does not divide"),
        (with_nodes(MODELLED, 12), ModelParallel(pipeline=8), "pp=8 does not divide"),
        (MODELLED, ModelParallel(tensor=8, pipeline=4, context=4), "cp=4 does not divide the 2 ranks"),
        (MEASURED, ModelParallel(pipeline=8, tensor=2), "does not divide"),
        (share(MODELLED, ModelParallel(tensor=2)), ModelParallel(tensor=2), "a rank's share"),
    ],
)
def test_what_cannot_be_shared_is_refused(profile: Profile, parallel: ModelParallel, said: str) -> None:
    with pytest.raises(UserError, match=said):
        share(profile, parallel)


@pytest.mark.parametrize("text", ["", "tp", "tp=0", "tp=2,tp=4", "ep=2", "tp=99999", "tp=2;pp=2", "tp=-1"])
def test_only_sizes_are_read(text: str) -> None:
    with pytest.raises(UserError, match="write sizes as in tp=8,pp=4,cp=1"):
        ModelParallel.parse(text)


def test_sizes_are_read_in_any_order() -> None:
    parallel = ModelParallel.parse(" cp=2, tp=8")
    assert parallel == ModelParallel(tensor=8, context=2) and ModelParallel.parse(str(parallel)) == parallel
    assert parallel.ranks == 16
