"""Numbers and choices as people write and read them."""

from __future__ import annotations

import pytest

from hzplan.cli.quantities import parse_bytes, parse_share
from hzplan.errors import UserError
from hzplan.show.readable import at_least, at_most, cluster, difference, shards, worker


def test_bytes_may_have_a_unit_or_be_plain() -> None:
    assert parse_bytes("72GiB", "--memory") == 72 * 2**30
    assert parse_bytes(" 500 MB ", "--memory") == 500 * 10**6
    assert parse_bytes("85899345920", "--memory") == 85899345920
    assert parse_bytes("1B", "--memory") == 1


@pytest.mark.parametrize("text", ["72", "0GiB", "64XB", "", "GiB", "-1GiB", "9" * 40])
def test_what_is_no_size_is_one_line(text: str) -> None:
    with pytest.raises(UserError, match="--memory"):
        parse_bytes(text, "--memory")


def test_shares_may_be_percent() -> None:
    assert parse_share("0.5%", "--tie") == pytest.approx(0.005)
    assert parse_share("0.005", "--tie") == 0.005 and parse_share("0", "--tie") == 0
    for text in ("2x", "100%", "1", "-1%", ""):
        with pytest.raises(UserError, match="--tie"):
            parse_share(text, "--tie")


def test_differences_are_in_a_unit_that_suits() -> None:
    assert difference(284.6, 219.0) == "+65.6 s (+30.0%)"
    assert difference(1.0, 1.00001) == "-10.0 µs (+0.0%)" and difference(1.0, 1.0) == "+0.00 µs (+0.0%)"
    assert difference(0.5, 0.0) == "+500 ms"


def test_bounds_are_rounded_down_and_gaps_up() -> None:
    assert (at_least(0.31899), at_least(0.319), at_least(2.0), at_least(0.0)) == (
        "318 ms",
        "319 ms",
        "2.00 s",
        "0.00 µs",
    )
    assert (at_least(12.999), at_least(0.99999), at_least(1234.5)) == ("12.9 s", "999 ms", "1230 s")
    assert (at_most(0.012301), at_most(0.0123), at_most(0.0)) == ("1.24%", "1.23%", "0.00%")


def test_meshes_and_shards_in_words() -> None:
    assert cluster([8, 8], ["node", "network"], "cuda") == "8 GPUs × 8 nodes"
    assert cluster([8, 2, 1], ["mesh", "node", "network"], "cuda") == "8 GPUs × 2 meshes × 1 node"
    assert cluster([4], ["machine"], "cpu") == "4 ranks" and worker("cuda") == "GPU"
    assert shards(2, 64, 64) == "params ÷2, grads ÷64, optimizer ÷64"
