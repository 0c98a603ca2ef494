"""Models of clusters and devices as data: rates, each with its source.

``cost_models/clusters/*.json`` and ``cost_models/devices/*.json``, or a user's own files of the same form.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hzplan.core.layout import Dtype
from hzplan.errors import UserError
from hzplan.formats.base import Document, PositiveInt, Strict

_PACKAGE = Path(__file__).resolve().parents[1]
FOLDERS = (_PACKAGE / "_cost_models", _PACKAGE.parent / "cost_models")
"""Places of ``cost_models``: inside an installed package, and beside it in a checkout."""


class Figure(Strict):
    """A number and its origin: a data sheet, a measurement, or an assumption that a user should check."""

    value: Annotated[float, Field(gt=0, le=1e18, allow_inf_nan=False)]
    kind: Literal["specified", "measured", "assumed"]
    source: str = Field(min_length=1)


class RateFigure(Figure):
    """A rate in plain units per second (bytes or FLOPs)."""

    value: Annotated[float, Field(ge=1e6, le=1e18, allow_inf_nan=False)]


class ShareFigure(Figure):
    """A share of a peak rate."""

    value: Annotated[float, Field(gt=0, le=1)]


class CountFigure(Figure):
    """A number of things."""

    value: Annotated[int, Field(ge=1, le=1024)]


class TimeFigure(Figure):
    """A time in seconds."""

    value: Annotated[float, Field(gt=0, le=1)]


class DeviceModel(Document):
    """One accelerator.

    ``flops_per_s``: peak of dense matrix products by dtype, of which ``product_share`` is reached;
    ``bytes_per_s``: of its memory, of which ``bytes_share`` is reached; ``launch_s``: the least that an
    operation takes. ``host_bytes_per_s``: of the link to the host's memory, each way, of which
    ``host_share`` is reached; ``sms``: its streaming multiprocessors. None where that is not known.
    """

    format: Literal["hzplan.device"] = "hzplan.device"
    version: Literal[1] = 1
    name: str
    memory_bytes: Figure
    flops_per_s: dict[Dtype, RateFigure]
    product_share: ShareFigure
    bytes_per_s: RateFigure
    bytes_share: ShareFigure
    launch_s: TimeFigure
    host_bytes_per_s: RateFigure | None = None
    host_share: ShareFigure | None = None
    sms: CountFigure | None = None


class PatModel(Strict):
    """NCCL's PAT (parallel aggregated trees, arXiv 2506.20252) for groups with one rank on each node.

    ``latency_s``: of each of ⌈log₂ n⌉ rounds; ``rank_s``: what each of n ranks adds; ``bytes_share``: its
    rate over the ring's.
    """

    latency_s: TimeFigure
    rank_s: TimeFigure
    bytes_share: ShareFigure


class TierModel(Strict):
    """The links of a tier, fastest tier first.

    ``ranks``: how many groups of the tier inside it meets; of the outermost tier the number that is taken
    when the user does not say. ``bytes_per_s``: what each rank sends while all do, in each direction;
    ``bytes_share``: how much of that large messages reach; ``latency_s``: of a ring's hop. ``pat``: None
    where the library has rings only. ``ctas``: thread blocks of a collective's kernel, each of which keeps
    compute from one SM; None where that is not known.
    """

    name: str = Field(min_length=1)
    ranks: PositiveInt
    bytes_per_s: RateFigure
    bytes_share: ShareFigure
    latency_s: TimeFigure
    pat: PatModel | None = None
    ctas: CountFigure | None = None


class ClusterModel(Document):
    """A cluster: one kind of device, and tiers of links."""

    format: Literal["hzplan.cluster"] = "hzplan.cluster"
    version: Literal[1] = 1
    name: str
    about: str
    device: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    backend: str
    tiers: tuple[TierModel, ...] = Field(min_length=1, max_length=4)


def known_clusters() -> list[str]:
    """The names of the clusters that come with hzplan."""
    return sorted(path.stem for folder in FOLDERS for path in (folder / "clusters").glob("*.json"))


def find_cluster(name: str) -> tuple[ClusterModel, DeviceModel]:
    """A cluster that comes with hzplan, by name, or the one in a file; and its device, likewise.

    A device that does not come with hzplan is a file beside the cluster's. UserError when there is none.
    """
    path = _shipped("clusters", name) or Path(name)
    if not path.suffix == ".json" or not path.exists():
        raise UserError(f"--cluster {name}: not known; use {', '.join(known_clusters())}, or a file's path")
    cluster = ClusterModel.load(path)
    device = _shipped("devices", cluster.device) or path.parent / f"{cluster.device}.json"
    if not device.exists():
        raise UserError(f"{path}: field device: no {cluster.device}.json beside it, and none that is shipped")
    return cluster, DeviceModel.load(device)


def _shipped(kind: str, name: str) -> Path | None:
    if Path(name).name != name:
        return None
    paths = (folder / kind / f"{name}.json" for folder in FOLDERS)
    return next((path for path in paths if path.exists()), None)
