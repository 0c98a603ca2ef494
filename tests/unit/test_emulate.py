"""What is emulated, said and blamed: the parts of ``hzplan emulate`` that need no network."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hzplan.emulate import advice, network
from hzplan.emulate.cluster import MAX_RANKS, MAX_RATE, MIN_RATE, Cluster, address, environment, parse_rate
from hzplan.emulate.outcome import Ended, culprit
from hzplan.emulate.spec import Spec
from hzplan.errors import JobFailed, UserError

RATES = st.none() | st.integers(MIN_RATE // 1000, MAX_RATE // 1000).map(lambda kbit: kbit * 1000)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Of up to four tiers."""
    tiers = draw(
        st.lists(st.integers(1, 5), min_size=1, max_size=4).filter(lambda sizes: prod(sizes) <= MAX_RANKS)
    )
    rates = draw(st.lists(RATES, min_size=len(tiers), max_size=len(tiers)))
    rates.sort(key=lambda rate: inf if rate is None else rate, reverse=True)
    return Cluster(tuple(tiers), tuple(rates))


@given(clusters())
def test_what_is_written_is_read(cluster: Cluster) -> None:
    rates = ",".join("none" if rate is None else f"{rate // 1000}kbit" for rate in cluster.rates)
    assert Cluster.parse(cluster.sizes, rates) == cluster
    assert cluster.describe().count("\n") == 0


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("none", None),
        ("500mbit", 500_000_000),
        ("2.5gbit", 2_500_000_000),
        ("1000kbit", 1_000_000),
        (" 1Gbit ", 10**9),
    ],
)
def test_rates_are_read_as_tc_writes_them(text: str, rate: int | None) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    ("tiers", "rates"),
    [
        ("2x2", "none"),
        ("2x2", "none,500mbit,1gbit"),
        ("2x2", "none,fast"),
        ("2x2", "none,500mbps"),
        ("2x2", "none,-1gbit"),
        ("2x2", "none,1kbit"),
        ("2x2", "none,1000000gbit"),
        ("2x2x2", "none,200mbit,1gbit"),
        ("2x2", "100mbit,none"),
        ("2x0", "none,1gbit"),
        ("2x-1", "none,1gbit"),
        ("2×2", "none,1gbit"),
        ("", "none"),
        ("100x100", "none,1gbit"),
        ("9999999999x2", "none,1gbit"),
    ],
)
def test_what_makes_no_sense_is_one_line(tiers: str, rates: str) -> None:
    with pytest.raises(UserError) as caught:
        Cluster.parse(tiers, rates)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_a_cluster_is_described() -> None:
    assert Cluster.parse("2x2", "none,500mbit").describe() == "2 nodes × 2 ranks, network 500 Mbit/s"
    assert Cluster.parse("1x2", "none,none").describe() == "2 nodes × 1 rank, network not limited"
    assert (
        Cluster.parse("2x2x2", "2.5gbit,1gbit,200mbit").describe()
        == "4 nodes × 2 ranks (2x2x2), node 2.5 Gbit/s, network 1: 1 Gbit/s, network 2: 200 Mbit/s"
    )


@given(clusters())
def test_the_network_is_a_tree_with_limits_at_both_ends_of_its_links(cluster: Cluster) -> None:
    lines = list(network.links(cluster, [f"/x/{node}" for node in range(cluster.nodes)]))
    bridges = [line.split()[3] for line in lines if line.endswith("type bridge")]
    joins = [line for line in lines if " type veth " in line]
    assert len(set(bridges)) == len(bridges)
    assert len(joins) == cluster.nodes + len(bridges) - 1  # a tree's edges
    named = {line.split()[3] for line in lines if line.startswith("link add")}
    named |= {line.split()[10] for line in joins if " netns " not in line}
    for line in lines:
        if " master " in line:
            assert line.split()[3] in named and line.split()[5] in bridges
        assert all(len(word) <= 15 for word in line.split())  # what the kernel takes as a name
    limited = [line.split()[3] for line in network.limits(cluster)]
    assert len(set(limited)) == len(limited)
    assert set(limited) <= named - set(bridges)
    if None not in cluster.rates and len(cluster.tiers) > 1:
        assert len(limited) + cluster.nodes == 2 * len(joins)  # the nodes limit their own ends
        assert [line.split()[3] for line in network.node_limits(cluster)] == ["lo", "hz0"]


@given(st.integers(MIN_RATE, MAX_RATE))
def test_a_burst_holds_a_frame_and_a_late_timer(rate: int) -> None:
    assert network.burst(rate) > network.MTU + 14
    assert network.burst(rate) >= rate // 8000
    assert network.burst(rate) <= max(network.SMALLEST_BURST, rate // 8 * 2 // 1000)


@given(clusters(), st.data())
def test_a_rank_is_told_its_place_as_torchrun_says_it(cluster: Cluster, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, cluster.world - 1))
    inherited = {"TORCHELASTIC_RUN_ID": "x", "SLURM_PROCID": "9", "HZPLAN_LAUNCHED": "1", "HOME": "/h"}
    env = environment(cluster, rank, inherited | {"RANK": "77", "MASTER_ADDR": "elsewhere"})
    assert not {"TORCHELASTIC_RUN_ID", "SLURM_PROCID", "HZPLAN_LAUNCHED"} & env.keys()
    assert env["HOME"] == "/h"
    assert int(env["RANK"]) == rank < int(env["WORLD_SIZE"]) == cluster.world
    assert int(env["GROUP_RANK"]) * int(env["LOCAL_WORLD_SIZE"]) + int(env["LOCAL_RANK"]) == rank
    assert env["MASTER_ADDR"] == "10.0.0.1"
    assert env.get("OMP_NUM_THREADS") == ("1" if cluster.world > 1 else None)
    assert environment(cluster, rank, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


def test_every_node_has_an_address() -> None:
    addresses = [address(node) for node in range(MAX_RANKS + 1)]
    assert len(set(addresses)) == len(addresses)
    assert addresses[0] == "10.0.0.1" and addresses[255] == "10.0.1.0"


def end(rank: int, code: int, at: float, *, by_us: bool = False) -> Ended:
    return Ended(rank, rank // 2, code, at, by_us)


@pytest.mark.parametrize(
    ("ended", "rank", "code"),
    [
        ([end(0, 0, 1.0), end(1, 0, 2.0)], None, 0),
        ([end(1, 7, 1.0), end(0, 9, 1.5)], 1, 7),  # 0 lost its peer
        ([end(0, 1, 1.0), end(1, 7, 1.05)], 1, 7),  # at once: the larger one
        ([end(0, 5, 1.0), end(1, 5, 1.0)], 0, 5),
        ([end(0, 0, 0.5), end(2, -9, 1.0), end(1, -15, 1.0, by_us=True)], 2, 137),
        ([end(0, 3, 0.5, by_us=True), end(2, 4, 1.0)], 2, 4),
    ],
)
def test_who_is_to_blame(ended: list[Ended], rank: int | None, code: int) -> None:
    worst = culprit(ended)
    assert (worst.rank if worst else None, worst.exit_code if worst else 0) == (rank, code)


def test_how_a_rank_ended_is_one_line() -> None:
    assert end(3, 7, 0.0).describe() == "rank 3 on node 1 ended with exit code 7"
    assert (
        end(0, -9, 0.0).describe()
        == "rank 0 on node 0 was ended by SIGKILL; the machine may be out of memory"
    )
    assert end(0, -15, 0.0, by_us=True).describe() == "rank 0 on node 0 was ended by SIGTERM"


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: advice.lacks("darwin", []), "needs Linux"),
        (lambda: advice.lacks("linux", ["tc"]), "apt-get install iproute2"),
        (lambda: advice.lacks("linux", ["ip", "unshare"]), "apt-get install iproute2 util-linux"),
        (
            lambda: advice.refused("unshare: unshare failed: Operation not permitted", root=False),
            "kernel.unprivileged_userns_clone=1",
        ),
        (
            lambda: advice.refused("unshare: unshare failed: No space left on device", root=False),
            "user.max_user_namespaces",
        ),
        (
            lambda: advice.refused(
                "unshare: write failed /proc/self/uid_map: Operation not permitted", root=False
            ),
            "kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        (lambda: advice.refused("Operation not permitted", root=True), "CAP_SYS_ADMIN"),
        (
            lambda: advice.failed("link add name b1-0 type bridge", "Error: Unknown device type."),
            "modprobe bridge",
        ),
        (lambda: advice.failed("link add name n0 type veth", "Error: Unknown device type."), "modprobe veth"),
        (
            lambda: advice.failed("qdisc add dev n0 root tbf", "Error: Specified qdisc kind is unknown."),
            "modprobe sch_tbf",
        ),
        (
            lambda: advice.failed("link set dev lo up", "RTNETLINK answers: Operation not permitted"),
            "run as root",
        ),
        (lambda: advice.failed("link set dev lo up", "File\nexists"), "File exists (at: link set dev lo up)"),
    ],
)
def test_what_is_missing_is_named_with_what_provides_it(make: Callable[[], str], names: str) -> None:
    text = make()
    assert names in text
    assert "\n" not in text


def test_nothing_is_missing() -> None:
    assert advice.lacks("linux", []) is None


def test_a_refusal_is_told_from_a_world_that_broke() -> None:
    assert advice.not_begun("unshare: unshare failed: Operation not permitted\n", root=False).exit_code == 2
    broken = advice.not_begun("Traceback …\nImportError: no hzplan", root=False)
    assert isinstance(broken, JobFailed)
    assert "ImportError: no hzplan" in str(broken)
    assert isinstance(advice.not_begun("", root=True), JobFailed)


def test_a_spec_is_read_as_written() -> None:
    cuts = ((0, 1.5, None), (1, 2.0, 0.5))
    spec = Spec(
        (2, 2), (None, 10**9), ((1, 10**7),), cuts, "/bin/true", ("true", "é\n"), "ip", "tc", "/l", True, 1, 2
    )
    assert Spec.from_text(spec.to_text()) == spec


def test_links_that_fail_are_read_and_checked() -> None:
    found = Cluster.parse("2x2", "none,1gbit", cuts=["1@10+5", "0@2.5"])
    assert found.cuts == ((1, 10.0, 5.0), (0, 2.5, None))
    for text in ("1", "1@", "x@1", "1@1+", "1@-1", "1@1e9"):
        with pytest.raises(UserError, match="as in 1@10\\+5, or 1@10 for good"):
            Cluster.parse("2x2", "none,1gbit", cuts=[text])
    with pytest.raises(UserError, match="cut node 2: the cluster has nodes 0 to 1"):
        Cluster.parse("2x2", "none,1gbit", cuts=["2@1"])
