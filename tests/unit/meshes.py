"""Hypothesis strategies for meshes and choices of levels."""

from __future__ import annotations

import itertools
from math import prod

from hypothesis import strategies as st

from hzplan.core.hierarchy import MAX_LEVELS, Levels, Mesh


@st.composite
def meshes(draw: st.DrawFn, max_world: int = 256) -> Mesh:
    """One to eight dimensions, ones included, cut into tiers anywhere; at most ``max_world`` ranks."""
    dims: list[int] = []
    for _ in range(draw(st.integers(1, MAX_LEVELS))):
        dims.append(draw(st.integers(1, max(1, min(6, max_world // prod(dims))))))
    cuts = draw(st.sets(st.integers(1, max(1, len(dims) - 1))))
    ends = [0, *sorted(cut for cut in cuts if cut < len(dims)), len(dims)]
    return Mesh(tuple(tuple(dims[low:high]) for low, high in itertools.pairwise(ends)))


@st.composite
def levels_of(draw: st.DrawFn, mesh: Mesh) -> Levels:
    """Any legal triple, levels that add no shards included."""
    optim = draw(st.integers(0, mesh.levels))
    return Levels(draw(st.integers(0, optim)), draw(st.integers(0, optim)), optim)
