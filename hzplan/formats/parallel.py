"""The record of tensor, pipeline and context parallelism, which hzplan is given and never chooses."""

from __future__ import annotations

import re

from hzplan.core.hierarchy import Mesh
from hzplan.errors import UserError
from hzplan.formats.base import PositiveInt, Strict

NAMES = {"tp": "tensor", "pp": "pipeline", "cp": "context"}
MOST = 1 << 14
"""Upper limit of each degree."""


class ModelParallel(Strict):
    """Ranks that share a model's replica, by kind; they leave the hierarchy, but for ``context``.

    ``tensor``: ranks that share every matrix, neighbours on the fastest links. ``pipeline``: stages, the
    slowest dimension. ``context``: ranks that share a sequence; they shard states as others do, but have no
    sequences of their own.
    """

    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    context: PositiveInt = 1

    @classmethod
    def parse(cls, text: str) -> ModelParallel:
        """Read ``"tp=8,pp=4,cp=1"``, in any order; UserError for anything else."""
        given: dict[str, int] = {}
        for part in text.split(","):
            found = re.fullmatch(r"\s*(tp|pp|cp)\s*=\s*([1-9]\d{0,4})\s*", part)
            if found is None or NAMES[found[1]] in given or int(found[2]) > MOST:
                raise UserError(f"--model-parallel {text}: write sizes as in tp=8,pp=4,cp=1, each once")
            given[NAMES[found[1]]] = int(found[2])
        return cls(**given)

    def __str__(self) -> str:
        return ",".join(f"{short}={getattr(self, name)}" for short, name in NAMES.items())

    @property
    def ranks(self) -> int:
        """How many ranks have one sequence between them."""
        return self.tensor * self.pipeline * self.context


def check_context(mesh: Mesh, parallel: ModelParallel | None) -> None:
    """ValueError where the ranks of a mesh do not divide into groups that share a sequence."""
    if parallel is not None and mesh.world % parallel.context:
        raise ValueError(f"parallel.context: {parallel.context} does not divide the {mesh.world} ranks")


def data_ranks(mesh: Mesh, parallel: ModelParallel | None) -> int:
    """How many ranks of a mesh, or groups of context parallelism, have sequences of their own."""
    return mesh.world // (parallel.context if parallel is not None else 1)
