"""Models of clusters and devices as data: rates, each with its source.

``cost_models/clusters/*.json`` and ``cost_models/devices/*.json``, or a user's own files of the same form.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from hzplan.core.layout import Dtype
from hzplan.errors import UserError
from hzplan.formats.base import Document, PositiveInt, Strict

_PACKAGE = Path(__file__).resolve().parents[1]
FOLDERS = (_PACKAGE / "_cost_models", _PACKAGE.parent / "cost_models")
"""Places of ``cost_models``: inside an installed package, and beside it in a checkout."""


class Figure(Strict):
    """A number and its origin: a data sheet, a measurement, an assumption that a user should check, or a fit.

    A fitted one says on how many ``rows`` of ``cost_models/published/`` and, as ``low`` and ``high``, the
    interval that they leave it with 90 % confidence. An assumed one may say between which values it is.
    """

    value: Annotated[float, Field(gt=0, le=1e18, allow_inf_nan=False)]
    kind: Literal["specified", "measured", "assumed", "fitted"]
    source: str = Field(min_length=1)
    rows: PositiveInt | None = None
    low: Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)] | None = None
    high: Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _fitted(self) -> Figure:
        """A fitted figure says on what."""
        if self.kind == "fitted" and (self.rows is None or self.low is None or self.high is None):
            raise ValueError("a fitted figure needs rows, low and high")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}")
        return self


class RateFigure(Figure):
    """A rate in plain units per second (bytes or FLOPs)."""

    value: Annotated[float, Field(ge=1e6, le=1e18, allow_inf_nan=False)]


class ShareFigure(Figure):
    """A share of a peak rate."""

    value: Annotated[float, Field(gt=0, le=1)]


class CountFigure(Figure):
    """A number of things."""

    value: Annotated[int, Field(ge=1, le=1024)]


class RatioFigure(Figure):
    """A quantity over another that is about as large."""

    value: Annotated[float, Field(gt=0, le=4)]


class LossFigure(Figure):
    """A share that may be nothing."""

    value: Annotated[float, Field(ge=0, le=1)]


class LengthFigure(Figure):
    """A number of elements that may be nothing."""

    value: Annotated[float, Field(ge=0, le=1e5)]


class TimeFigure(Figure):
    """A time in seconds."""

    value: Annotated[float, Field(gt=0, le=1)]


class AttentionModel(Strict):
    """A generation of fused attention kernels on a device.

    ``share``: of the peak, with heads of 128 elements or more and many keys; ``narrow_share``: what is left
    of it where heads are half as wide; ``ramp``: keys that begin and end of a query's loop are worth.
    """

    share: ShareFigure
    narrow_share: RatioFigure
    ramp: LengthFigure


class DeviceModel(Document):
    """One accelerator.

    ``flops_per_s``: peak of dense matrix products by dtype, of which ``product_share`` is reached by large
    ones; ``product_ramp``: elements of the inner dimension that a tile's begin and end are worth;
    ``misaligned_share``: what is left where rows do not begin at 16 bytes. ``bytes_per_s``: of its memory, of
    which ``bytes_share`` is reached. ``launch_s``: of the host, for each kernel; ``kernel_s``: of the device,
    for a kernel's begin and end. ``attention``: its kernels by generation, the usual one first.
    ``host_bytes_per_s``: of the link to the host's memory, each way, of which ``host_share`` is reached;
    ``sms``: its streaming multiprocessors. ``short``: its name in names of clusters; ``link``: the file in
    ``cost_models/networks/`` of the links between devices of a node, or of a rack that is one domain. None
    where that is not known.
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
    short: str | None = Field(default=None, pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    link: str | None = None
    product_ramp: LengthFigure | None = None
    misaligned_share: ShareFigure | None = None
    kernel_s: TimeFigure | None = None
    attention: dict[str, AttentionModel] = Field(default_factory=dict)


class PatModel(Strict):
    """NCCL's PAT (parallel aggregated trees, arXiv 2506.20252) for groups with one rank on each node.

    ``latency_s``: of each of ⌈log₂ n⌉ rounds; ``rank_s``: what each of n ranks adds; ``bytes_share``: its
    rate over the ring's.
    """

    latency_s: TimeFigure
    rank_s: TimeFigure
    bytes_share: ShareFigure


class LinkModel(Strict):
    """What links reach of their rate, and what they cost.

    ``bytes_share``: how much of the rate large messages reach; ``latency_s``: of a ring's hop. ``pat``: None
    where the library has rings only. ``ctas``: thread blocks of a collective's kernel, each of which keeps
    compute from one SM; None where that is not known. ``congestion``: share of the rate that is lost each
    time the number of groups doubles; ``lateness``: how much longer than the mean the slowest of all ranks
    computes, for each doubling of groups. None: nothing.
    """

    bytes_share: ShareFigure
    latency_s: TimeFigure
    pat: PatModel | None = None
    ctas: CountFigure | None = None
    congestion: LossFigure | None = None
    lateness: LossFigure | None = None


class TierModel(LinkModel):
    """The links of a tier, fastest tier first.

    ``ranks``: how many groups of the tier inside it meets; of the outermost tier the number that is taken
    when the user does not say. ``bytes_per_s``: what each rank sends while all do, in each direction.
    """

    name: str = Field(min_length=1)
    ranks: PositiveInt
    bytes_per_s: RateFigure


class NetworkModel(Document, LinkModel):
    """A kind of link, without the number of ranks that it joins. ``tier``: the name of its tier;
    ``bytes_per_s``: None where clusters' names say it; ``most``: ranks that it can join, None: any number."""

    format: Literal["hzplan.network"] = "hzplan.network"
    version: Literal[1] = 1
    name: str
    about: str
    tier: str
    bytes_per_s: RateFigure | None = None
    most: PositiveInt | None = None

    def joining(self, ranks: int, bytes_per_s: RateFigure | None = None) -> TierModel:
        """The tier of a cluster in which such links join ``ranks`` groups."""
        rate = bytes_per_s or self.bytes_per_s
        if rate is None:
            raise UserError(f"network {self.name}: its rate is not known; the cluster's name must say it")
        if self.most is not None and ranks > self.most:
            raise UserError(f"network {self.name} joins at most {self.most} devices, not {ranks}")
        reached = {name: getattr(self, name) for name in LinkModel.model_fields}
        return TierModel(name=self.tier, ranks=ranks, bytes_per_s=rate, **reached)


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
    return _stems("clusters")


COMPOSED = re.compile(
    r"(?P<device>[a-z0-9-]+)-(?P<ranks>[1-9]\d*)x(?P<gbit>[1-9]\d*)g(-(?P<network>[a-z]+))?"
)
"""Names of clusters that are composed: device, devices a node, Gbit/s of each one's NIC, network."""
USUAL_NODES = 8
"""Nodes of a composed cluster when the user does not say."""
USUAL_NETWORK = "infiniband"


def find_cluster(name: str) -> tuple[ClusterModel, DeviceModel]:
    """A cluster that comes with hzplan, by name, one composed by its name, or one in a file; and its device.

    ``h100-8x400g-roce``: nodes of 8 H100, for each a NIC of 400 Gbit/s on RoCE; InfiniBand where no network
    is named. A device that does not come with hzplan is a file beside the cluster's. UserError when there is
    none.
    """
    path = _shipped("clusters", name) or Path(name)
    if path.suffix == ".json" and path.exists():
        cluster = ClusterModel.load(path)
        return cluster, near_device(cluster.device, path)
    named = COMPOSED.fullmatch(name)
    if named is None:
        raise UserError(
            f"--cluster {name}: not known; use {', '.join(known_clusters())}, a file's path, or a name like "
            "h100-8x400g-roce, of a device, devices a node, Gbit/s of each one's NIC, and a network"
        )
    stem = _device_file(name, named["device"])
    device_model = load_device(stem)
    kind = named["network"] or USUAL_NETWORK
    if kind not in (networks := _stems("networks")):
        raise UserError(f"--cluster {name}: no network {kind}; networks: {', '.join(networks)}")
    network = load_network(kind)
    if network.tier == "node":
        raise UserError(f"--cluster {name}: {kind} joins the devices of one node, not nodes")
    if len(named["gbit"]) > 6 or len(named["ranks"]) > 4:
        raise UserError(f"--cluster {name}: at most 9999 devices a node, and 999999 Gbit/s each")
    return composed(name, stem, device_model, network, int(named["ranks"]), int(named["gbit"])), device_model


def near_device(stem: str, path: Path) -> DeviceModel:
    """The device that a cluster's file names: one that comes with hzplan, or a file beside it."""
    device = _shipped("devices", stem) or path.parent / f"{stem}.json"
    if not device.exists():
        raise UserError(f"{path}: field device: no {stem}.json beside it, and none that is shipped")
    model = DeviceModel.load(device)
    if not _is_shipped(device) and (same := _named(model.name)) is not None:
        raise UserError(
            f"{device}: field name: {model.name} is the device {same} that comes with hzplan; give yours "
            "another name, since published errors are of that one"
        )
    return model


def composed(
    name: str, stem: str, device: DeviceModel, network: NetworkModel, ranks: int, gbit: int
) -> ClusterModel:
    """Nodes of ``ranks`` devices, each with a NIC of ``gbit`` Gbit/s."""
    if device.link is None:
        raise UserError(f"--cluster {name}: {device.name} has no field link, so its nodes are not known")
    rate = RateFigure(value=gbit * 1e9 / 8, kind="specified", source=f"{gbit} Gbit/s, as the name says")
    about = f"{ranks} {device.name} a node, a {gbit} Gbit/s NIC for each, {network.about}"
    tiers = (load_network(device.link).joining(ranks), network.joining(USUAL_NODES, rate))
    return ClusterModel(name=name, about=about, device=stem, backend="nccl", tiers=tiers)


def load_device(stem: str) -> DeviceModel:
    """A device that comes with hzplan, by its file's name."""
    return DeviceModel.load(_existing("devices", stem, known_devices()))


def load_network(stem: str) -> NetworkModel:
    """A network that comes with hzplan, by its file's name."""
    return NetworkModel.load(_existing("networks", stem, _stems("networks")))


def known_devices() -> list[str]:
    """The names of the files of devices that come with hzplan."""
    return _stems("devices")


def _device_file(name: str, short: str) -> str:
    known = {load_device(stem).short: stem for stem in known_devices()}
    if short not in known:
        listed = ", ".join(sorted(one for one in known if one))
        raise UserError(f"--cluster {name}: no device {short}; devices: {listed}")
    return known[short]


def _is_shipped(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in FOLDERS)


def _named(name: str) -> str | None:
    """The file's name of the shipped device of a name; None where none has it."""
    return next((stem for stem in known_devices() if load_device(stem).name == name), None)


def _stems(kind: str) -> list[str]:
    return sorted({path.stem for folder in FOLDERS for path in (folder / kind).glob("*.json")})


def _existing(kind: str, stem: str, known: list[str]) -> Path:
    path = _shipped(kind, stem)
    if path is None:
        raise UserError(f"{kind[:-1]} {stem} is not known; use {', '.join(known)}")
    return path


def _shipped(kind: str, name: str) -> Path | None:
    if Path(name).name != name:
        return None
    paths = (folder / kind / f"{name}.json" for folder in FOLDERS)
    return next((path for path in paths if path.exists()), None)
