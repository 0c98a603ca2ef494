"""Parsing of quantities in options: bytes, shares, dtypes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hzplan.core.layout import Dtype
from hzplan.errors import UserError

MAX_BYTES = 2**52  # what a plan can record

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


_DTYPES: Mapping[str, Dtype] = {"fp32": "float32", "bf16": "bfloat16"}


def parse_dtype(text: str, option: str) -> Dtype:
    """``fp32`` or ``bf16`` by torch's name; UserError naming the option."""
    if text not in _DTYPES:
        raise UserError(f"{option} {text} is not known; use {' or '.join(_DTYPES)}")
    return _DTYPES[text]


LEAST_PLAIN = 2**20
"""Smallest number that is read as bytes without a unit; a smaller one is refused for lack of its unit."""


def parse_bytes(text: str, option: str) -> int:
    """``72GiB``, ``500 MB`` or ``85899345920`` in bytes; UserError naming the option."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    size = float(match[1]) * _UNITS.get(match[2].upper() or "B", 0) if match else 0.0
    if size < 1 or (match and not match[2] and size < LEAST_PLAIN):
        raise UserError(f"{option} {text}: write bytes, or a size with its unit, as in 72GiB or 500MB")
    if size > MAX_BYTES:
        raise UserError(f"{option} {text[:20]}: more than any machine has; write a size as in 72GiB or 500MB")
    return int(size)


def parse_share(text: str, option: str) -> float:
    """``0.5%`` or ``0.005`` as a share of at least 0 and below 1; UserError naming the option."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", text)
    share = float(match[1]) / (100 if match[2] else 1) if match else 1.0
    if share >= 1:
        raise UserError(f"{option} {text[:20]}: write a share below 1, as in 0.5% or 0.005")
    return share
