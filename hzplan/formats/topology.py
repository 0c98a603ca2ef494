"""A cluster as the graph of its links, a user's file: who is plugged into which switch, and how fast.

Tiers, rails and oversubscription follow from it (``core.topology``).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import networkx as nx
from pydantic import Field

from hzplan.core.topology import Meeting, Uneven, meetings
from hzplan.errors import UserError
from hzplan.formats.base import Document, PositiveInt, Strict, read_json
from hzplan.formats.cluster import (
    ClusterModel,
    DeviceModel,
    NetworkModel,
    RateFigure,
    load_network,
    near_device,
)

FORMAT = "hzplan.topology"
MOST_ENDS = 1 << 16
"""Upper limit of what one name with ranges stands for."""
MOST_LINKS = 1 << 18
NAMES = ("leaf", "spine", "core")
"""Names of tiers between nodes, where there are several."""
RANGES = re.compile(r"\[([^\[\]]*)\]")
Rate = Annotated[float, Field(ge=0.01, le=1e5, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=4096)]
FILE_NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$"
END = re.compile(r"[^\s:,\[\]]+(:[^\s:,\[\]]+)?")
"""A switch, or an interface: its host and its rail."""
LEAST_RATE = 1e6
"""Least bytes per second of a tier, as of every rate in a cluster's file."""


class LinkEntry(Strict):
    """Links from every one of ``ends`` up to every one of the switches ``to``: ``count`` of ``gbit`` Gbit/s,
    each way.

    ``n[1-16]:0`` are the interfaces of rail 0 of sixteen hosts, ``leaf[1,3]`` two switches.
    """

    ends: str = Field(min_length=1, max_length=200)
    to: str = Field(min_length=1, max_length=200)
    gbit: Rate
    count: Count = 1


class TopologyModel(Document):
    """``device``, ``network``: names of files in ``cost_models/``; ``devices``: of a host, by default as many
    as it has interfaces."""

    format: Literal["hzplan.topology"] = "hzplan.topology"
    version: Literal[1] = 1
    name: str = Field(pattern=r"^[^\x00-\x1f\x7f]{1,100}$")
    device: str = Field(pattern=FILE_NAME)
    network: str = Field(pattern=FILE_NAME)
    devices: PositiveInt | None = None
    links: tuple[LinkEntry, ...] = Field(min_length=1)

    def fabric(self) -> nx.Graph:
        """The graph, rates in bytes per second; UserError where a name cannot be read."""
        graph, links = nx.Graph(), 0
        for number, link in enumerate(self.links):
            where = f"links.{number}"
            ends, to = [*_expanded(link.ends, f"{where}.ends")], [*_expanded(link.to, f"{where}.to")]
            if (interface := next((one for one in to if ":" in one), None)) is not None:
                raise UserError(f"field {where}.to: {interface} is an interface; links go up to switches")
            for one, other in itertools.product(map(_node, ends), to):
                if one == other:
                    raise UserError(f"field {where}: {other} is linked to itself")
                if graph.has_edge(one, other):
                    said = ":".join(one) if isinstance(one, tuple) else one
                    raise UserError(
                        f"field {where}: {said} to {other} is said twice; field count says how many"
                    )
                graph.add_edge(one, other, rate=link.count * link.gbit * 1e9 / 8)
                if (links := links + 1) > MOST_LINKS:
                    raise UserError(f"field {where}: more than {MOST_LINKS} links in all")
        if not any(isinstance(node, tuple) for node in graph):
            raise UserError("field links: no end is an interface of a host, as n1:0")
        return graph


def load_topology(path: Path) -> tuple[ClusterModel, DeviceModel]:
    """The cluster that a file describes, and its device; UserError names the file and the field."""
    described = TopologyModel.load(path)
    device = near_device(described.device, path)
    try:
        return _cluster(described, device), device
    except (UserError, Uneven) as error:
        raise UserError(f"{path}: {error}") from None


def is_topology(name: str) -> bool:
    """Whether a name is that of a file of this format."""
    path = Path(name)
    if path.suffix != ".json" or not path.is_file():
        return False
    data = read_json(path)
    return isinstance(data, dict) and data.get("format") == FORMAT


def _cluster(described: TopologyModel, device: DeviceModel) -> ClusterModel:
    fabric = described.fabric()
    interfaces = sum(isinstance(node, tuple) for node in fabric)
    hosts = len({node[0] for node in fabric if isinstance(node, tuple)})
    each = described.devices or interfaces // hosts
    found, network = meetings(fabric), _network(described.network)
    if len(found) > len(NAMES):
        raise UserError(f"field links: {len(found)} tiers of switches; at most {len(NAMES)} are planned")
    if network.tier == "node":
        raise UserError(f"field network: {described.network} joins the devices of one node, not nodes")
    if not found and each == 1:
        raise UserError("field links: one host of one device has nobody to talk to")
    names = NAMES if len(found) > 1 else (network.tier,)
    tiers = []
    if each > 1:
        if device.link is None:
            raise UserError(f"field device: {device.name} has no field link, so its nodes are not known")
        tiers.append(load_network(device.link).joining(each))
    for name, meeting in zip(names, found, strict=False):
        if meeting.host_rate / each < LEAST_RATE:
            raise UserError(
                f"field links: a device sends {meeting.host_rate / each:.3g} bytes/s over the {name}"
            )
        rate = RateFigure(
            value=meeting.host_rate / each,
            kind="specified",
            source=f"{described.name}: the least cut of its links",
        )
        tiers.append(network.joining(meeting.groups, rate).model_copy(update={"name": name}))
    about = (
        f"{hosts} host{'s' * (hosts > 1)} of {each} {device.name}, {network.about}: {_shape(names, found)}"
    )
    return ClusterModel(
        name=described.name, about=about, device=described.device, backend="nccl", tiers=tuple(tiers)
    )


def _network(stem: str) -> NetworkModel:
    try:
        return load_network(stem)
    except UserError as error:
        raise UserError(f"field network: {error}") from None


def _shape(names: tuple[str, ...], found: tuple[Meeting, ...]) -> str:
    """Tiers for people, with what is oversubscribed."""
    parts = []
    for name, meeting, before in zip(names, found, (None, *found), strict=False):
        over = before.host_rate / meeting.host_rate if before else 1.0
        said = f", {over:.3g}:1 oversubscribed" if over > 1.001 else ""
        parts.append(f"{meeting.groups} at a {name}{' by rails' if meeting.rails else ''}{said}")
    return "; ".join(parts) or "one host"


def _node(name: str) -> str | tuple[str, str]:
    host, colon, rail = name.partition(":")
    return (host, rail) if colon else name


def _expanded(text: str, where: str) -> Iterator[str]:
    """``n[1-3]:0`` as n1:0, n2:0, n3:0; ranges keep leading zeros, as Slurm's host lists do."""
    pieces = RANGES.split(text)
    if any(character in piece for piece in pieces for character in "[]"):
        raise UserError(f"field {where}: {text!r} has a bracket without its other one")
    choices = [
        [*_numbers(piece, text, where)] if place % 2 else [piece] for place, piece in enumerate(pieces)
    ]
    total = 1
    for choice in choices:
        total *= len(choice)
    if total > MOST_ENDS:
        raise UserError(f"field {where}: {text!r} is more than {MOST_ENDS} names")
    for end in map("".join, itertools.product(*choices)):
        if END.fullmatch(end) is None:
            raise UserError(f"field {where}: {end!r} is neither a switch nor an interface, as n1:0")
        yield end


def _numbers(ranges: str, text: str, where: str) -> Iterator[str]:
    for part in ranges.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and 0 <= int(last) - int(first) < MOST_ENDS):
            raise UserError(f"field {where}: {text!r}: {part.strip()!r} is no range, as 1-16")
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
