"""A cluster's network as a graph: its tiers, oversubscription and rails follow from links. Pure.

Nodes of the graph are devices (attribute ``device``: true) and switches; an edge carries ``bytes_per_s`` each
way. Devices are on one tier together where a path joins them whose narrowest link is as wide as the tier's
(the widest path: a maximum spanning tree has it for all pairs; Hu 1961). What a device may send out of its
group while all do is the group's minimum cut, shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import networkx as nx

from hzplan.errors import UserError
from hzplan.formats.cluster import ClusterModel, NetworkModel, RateFigure


@dataclass(frozen=True)
class TierOfGraph:
    """One tier of a graph, fastest first.

    ``ranks``: groups of the tier inside that it joins; ``bytes_per_s``: of every device, each way, while all
    send; ``oversubscription``: what devices could send with their own links over that, at least 1.
    """

    ranks: int
    bytes_per_s: float
    oversubscription: float


def devices_of(graph: nx.Graph[Any]) -> list[Any]:
    """The graph's devices, in the order in which they were added."""
    return [node for node, found in graph.nodes(data="device") if found]


def tiers_of(graph: nx.Graph[Any]) -> list[TierOfGraph]:
    """The tiers of a graph; UserError where devices are not joined, or groups of a tier are not alike."""
    devices = devices_of(graph)
    if len(devices) < 2 or not nx.is_connected(graph):
        raise UserError("the topology needs two devices or more, all of them joined")
    tree = nx.maximum_spanning_tree(graph, weight="bytes_per_s")
    widths = sorted({width for *_, width in tree.edges(data="bytes_per_s")}, reverse=True)
    found: list[TierOfGraph] = []
    before = [frozenset({device}) for device in devices]
    for width in widths:
        groups = _groups(tree, width, set(devices))
        if len(groups) == len(before):
            continue
        sizes = {len(group) for group in groups}
        if len(sizes) > 1:
            raise UserError(f"the topology's groups at {width:g} bytes/s are not alike: {sorted(sizes)}")
        found.append(_tier(graph, before, groups))
        before = groups
    return found


def rails_of(graph: nx.Graph[Any], groups: Sequence[Sequence[Any]]) -> int:
    """How many switches outside of a group each serve one device of every group; 1 without rails.

    ``groups``: devices of each node, in the same order in all.
    """
    inside = [
        set.intersection(*(set(graph[device]) for device in group)) if len(group) > 1 else set()
        for group in groups
    ]
    rails = set()
    for position in range(len(groups[0])):
        shared = set.intersection(*(set(graph[group[position]]) for group in groups)) - set().union(*inside)
        rails.add(frozenset(shared))
    return len(rails) if len(rails) > 1 and frozenset() not in rails else 1


def with_topology(
    graph: nx.Graph[Any], name: str, device: str, networks: Sequence[NetworkModel]
) -> ClusterModel:
    """A cluster whose tiers are the graph's, with the shares and latencies of ``networks``, fastest first."""
    tiers = tiers_of(graph)
    if len(tiers) != len(networks):
        raise UserError(f"topology {name} has {len(tiers)} tiers, so as many networks are needed")

    def rate(tier: TierOfGraph) -> RateFigure:
        source = f"the topology: its minimum cut, {tier.oversubscription:.3g} times oversubscribed"
        return RateFigure(value=tier.bytes_per_s, kind="specified", source=source)

    named = [network.joining(tier.ranks, rate(tier)) for tier, network in zip(tiers, networks, strict=True)]
    seen: list[str] = []
    for at, tier in enumerate(named):
        again = tier.name in seen
        seen.append(tier.name)
        named[at] = tier.model_copy(update={"name": f"{tier.name} {at}"}) if again else tier
    about = f"{len(devices_of(graph))} devices of a topology"
    return ClusterModel(name=name, about=about, device=device, backend="nccl", tiers=tuple(named))


def _groups(tree: nx.Graph[Any], width: float, devices: set[Any]) -> list[frozenset[Any]]:
    """Devices that links of at least ``width`` join."""
    wide = nx.Graph()
    wide.add_nodes_from(tree.nodes)
    wide.add_edges_from((a, b) for a, b, own in tree.edges(data="bytes_per_s") if own >= width)
    parts = (frozenset(part & devices) for part in nx.connected_components(wide))
    return [part for part in parts if part]


def _tier(
    graph: nx.Graph[Any], before: Sequence[frozenset[Any]], groups: Sequence[frozenset[Any]]
) -> TierOfGraph:
    """The tier that joins the groups ``before`` into ``groups``."""
    inner = [part for part in before if part <= groups[0]]
    part = inner[0]
    others = frozenset().union(*inner[1:])
    cut = _cut(graph, part, others)
    own = sum(_cut(graph, frozenset({device}), others) for device in part)
    return TierOfGraph(len(inner), cut / len(part), max(1.0, own / cut))


def _cut(graph: nx.Graph[Any], part: frozenset[Any], others: frozenset[Any]) -> float:
    """Bytes per second that can leave ``part`` for ``others``, all of which may send at once. Devices forward
    nothing: only those of ``part`` send, and only ``others`` receive."""
    flow = nx.DiGraph()
    devices = set(devices_of(graph))
    for one, two, width in graph.edges(data="bytes_per_s"):
        for a, b in ((one, two), (two, one)):
            if (a not in devices or a in part) and (b not in devices or b in others):
                flow.add_edge(a, b, capacity=width)
    for device in part:
        flow.add_edge("source", device, capacity=inf)
    for device in others:
        flow.add_edge(device, "sink", capacity=inf)
    return float(nx.maximum_flow_value(flow, "source", "sink"))
