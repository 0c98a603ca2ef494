"""hzplan plans and runs the fastest sharded data-parallel training that fits in memory.

``hzplan.auto`` measures, plans and shards in the job that trains; ``hzplan.parallelize`` shards a model as a
plan says; ``hzplan.Plan.load`` reads a plan; ``hzplan.deferred_init`` makes a model that is larger than a
rank; ``hzplan.Checkpoints`` saves and loads what is trained, and ``hzplan.load_dcp`` takes over what FSDP2
has trained. ``hzplan.Muon`` is the matrix optimizer that plans know. Everything else is the command line's
(``hzplan --help``).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hzplan.checkpoint.checkpoints import Checkpoints as Checkpoints
    from hzplan.checkpoint.from_dcp import load_dcp as load_dcp
    from hzplan.formats.plan import Plan as Plan
    from hzplan.in_job import auto as auto
    from hzplan.models.deferred import deferred_init as deferred_init
    from hzplan.runtime.apply import full_parameters as full_parameters
    from hzplan.runtime.apply import parallelize as parallelize
    from hzplan.runtime.muon import Muon as Muon

__version__ = "0.1.0"

# NCCL reads it once, at its first launch, which may come before a plan is there: kernels of several
# communicators then begin in the order in which the host launched them (``runtime.backends.nccl``).
os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")

_HOMES = {
    "auto": "hzplan.in_job",
    "Checkpoints": "hzplan.checkpoint.checkpoints",
    "Plan": "hzplan.formats.plan",
    "deferred_init": "hzplan.models.deferred",
    "load_dcp": "hzplan.checkpoint.from_dcp",
    "full_parameters": "hzplan.runtime.apply",
    "parallelize": "hzplan.runtime.apply",
    "Muon": "hzplan.runtime.muon",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the command line's help must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hzplan' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
