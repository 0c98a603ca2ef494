"""Tiers from graphs of links, against closed forms of fat trees and rail-optimised fabrics."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hzplan.core.topology import Meeting, Uneven, meetings
from hzplan.errors import UserError
from hzplan.formats.topology import _expanded, is_topology, load_topology
from tests.cli.command import hzplan


def fat_tree(pods: int, leaves: int, hosts: int, rails: int, up: float, core: float) -> nx.Graph:
    """Every leaf has ``hosts`` hosts with all their rails, and ``up`` to its pod's spine, which has ``core``
    to the core; a link of a host has rate 1."""
    graph = nx.Graph()
    for pod, leaf in itertools.product(range(pods), range(leaves)):
        for host, rail in itertools.product(range(hosts), range(rails)):
            graph.add_edge((f"n{pod}-{leaf}-{host}", str(rail)), f"leaf{pod}-{leaf}", rate=1.0)
        if leaves > 1 or pods > 1:
            graph.add_edge(f"leaf{pod}-{leaf}", f"spine{pod}", rate=up)
    if pods > 1:
        for pod in range(pods):
            graph.add_edge(f"spine{pod}", "core", rate=core)
    return graph


@settings(max_examples=60, deadline=None)
@given(
    pods=st.integers(1, 3),
    leaves=st.integers(1, 3),
    hosts=st.integers(1, 4),
    rails=st.integers(1, 3),
    up=st.sampled_from([0.5, 2.0, 8.0]),
    core=st.sampled_from([1.0, 5.0, 40.0]),
)
def test_a_fat_tree_is_its_closed_form(
    pods: int, leaves: int, hosts: int, rails: int, up: float, core: float
) -> None:
    """What a host sends is the least of what its links, its leaf's and its pod's carry for each host."""
    own = float(rails)
    by_leaf = min(own, up / hosts)
    by_pod = min(own, leaves * up / (leaves * hosts), core / (leaves * hosts))
    expected = [(hosts, own), (leaves, by_leaf), (pods, by_pod)]
    found = meetings(fat_tree(pods, leaves, hosts, rails, up, core))
    assert [one.groups for one in found] == [groups for groups, _ in expected if groups > 1]
    assert [one.host_rate for one in found] == pytest.approx(
        [rate for groups, rate in expected if groups > 1]
    )


def test_rails_have_leaves_of_their_own_and_hosts_meet_over_all_of_them() -> None:
    graph = nx.Graph()
    for host, rail in itertools.product(range(6), range(2)):
        graph.add_edge((f"n{host}", str(rail)), f"leaf{host // 3}-{rail}", rate=4.0)
    for leaf in itertools.product(range(2), range(2)):
        graph.add_edge("leaf{}-{}".format(*leaf), "spine", rate=6.0)
    assert meetings(graph) == (Meeting(3, 8.0, rails=True), Meeting(2, 4.0, rails=False))


def test_the_slowest_group_and_rail_decide() -> None:
    graph = nx.Graph()
    for leaf, host, rail in itertools.product(range(3), range(2), range(2)):
        graph.add_edge((f"n{leaf}-{host}", str(rail)), f"leaf{leaf}-{rail}", rate=4.0)
    for leaf, rail in itertools.product(range(3), range(2)):
        graph.add_edge(f"leaf{leaf}-{rail}", f"spine{rail}", rate=1.0 if (leaf, rail) == (2, 1) else 8.0)
    assert meetings(graph) == (Meeting(2, 8.0, rails=True), Meeting(3, 1.0, rails=True))
    graph.add_edge(("n0-0", "0"), "leaf0-0", rate=1.0)
    with pytest.raises(Uneven, match="is not as fast as n0-0:0"):
        meetings(graph)


def test_uplinks_that_meet_at_no_common_spine_carry_less_than_they_are() -> None:
    """Each leaf has ten links to its own spine and one to the other's: two of eleven reach the other leaf."""
    graph = nx.Graph()
    for leaf, host in itertools.product("ab", range(2)):
        graph.add_edge((f"{leaf}{host}", "0"), leaf, rate=100.0)
    for leaf, spine in itertools.product("ab", "ab"):
        graph.add_edge(leaf, f"spine-{spine}", rate=10.0 if leaf == spine else 1.0)
    assert meetings(graph)[-1] == Meeting(2, 1.0, rails=False)


@pytest.mark.parametrize(
    ("links", "said"),
    [
        (
            [("n[1-3]:0", "leaf1"), ("n4:0", "leaf2"), ("leaf[1-2]", "spine")],
            "n4 is in a group of 1, where most hosts are in one of 3",
        ),
        ([("n[1-2]:0", "leaf1"), ("n[3-4]:0", "leaf2")], "n3 cannot be reached from n1 on every rail"),
        ([("n1:[0-1]", "leaf"), ("n2:0", "leaf")], "n2 has no interface on rail 1, as others have"),
        ([("n1:0", "n2:0")], "field links.0.to: n2:0 is an interface; links go up to switches"),
        ([("n1:0", "leaf"), ("leaf", "leaf")], "field links.1: leaf is linked to itself"),
        ([("n1:0", "leaf"), ("n[1-2]:0", "leaf")], "field links.1: n1:0 to leaf is said twice"),
        ([("n[1-2]:0", "a"), ("n[3-4]:0", "b"), ("a", "b")], "a and b are linked, but neither"),
        ([("n1:0", "a"), ("n2:0", "b"), ("a", "top"), ("b", "top"), ("n3:0", "top")], "only hierarchies"),
        ([("n1:0", "[a-b]")], "is no range"),
        ([("n1:", "leaf")], "'n1:' is neither a switch nor an interface"),
        ([("n1:0,n2:0", "leaf")], "is neither a switch nor an interface"),
        ([("n1:0", "a"), ("n1:0", "c"), ("n2:0", "a"), ("n2:0", "b")], "share a, but not all their switches"),
        ([("n[1-:0", "leaf")], "has a bracket without its other one"),
        ([("n[1-x]:0", "leaf")], "'1-x' is no range, as 1-16"),
        ([("n[9-1]:0", "leaf")], "'9-1' is no range"),
        ([("n[1-60000]:[0-7]", "leaf")], "is more than 65536 names"),
        ([("leaf1", "leaf2")], "no end is an interface of a host"),
    ],
)
def test_what_is_no_hierarchy_is_said_in_one_line(
    links: list[tuple[str, str]], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as raised:
        load_topology(written(tmp_path, links))
    assert said in str(raised.value) and "\n" not in str(raised.value)
    assert str(raised.value).startswith(str(tmp_path / "here.json"))


def written(folder: Path, links: list[tuple[str, str]], **changes: Any) -> Path:
    path = folder / "here.json"
    described = {
        "format": "hzplan.topology",
        "version": 1,
        "name": "here",
        "device": "h100-sxm",
        "network": "infiniband",
        "links": [{"ends": ends, "to": to, "gbit": 400.0} for ends, to in links],
    }
    path.write_text(json.dumps(described | changes))
    return path


def test_names_have_ranges_as_host_lists_have() -> None:
    assert [*_expanded("n[08-10,12]:0", "")] == ["n08:0", "n09:0", "n10:0", "n12:0"]
    assert [*_expanded("n1:[0-1]", "")] == ["n1:0", "n1:1"]
    assert [*_expanded("spine", "")] == ["spine"]


def test_a_plan_for_a_graph_of_links(tmp_path: Path) -> None:
    links = [("n[1-2]:[0-7]", "leaf1"), ("n[3-4]:[0-7]", "leaf2"), ("leaf[1-2]", "spine[1-4]")]
    path = written(tmp_path, links)
    assert is_topology(str(path)) and not is_topology("h100-8x400g")
    cluster, device = load_topology(path)
    assert [(tier.name, tier.ranks) for tier in cluster.tiers] == [("node", 8), ("leaf", 2), ("spine", 2)]
    assert cluster.tiers[2].bytes_per_s.value == pytest.approx(4 * 50e9 / 16)
    assert "4:1 oversubscribed" in cluster.about and device.name == "NVIDIA H100 SXM 80 GB"
    asked = ("gpt:nano", "--analytic", "--cluster", path, "--dtype", "bf16", "--micro-batch", 1)
    done = hzplan("profile", *asked, cwd=tmp_path)
    assert done.code == 0 and "4:1 oversubscribed" in done.stderr, done.stderr
    done = hzplan("solve", "profile.json", "--global-batch", 32, "--gap", 0.05, cwd=tmp_path)
    assert done.code == 0 and "gpt:nano on 32 GPUs" in done.stdout, done.stderr
    refused = hzplan("profile", *asked, "--nodes", 4, cwd=tmp_path)
    assert refused.code == 2 and "says how many nodes there are" in refused.stderr


def test_fewer_interfaces_than_devices_share_their_rate(tmp_path: Path) -> None:
    path = written(tmp_path, [("n[1-2]:[0-3]", "leaf")], devices=8)
    cluster, _ = load_topology(path)
    assert [(tier.ranks, tier.name) for tier in cluster.tiers] == [(8, "node"), (2, "network")]
    assert cluster.tiers[1].bytes_per_s.value == pytest.approx(25e9)
    with pytest.raises(UserError, match="network infinite is not known"):
        load_topology(written(tmp_path, [("n[1-2]:0", "leaf")], network="infinite"))
    with pytest.raises(UserError, match="nvlink4 joins the devices of one node"):
        load_topology(written(tmp_path, [("n[1-2]:0", "leaf")], network="nvlink4"))
    with pytest.raises(UserError, match="field links: one host of one device has nobody to talk to"):
        load_topology(written(tmp_path, [("n1:0", "leaf")]))
    for changes in ({"name": "two\nlines"}, {"device": "x" * 5000}, {"devices": 0}):
        with pytest.raises(UserError, match=f"field {next(iter(changes))}"):
            load_topology(written(tmp_path, [("n[1-2]:0", "leaf")], **changes))
