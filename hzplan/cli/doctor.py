"""``hzplan doctor``: what this machine has, in one block to paste into a report."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from typing import Annotated

import typer


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Show versions, devices, backends, links, the solver and whether clusters can be emulated here.

    Example: hzplan doctor
    """
    found = {name: _answer(look) for name, look in _LOOKS.items()}
    if as_json:
        print(json.dumps(found))
        return
    width = max(map(len, found))
    for name, text in found.items():
        print(f"{name:<{width}}  {text}")


def _answer(look: Callable[[], str]) -> str:
    """The text of one look, or the error that it raised."""
    from hzplan.errors import one_line

    try:
        return look()
    except Exception as error:
        return f"failed: {one_line(error)}"


def _versions() -> str:
    import hzplan

    return (
        f"{hzplan.__version__}, Python {platform.python_version()}, {platform.system()} {platform.release()}"
    )


def _torch() -> str:
    import torch
    import torch.distributed as dist

    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return f"{torch.__version__} ({built}); backends: {', '.join(backends) or 'none'}"


def _devices() -> str:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    host = f"{cores} processors, {memory / 2**30:.1f} GiB, {torch.get_num_threads()} threads"
    cards = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return "; ".join([host, *cards])


def _links() -> str:
    names = sorted(name for name in os.listdir("/sys/class/net") if name != "lo")
    rates = []
    for name in names:
        try:
            with open(f"/sys/class/net/{name}/speed", encoding="ascii") as file:
                rates.append(f"{name} {file.read().strip()} Mbit/s")
        except OSError:  # a bridge or a tunnel says nothing
            rates.append(name)
    return ", ".join(rates) or "loopback only"


def _solver() -> str:
    from hzplan.solver.health import health

    return health()


def _emulation() -> str:
    from hzplan.emulate import available

    return available() or "works"


_LOOKS: dict[str, Callable[[], str]] = {
    "hzplan": _versions,
    "torch": _torch,
    "devices": _devices,
    "links": _links,
    "solver": _solver,
    "emulation": _emulation,
}
