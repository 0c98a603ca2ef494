"""Every name of torch's CUDA build that is called exists there, with the arguments given: no GPU is needed.

``make cuda-api`` runs it in an environment of its own, with torch alone. Names below ``torch.cuda`` and
``dist`` are read from the source, with the arguments of their calls; what is called on objects of C++, whose
types the source does not show, is listed here.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
FOLDERS = ("hzplan", "benchmarks/gpu")

PREFIXES = {"torch": torch, "dist": dist, "distributed_c10d": dist.distributed_c10d}

OF_OBJECTS = {
    "torch.cuda.Stream": ("wait_event", "wait_stream", "record_event", "synchronize"),
    "torch.cuda.Event": ("record", "query", "synchronize", "elapsed_time", "wait"),
    "torch.cuda.CUDAGraph": ("replay",),
    "torch._C._CudaDeviceProperties": ("multi_processor_count", "total_memory"),
    "dist.distributed_c10d": ("_coalescing_manager",),
    "dist.ProcessGroup": (
        *("send", "recv", "rank", "size", "_get_backend"),
        *("_start_coalescing", "_end_coalescing", "_device_types"),
    ),
    "dist.ProcessGroupNCCL": (
        *("options", "mem_allocator", "register_mem_pool", "supports_coalescing", "supports_splitting"),
    ),
    "dist.ProcessGroupNCCL.Options": ("config", "is_high_priority_stream", "split_from", "_timeout"),
}
"""Attributes of what the runtime gets from torch, by class."""

OF_RUNTIME = ("cudaHostRegister", "cudaHostUnregister")
OF_CONFIG = ("max_ctas", "min_ctas", "split_share")


def resolved(dotted: str) -> Any:
    """What a dotted name stands for. AttributeError."""
    first, *rest = dotted.split(".")
    found: Any = PREFIXES[first]
    for name in rest:
        found = getattr(found, name)
    return found


def names(tree: ast.AST) -> Iterator[tuple[str, ast.Call | None]]:
    """Dotted names below the prefixes, each with the call that it is called in."""
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        parts: list[str] = []
        at: ast.AST = node
        while isinstance(at, ast.Attribute):
            parts.append(at.attr)
            at = at.value
        if parts and isinstance(at, ast.Name) and at.id in PREFIXES:
            dotted = ".".join([at.id, *reversed(parts)])
            if at.id != "torch" or (parts[-1] == "cuda" and len(parts) > 1):
                yield dotted, called.get(id(node))


def problem(dotted: str, call: ast.Call | None) -> str:
    """What is wrong with a use of a name, empty if nothing."""
    try:
        found = resolved(dotted)
    except AttributeError as error:
        return str(error)
    if call is None or any(isinstance(one, ast.Starred) for one in call.args):
        return ""
    keywords = {one.arg: None for one in call.keywords if one.arg is not None}
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # of C++, which tells no signature
        return ""
    try:
        (signature.bind_partial if len(keywords) < len(call.keywords) else signature.bind)(
            *call.args, **keywords
        )
    except TypeError as error:
        return str(error)
    return ""


def looked_at() -> tuple[int, list[str]]:
    """How many uses, and what is wrong with them."""
    count, wrong = 0, list[str]()
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for dotted, call in names(ast.parse(path.read_text(encoding="utf-8"))):
                count += 1
                if said := problem(dotted, call):
                    wrong.append(f"{path.relative_to(ROOT)}: {dotted}: {said}")
    listed = [f"{owner}.{name}" for owner, members in OF_OBJECTS.items() for name in members]
    wrong += [f"{dotted}: {said}" for dotted in listed if (said := problem(dotted, None))]
    config = dist.ProcessGroupNCCL.Options().config
    runtime = vars(torch._C).get("_cudart")  # torch.cuda.cudart() wants a driver; only a CUDA build has it
    wrong += [f"NCCL's config has no {name}" for name in OF_CONFIG if not hasattr(config, name)]
    wrong += [f"the CUDA runtime has no {name}" for name in OF_RUNTIME if not hasattr(runtime, name)]
    return count + len(listed) + len(OF_CONFIG) + len(OF_RUNTIME), wrong


def main() -> int:
    """Print what was looked at; 1 where something is missing, 2 where this torch has no CUDA."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, help="write the result here as well (JSON)")
    output = parser.parse_args().output
    if torch.version.cuda is None:
        print(f"torch {torch.__version__} is a build without CUDA; install torch from its own index")
        return 2
    count, wrong = looked_at()
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl}
    print(f"{count} uses looked at in torch {torch.__version__}, NCCL {nccl}: {len(wrong)} wrong")
    print(*wrong, sep="\n")
    if output is not None:
        output.write_text(json.dumps({**versions, "uses": count, "wrong": wrong}, indent=1) + "\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
