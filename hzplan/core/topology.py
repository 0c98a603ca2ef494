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

import networkx as nx

Interface = tuple[str, str]
"""A host, and the rail of its interface."""
Group = tuple[int, ...]
"""The components of a fabric that a host's rails are in."""

Link = tuple[object, object, float]
"""Two nodes, and the rate between them."""

SOURCE, SINK = "all that send", "all that receive"
MOST_EDGES = 40_000
"""Edges that flows of one tier may look at, all together; at least one flow is computed."""


class Uneven(ValueError):
    """A fabric that is no hierarchy of equal groups; the message names hosts, or switches."""


@dataclass(frozen=True)
class Meeting:
    """A tier: ``groups`` of the tier inside meet; ``host_rate``: what a host sends to the others of its tier
    while all hosts do, in the unit of the links. ``rails``: whether its rails have switches of their own."""

    groups: int
    host_rate: float
    rails: bool


def meetings(fabric: nx.Graph) -> tuple[Meeting, ...]:
    """The tiers from the innermost to the outermost, without those that join nobody.

    A switch's height is the number of links to the nearest interface; links go one up. Hosts meet at a height
    when on every rail a path over switches of at most that height joins them. What a group sends out while
    all groups do is the least of what the tier inside carries, its own links up, and, for those groups that
    can send least, the least cut between them and the others (Ford and Fulkerson 1956); the slowest group
    and rail decide. Raises Uneven.
    """
    interfaces = sorted(node for node in fabric if isinstance(node, tuple))
    hosts = sorted({host for host, _ in interfaces})
    rails = sorted({rail for _, rail in interfaces})
    _check_interfaces(fabric, hosts, rails)
    heights = nx.multi_source_dijkstra_path_length(fabric, interfaces, weight=None)
    _check_links(fabric, heights)
    inside: dict[str, Group] = {host: (number,) for number, host in enumerate(hosts)}
    found: list[Meeting] = []
    before = len(rails) * _rate(fabric, interfaces[0])
    for height in range(1, max(heights.values()) + 1):
        reached = fabric.subgraph(node for node, far in heights.items() if far <= height)
        component = {
            node: number for number, nodes in enumerate(nx.connected_components(reached)) for node in nodes
        }
        met = {host: tuple(component[host, rail] for rail in rails) for host in hosts}
        members = _members(met)
        sizes = {group: len({inside[host] for host in of}) for group, of in members.items()}
        links: dict[int, list[Link]] = {}
        for one, other, rate in reached.edges(data="rate"):
            links.setdefault(component[one], []).append((one, other, rate))
        carried = [_sent(links, heights, inside, of, group) for group, of in members.items()]
        before = min(before, *carried)
        if max(sizes.values()) > 1:
            _check_even(members, sizes)
            by_rails = any(len(set(group)) > 1 for group in members)
            found.append(Meeting(next(iter(sizes.values())), before, by_rails))
        inside = met
    first = hosts[0]
    if (other := next((host for host in hosts if inside[host] != inside[first]), None)) is not None:
        raise Uneven(f"{other} cannot be reached from {first} on every rail")
    return tuple(found)


def _check_interfaces(fabric: nx.Graph, hosts: Sequence[str], rails: Sequence[str]) -> None:
    """Every host has an interface on every rail, and all are as fast."""
    first = _rate(fabric, (hosts[0], rails[0])) if (hosts[0], rails[0]) in fabric else 0.0
    for one in itertools.product(hosts, rails):
        if one not in fabric:
            raise Uneven(f"{one[0]} has no interface on rail {one[1]}, as others have")
        if _rate(fabric, one) != first:
            raise Uneven(
                f"{':'.join(one)} is not as fast as {hosts[0]}:{rails[0]}; leave out what does not carry the "
                "model's traffic"
            )


def _rate(fabric: nx.Graph, node: object) -> float:
    return float(sum(rate for _, _, rate in fabric.edges(node, data="rate")))


def _check_links(fabric: nx.Graph, heights: Mapping[object, int]) -> None:
    """Links go one up, and interfaces that share a switch share all of theirs."""
    for one, other in fabric.edges:
        if one in heights and abs(heights[one] - heights[other]) != 1:
            raise Uneven(
                f"{one} and {other} are linked, but neither is one link nearer to the hosts than the other; "
                "only hierarchies are planned"
            )
    leaves: dict[object, tuple[object, frozenset[object]]] = {}
    for node in fabric:
        if isinstance(node, tuple):
            its = frozenset(fabric[node])
            for leaf in its:
                before, theirs = leaves.setdefault(leaf, (node, its))
                if theirs != its:
                    raise Uneven(
                        f"{':'.join(map(str, node))} and {':'.join(before)} share {leaf}, but not all "  # type: ignore[arg-type]
                        "their switches; only equal groups are planned"
                    )


def _members(met: Mapping[str, Group]) -> dict[Group, list[str]]:
    found: dict[Group, list[str]] = {}
    for host, group in met.items():
        found.setdefault(group, []).append(host)
    return found


def _check_even(members: Mapping[Group, list[str]], sizes: Mapping[Group, int]) -> None:
    usual = Counter(sizes.values()).most_common(1)[0][0]
    odd = next((group for group, size in sizes.items() if size != usual), None)
    if odd is not None:
        raise Uneven(
            f"{members[odd][0]} is in a group of {sizes[odd]}, where most hosts are in one of {usual}; only "
            "equal groups are planned"
        )


def _sent(
    links: Mapping[int, Sequence[Link]],
    heights: Mapping[object, int],
    inside: Mapping[str, Group],
    hosts: Sequence[str],
    group: Group,
) -> float:
    """What a host sends to other groups of those that meet, as fast as its slowest rail on every one;
    infinite where there is one group only. ``links``: by component."""
    groups = list(_members({host: inside[host] for host in hosts}).values())
    if len(groups) == 1:
        return inf
    place_of = {host: place for place, of in enumerate(groups) for host in of}
    least = inf
    for number, rails in Counter(group).items():
        up = _up(links[number], heights, place_of)
        rates = [capacity / len(of) for capacity, of in zip(up, groups, strict=True)]
        most = max(1, MOST_EDGES // len(links[number]))
        for place in sorted(range(len(groups)), key=rates.__getitem__)[:most]:
            senders = {*groups[place]}
            rates[place] = _cut(links[number], senders) / len(senders)
        least = min(least, min(rates) / rails)
    return least * len(group)


def _up(links: Sequence[Link], heights: Mapping[object, int], place_of: Mapping[str, int]) -> list[float]:
    """By group, what leaves it over its own links: a component without its highest switches falls into its
    groups."""
    top = max(max(heights[one], heights[other]) for one, other, _ in links)
    below, upward = nx.Graph(), []
    for one, other, rate in links:
        low, high = sorted((one, other), key=heights.__getitem__)
        below.add_node(low)
        if heights[high] < top:
            below.add_edge(low, high)
        else:
            upward.append((low, rate))
    owner = {
        node: place_of[next(one for one in nodes if isinstance(one, tuple))[0]]
        for nodes in nx.connected_components(below)
        for node in nodes
    }
    capacity = [0.0] * (1 + max(place_of.values()))
    for low, rate in upward:
        capacity[owner[low]] += rate
    return capacity


def _cut(links: Iterable[Link], senders: set[str]) -> float:
    """The largest flow from the interfaces of some hosts to those of all others, the interfaces of a side
    taken together: the graph that is left has as many nodes as there are switches."""
    flow = nx.DiGraph()
    flow.add_nodes_from((SOURCE, SINK))

    def place(node: object) -> object:
        if not isinstance(node, tuple):
            return ("switch", node)
        return SOURCE if node[0] in senders else SINK

    for one, other, rate in links:
        for ends in ((place(one), place(other)), (place(other), place(one))):
            before = flow.edges[ends]["capacity"] if flow.has_edge(*ends) else 0.0
            flow.add_edge(*ends, capacity=before + rate)
    value: float = nx.maximum_flow_value(flow, SOURCE, SINK)
    return value
