"""What units recompute in part, beside what torch's tools choose operation by operation at the same memory.

torch's tests (test/distributed/_tools/test_sac_ilp.py) ask for the best policy of a module at seven shares of
its memory. Here its estimator looks at a block's forward on fake tensors of a CPU, and its ILP chooses at
these shares; ours are the ways that units have, mixed over like units.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from hzplan.core.recompute import HOST, WAYS
from hzplan.models.recompute import _Policy
from hzplan.models.workload import load

sac_estimator = pytest.importorskip("torch.distributed._tools.sac_estimator")
sac_ilp = pytest.importorskip("torch.distributed._tools.sac_ilp")

SHARES = tuple(nbytes / 420 for nbytes in (0, 100, 120, 200, 220, 320, 420))
"""Those of torch's test, whose module has 420 bytes."""

FLOPS, BYTES = 600e12, 2.5e12
"""Of a device, per second."""

BLOCKS = {
    "gpt:1.3b": "GPT.layers.3",
    "hf:llama3-8b": "LlamaForCausalLM.model.layers.3",
    "hf:qwen3-8b": "Qwen3ForCausalLM.model.layers.3",
}


class Operation(SimpleNamespace):
    """One that can be a key."""

    __hash__ = object.__hash__


Point = tuple[int, float]
"""Bytes that are kept, and seconds that are computed again."""


def seconds(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    """What an operation returns, and how long it takes: arithmetic or memory. Views take nothing."""
    out = func(*args, **(kwargs or {}))
    if sac_estimator.is_view_fn(func):
        return out, 0.0
    flops = 0.0
    if "flash_attention" in str(func):
        sequences, heads, tokens, width = args[0].shape
        flops = 2 * sequences * heads * tokens**2 * width  # causal
    elif func._overloadpacket in flop_registry:
        flops = flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
    tensors = [one for one in pytree.tree_leaves((args, kwargs, out)) if isinstance(one, torch.Tensor)]
    return out, max(flops / FLOPS, sum(one.numel() * one.element_size() for one in tensors) / BYTES)


@contextmanager
def bfloat16() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@functools.cache
def block(model: str) -> Any:
    """torch's statistics of a block's forward."""
    workload = load(model)
    with bfloat16(), FakeTensorMode(), sac_estimator.SACEstimator()("operator-level-cost-model") as estimator:
        estimator._estimate_runtime = seconds
        workload.loss(workload.build(), torch.zeros(1, workload.seq_len + 1, dtype=torch.long))
        return estimator.sac_mod_stats[BLOCKS[model]]


def computed_again(stats: Any) -> list[float]:
    """By operation the seconds, where it is not kept: none behind the last one that backward needs, where
    torch's checkpoint stops."""
    last = max(index for index in stats.saved_autograd_ops if index not in stats.view_like_ops)
    return [taken if index <= last else 0.0 for index, taken in enumerate(stats.runtimes)]


def point(stats: Any, kept: Sequence[bool]) -> Point:
    again = computed_again(stats)
    nbytes = sum(size for size, keeps in zip(stats.memory, kept, strict=True) if keeps)
    return nbytes, sum(taken for taken, keeps in zip(again, kept, strict=True) if not keeps)


def ours(stats: Any) -> Mapping[str, Point]:
    """By way; without one what autograd keeps is kept."""
    found = {"": (sum(stats.memory[index] for index in stats.saved_autograd_ops), 0.0)}
    for way in (way for way in WAYS if way not in ("chunks", HOST)):
        policy, first = _Policy(way), SimpleNamespace(is_recompute=False)
        operations = [
            Operation(overloadpacket=f"aten.{name}", is_view=index in stats.view_like_ops)
            for index, name in enumerate(stats.func_names)
        ]
        keeps = [policy(first, one) is CheckpointPolicy.MUST_SAVE and way != "full" for one in operations]
        results = {one: {0: "its result"} for one in operations}
        policy.let_go(results)
        keeps = [
            keep and results[one][0] == "its result" for keep, one in zip(keeps, operations, strict=True)
        ]
        found[way] = point(stats, keeps)
    return found


def mixed(points: Mapping[str, Point], nbytes: int) -> float:
    """The least seconds in so many bytes a unit, where units differ."""
    listed = [*points.values()]
    within = [taken for size, taken in listed if size <= nbytes]
    within += [
        less + (more - less) * (nbytes - small) / (large - small)
        for small, less in listed
        for large, more in listed
        if small <= nbytes < large
    ]
    return min(within)


@pytest.mark.parametrize("model", BLOCKS)
@pytest.mark.parametrize("share", SHARES, ids=lambda share: f"{share:.2f}")
def test_no_slower_than_torchs_choice_of_operations(model: str, share: float) -> None:
    stats = block(model)
    chosen = sac_ilp.get_optimal_checkpointing_policy_per_module(stats, share)
    nbytes, taken = point(stats, [bool(one) for one in chosen])
    assert nbytes <= math.ceil(share * sum(stats.memory))
    assert mixed(ours(stats), nbytes) <= taken * (1 + 1e-9)
