"""Tiers of a fabric, from the graph of its links: who meets at which switches, and what each host sends
there.

Pure. Nodes of the graph are switches, by name, and network interfaces, as ``(host, rail)``; an edge has its
``rate`` in one direction. Interfaces of one rail are those of ranks that talk to each other between hosts.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import itemgetter

import networkx as nx

Interface = tuple[str, str]
"""A host, and the rail of its interface."""
Groups = Mapping[str, tuple[int, ...]]
"""By host the group that it is in: a number for each rail."""

SOURCE, SINK = "all that send", "all that receive"


class Uneven(ValueError):
    """A fabric that is no hierarchy of equal groups; the message names the hosts."""


@dataclass(frozen=True)
class Meeting:
    """A tier: ``groups`` of the tier inside meet; ``host_rate``: what a host sends to the others of its tier
    while all hosts do, in the unit of the links. ``rails``: whether its rails have switches of their own."""

    groups: int
    host_rate: float
    rails: bool


def meetings(fabric: nx.Graph) -> tuple[Meeting, ...]:
    """The tiers from the innermost to the outermost, without those that join nobody.

    Hosts meet at height h when on every rail a path joins them over switches of at most that height, which is
    the least number of links to an interface. What a group of the tier inside sends while all groups do is
    the least cut between it and the others (Ford and Fulkerson 1956): links up are as many as down where a
    fabric is not oversubscribed. Raises Uneven where groups differ in size or hosts cannot reach each other.
    """
    interfaces = sorted(node for node in fabric if isinstance(node, tuple))
    hosts = sorted({host for host, _ in interfaces})
    _check_rails(hosts, interfaces)
    heights = nx.multi_source_dijkstra_path_length(fabric, interfaces, weight=None)
    own = {
        host: sum(rate for _, _, rate in fabric.edges([*ends], data="rate"))
        for host, ends in itertools.groupby(interfaces, key=itemgetter(0))
    }
    inside: dict[str, tuple[int, ...]] = {host: (number,) for number, host in enumerate(hosts)}
    found = []
    for height in range(max(heights.values()) + 1):
        reached = fabric.subgraph(node for node, far in heights.items() if far <= height)
        met = _met(reached, hosts)
        members = _members(met)
        sizes = {group: len({inside[host] for host in of}) for group, of in members.items()}
        if max(sizes.values()) == 1:
            continue
        _check_even(members, sizes)
        rate = min(_sent(reached, inside, of, own) for of in members.values())
        found.append(
            Meeting(next(iter(sizes.values())), rate, any(len(set(group)) > 1 for group in met.values()))
        )
        inside = met
    if len({*inside.values()}) > 1:
        first, other = hosts[0], next(host for host in hosts if inside[host] != inside[hosts[0]])
        raise Uneven(f"{other} cannot be reached from {first} on every rail")
    return tuple(found)


def _check_rails(hosts: Sequence[str], interfaces: Iterable[Interface]) -> None:
    rails: dict[str, list[str]] = {host: [] for host in hosts}
    for host, rail in interfaces:
        rails[host].append(rail)
    other = next((host for host in hosts if rails[host] != rails[hosts[0]]), None)
    if other is not None:
        raise Uneven(
            f"{other} has rails {', '.join(rails[other])}, but {hosts[0]} has {', '.join(rails[hosts[0]])}"
        )


def _met(reached: nx.Graph, hosts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """By host the components that its rails are in."""
    component = {
        node: number for number, nodes in enumerate(nx.connected_components(reached)) for node in nodes
    }
    rails = sorted({node[1] for node in reached if isinstance(node, tuple)})
    return {host: tuple(component[host, rail] for rail in rails) for host in hosts}


def _members(met: Groups) -> dict[tuple[int, ...], list[str]]:
    found: dict[tuple[int, ...], list[str]] = {}
    for host, group in met.items():
        found.setdefault(group, []).append(host)
    return found


def _check_even(members: Mapping[tuple[int, ...], list[str]], sizes: Mapping[tuple[int, ...], int]) -> None:
    usual = Counter(sizes.values()).most_common(1)[0][0]
    odd = next((group for group, size in sizes.items() if size != usual), None)
    if odd is not None:
        raise Uneven(
            f"{members[odd][0]} meets {sizes[odd]} groups of hosts, its own among them, where most hosts "
            f"meet {usual}; only equal groups are planned"
        )


def _sent(reached: nx.Graph, inside: Groups, hosts: Sequence[str], own: Mapping[str, float]) -> float:
    """What a host sends to other groups, of the group of those that meet whose own links carry least."""
    groups = _members({host: inside[host] for host in hosts})
    if len(groups) == 1:
        return inf
    least = min(groups.values(), key=lambda group: sum(own[host] for host in group))
    return _cut(reached, {*least}, {*hosts} - {*least}) / len(least)


def _joined(reached: nx.Graph, host: str) -> set[object]:
    """All that a path joins with one of a host's interfaces."""
    interfaces = [node for node in reached if isinstance(node, tuple) and node[0] == host]
    return {node for one in interfaces for node in nx.node_connected_component(reached, one)}


def _links(graph: nx.Graph, nodes: Iterable[object]) -> Iterable[tuple[object, object, float]]:
    """Both ways."""
    for one, other, rate in graph.edges(nodes, data="rate"):
        yield one, other, rate
        yield other, one, rate


def _cut(reached: nx.Graph, senders: set[str], receivers: set[str]) -> float:
    """The largest flow from the interfaces of some hosts to those of others, all interfaces of a side taken
    together: the graph that is left has as many nodes as there are switches."""
    flow = nx.DiGraph()
    flow.add_nodes_from((SOURCE, SINK))

    def place(node: object) -> object:
        if not isinstance(node, tuple):
            return ("switch", node)
        return SOURCE if node[0] in senders else SINK if node[0] in receivers else None

    for one, other, rate in _links(reached, _joined(reached, next(iter(senders)))):
        ends = place(one), place(other)
        if None in ends or ends[0] == ends[1]:
            continue
        before = flow.edges[ends]["capacity"] if flow.has_edge(*ends) else 0.0
        flow.add_edge(*ends, capacity=before + rate)
    value: float = nx.maximum_flow_value(flow, SOURCE, SINK)
    return value
