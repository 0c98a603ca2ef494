"""A profile measured by a job of several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from hzplan.formats.profile import Profile
from tests.cli.command import torchrun

# Fewer repeats than in earnest: what is held here is that ranks agree, not the figures.
RANK = """
import os
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from hzplan.formats.base import fingerprint
from hzplan.core.hierarchy import Mesh, Stage
from hzplan.models.workload import load
from hzplan.profiler import default_mesh, measure
from hzplan.profiler.model import optimizer, time as uses
from hzplan.profiler.network import links
from hzplan.profiler.session.ranks import Ranks
from hzplan.runtime.world import ProcessWorld

links.MAX_REPEATS = links.MAX_CALLS = optimizer.MAX_REPEATS = uses.MAX_BLOCKS = 3
dist.init_process_group("gloo")
ranks, mesh = Ranks.here(), Mesh.parse(sys.argv[2])
assert default_mesh() == (Mesh.of_tiers(4), ("node",))

# What is timed is the real collective: on its stage's groups, in slice order, in place.
for stage in mesh.stages():
    world = ProcessWorld()
    groups = {kind: world.new_group(mesh, kind, stage, ranks.device) for kind in ("unshard", "reduce")}
    members = mesh.group(ranks.rank, stage)
    place, size = members.index(ranks.rank), len(members)
    whole, scratch = torch.full((2 * size,), -1.0), torch.zeros(2 * size)
    whole[2 * place : 2 * place + 2] = ranks.rank
    links.collective("all_gather", groups["unshard"], whole, scratch)()
    assert whole.view(size, 2)[:, 0].tolist() == [float(m) for m in members], (stage, whole)
    whole = torch.arange(2.0 * size) + ranks.rank
    links.collective("reduce_scatter", groups["reduce"], whole, scratch)()
    assert whole[2 * place] == size * 2 * place + sum(members), (stage, whole)

profile = measure(
    load("gpt:nano"), mesh=mesh, tier_names=("node", "network"), micro_batches=[1, 2], dtype="float32",
    optimizer="adamw", progress=lambda text, fraction: None,
)
assert len(set(ranks.gather(fingerprint(profile)))) == 1
if ranks.rank == 0:
    profile.save(Path(sys.argv[1]))
dist.destroy_process_group()
os._exit(0)  # gloo's threads outlive their groups; one in need of the interpreter aborts its end
"""


@pytest.mark.distributed
def test_four_ranks_measure_one_profile(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    path = tmp_path / "profile.json"
    done = torchrun(4, script, path, "2|2", cwd=tmp_path, timeout_s=300)
    assert done.code == 0, done.stderr
    profile = Profile.load(path)
    assert str(profile.mesh) == "2|2"
    assert profile.cluster.backend == "gloo" and profile.cluster.reduce_scatter_by_exchange
    curves = {(curve.operation, curve.low, curve.high): curve for curve in profile.collectives}
    assert set(curves) == {
        (operation, *stage)
        for operation in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
        for stage in profile.mesh.stages()
    } | {("all_reduce", 0, 2)}
    largest = max(sum(tensor.spec.nbytes for tensor in unit.tensors) for unit in profile.units)
    everything = sum(tensor.spec.nbytes for unit in profile.units for tensor in unit.tensors)
    for (operation, low, _), curve in curves.items():
        assert curve.points[-1].bytes >= largest // profile.mesh.shards[low] or len(curve.points) >= 2
        if operation == "all_reduce" and curve.points[-1].seconds < 0.02:  # plans join messages
            assert curve.points[-1].bytes >= everything // 2 // profile.mesh.shards[low]
        seconds = [point.seconds for point in curve.points]
        assert seconds == sorted(seconds) and seconds[0] > 1e-6
    assert all(use.costs[0].seconds > 0 for use in profile.uses)
    assert sum(use.costs[1].retained_bytes for use in profile.uses) == 0
    assert profile.cluster.norm_seconds is not None and 1e-5 < profile.cluster.norm_seconds < 1.0
    assert 0.0 < (profile.cluster.compute_processor_share or 0.0) <= 1.0
    for curve in profile.collectives:
        spent = [point.processor_seconds or 0.0 for point in curve.points]
        assert spent[0] > 0.0 and spent == sorted(spent)
    forwards = [
        use.costs for use in profile.uses if use.unit.startswith("layers.") and use.phase == "forward"
    ]
    assert len(forwards) > 1 and len({costs[0].seconds for costs in forwards}) == 1
    assert len(profile.interference) == 2
    assert all(
        entry.communication_slowdown >= 1 and 0 <= entry.compute_loss < 1 for entry in profile.interference
    )
