"""A user's own setting as far as a file tells it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hzplan.core.hierarchy import Mesh
from hzplan.errors import UserError


@dataclass(frozen=True)
class Setting:
    """``shards``: of parameter, gradient and optimizer state, as ``solve --baseline`` takes them.
    ``dtype``: of the computation, and ``reduce_dtype`` what gradients travel and are summed in, by torch's
    names. What the file does not tell is None. ``said``: what was read; ``open``: what may matter and was
    not."""

    shards: tuple[int, int, int]
    micro_batch: int | None = None
    global_batch: int | None = None
    prefetch: int | None = None
    recompute: str | None = None
    clip: bool | None = None
    dtype: str | None = None
    reduce_dtype: str | None = None
    said: tuple[str, ...] = ()
    open: tuple[str, ...] = field(default=())

    @property
    def as_baseline(self) -> str:
        """The setting as ``solve --baseline`` takes it."""
        named = {
            "micro_batch": self.micro_batch,
            "prefetch": self.prefetch,
            "recompute": self.recompute,
        }
        more = [f"{name}={value}" for name, value in named.items() if value is not None]
        return ",".join(["/".join(map(str, self.shards)), *more])


def shards_of(where: str, count: int, mesh: Mesh) -> int:
    """``count`` shards, where the mesh has a level with so many; UserError else, which names ``where``."""
    if count not in mesh.shards:
        raise UserError(
            f"{where}: {count} shards, but the profile's mesh {mesh} has levels of "
            f"{', '.join(map(str, dict.fromkeys(mesh.shards)))}; profile with a --mesh that has {count}"
        )
    return count
