"""Numbers and choices as people write and read them."""

from __future__ import annotations

import pytest

from hzplan.cli.quantities import parse_bytes, parse_share
from hzplan.errors import UserError
from hzplan.show.readable import cluster, difference, shards, worker


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


def test_meshes_and_shards_in_words() -> None:
    assert cluster([8, 8], ["node", "network"], "cuda") == "8 GPUs × 8 nodes"
    assert cluster([8, 2, 1], ["mesh", "node", "network"], "cuda") == "8 GPUs × 2 meshes × 1 node"
    assert cluster([4], ["machine"], "cpu") == "4 ranks" and worker("cuda") == "GPU"
    assert shards(2, 64, 64) == "params ÷2, grads ÷64, optimizer ÷64"
