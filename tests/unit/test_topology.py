"""A network as a graph: tiers, oversubscription and rails follow."""

from __future__ import annotations

from typing import Any

import networkx as nx
import pytest

from hzplan.cost.topology import devices_of, rails_of, tiers_of, with_topology
from hzplan.errors import UserError
from hzplan.formats.cluster import load_network

NVLINK, NIC = 450e9, 50e9


def cluster(nodes: int, ranks: int, *, rails: bool, up: float | None = None) -> nx.Graph[Any]:
    """Nodes of devices on a switch of their own; a NIC for each, to a leaf by rail or by node, and a spine
    over ``up`` bytes/s from each leaf (None: as wide as its NICs)."""
    graph: nx.Graph[Any] = nx.Graph()
    for node in range(nodes):
        for rank in range(ranks):
            device = f"gpu{node}.{rank}"
            graph.add_node(device, device=True)
            graph.add_edge(device, f"nvswitch{node}", bytes_per_s=NVLINK)
            leaf = f"leaf{rank if rails else node}"
            graph.add_edge(device, leaf, bytes_per_s=NIC)
            graph.add_edge(leaf, "spine", bytes_per_s=up or (nodes if rails else ranks) * NIC)
    return graph


@pytest.mark.parametrize("rails", [False, True])
def test_tiers_are_as_wide_as_what_can_leave_a_group(rails: bool) -> None:
    graph = cluster(4, 8, rails=rails)
    inner, outer = tiers_of(graph)
    assert (inner.ranks, inner.bytes_per_s, inner.oversubscription) == (8, NVLINK + NIC, 1)
    assert (outer.ranks, outer.bytes_per_s, outer.oversubscription) == (4, NIC, 1)
    groups = [[f"gpu{node}.{rank}" for rank in range(8)] for node in range(4)]
    assert rails_of(graph, groups) == (8 if rails else 1)
    assert len(devices_of(graph)) == 32


def test_a_thin_spine_is_oversubscribed() -> None:
    outer = tiers_of(cluster(4, 8, rails=False, up=4 * NIC))[-1]
    assert (outer.ranks, outer.bytes_per_s, outer.oversubscription) == (4, NIC / 2, 2)


def test_a_topology_becomes_a_cluster() -> None:
    networks = [load_network("nvlink4"), load_network("roce")]
    made = with_topology(cluster(4, 8, rails=True), "mine", "h100-sxm", networks)
    assert [(tier.name, tier.ranks) for tier in made.tiers] == [("node", 8), ("network", 4)]
    assert made.tiers[1].bytes_per_s.value == NIC and made.tiers[1].congestion is not None
    with pytest.raises(UserError, match="2 tiers"):
        with_topology(cluster(4, 8, rails=True), "mine", "h100-sxm", networks[:1])


def test_what_is_no_topology_is_said() -> None:
    uneven = cluster(2, 4, rails=False)
    uneven.remove_node("gpu0.3")
    with pytest.raises(UserError, match="not alike"):
        tiers_of(uneven)
    with pytest.raises(UserError, match="joined"):
        tiers_of(nx.Graph())
