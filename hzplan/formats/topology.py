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
from hzplan.formats.cluster import ClusterModel, DeviceModel, RateFigure, load_network, near_device

FORMAT = "hzplan.topology"
MOST_ENDS = 1 << 16
"""Upper limit of what one name with ranges stands for."""
MOST_LINKS = 1 << 18
NAMES = ("leaf", "spine", "core")
"""Names of tiers between nodes, where there are several."""
RANGES = re.compile(r"\[([^\[\]]*)\]")
Rate = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


class LinkEntry(Strict):
    """Links from every one of ``ends`` to every one of ``to``: ``count`` of ``gbit`` Gbit/s, each way.

    ``n[1-16]:0`` are the interfaces of rail 0 of sixteen hosts, ``leaf[1,3]`` two switches.
    """

    ends: str = Field(min_length=1, max_length=200)
    to: str = Field(min_length=1, max_length=200)
    gbit: Rate
    count: PositiveInt = 1


class TopologyModel(Document):
    """``device``, ``network``: names of files in ``cost_models/``; ``devices``: of a host, by default as many
    as it has interfaces."""

    format: Literal["hzplan.topology"] = "hzplan.topology"
    version: Literal[1] = 1
    name: str = Field(min_length=1)
    device: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    network: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    devices: PositiveInt | None = None
    links: tuple[LinkEntry, ...] = Field(min_length=1)

    def fabric(self) -> nx.Graph:
        """The graph, rates in bytes per second; UserError where a name cannot be read."""
        graph, links = nx.Graph(), 0
        for number, link in enumerate(self.links):
            where = f"links.{number}"
            for one, other in itertools.product(
                [*_expanded(link.ends, f"{where}.ends")], [*_expanded(link.to, f"{where}.to")]
            ):
                ends = _node(one), _node(other)
                if ends[0] == ends[1]:
                    raise UserError(f"field {where}: {one} is linked to itself")
                before = graph.edges[ends]["rate"] if graph.has_edge(*ends) else 0.0
                graph.add_edge(*ends, rate=before + link.count * link.gbit * 1e9 / 8)
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
    found, network = meetings(fabric), load_network(described.network)
    if len(found) > len(NAMES):
        raise UserError(f"field links: {len(found)} tiers of switches; at most {len(NAMES)} are planned")
    if network.tier == "node":
        raise UserError(f"field network: {described.network} joins the devices of one node, not nodes")
    names = NAMES if len(found) > 1 else (network.tier,)
    tiers = []
    if each > 1:
        if device.link is None:
            raise UserError(f"field device: {device.name} has no field link, so its nodes are not known")
        tiers.append(load_network(device.link).joining(each))
    for name, meeting in zip(names, found, strict=False):
        rate = RateFigure(
            value=meeting.host_rate / each,
            kind="specified",
            source=f"{described.name}: the least cut of its links",
        )
        tiers.append(network.joining(meeting.groups, rate).model_copy(update={"name": name}))
    about = f"{hosts} hosts of {each} {device.name}, {network.about}: {_shape(names, found)}"
    return ClusterModel(
        name=described.name, about=about, device=described.device, backend="nccl", tiers=tuple(tiers)
    )


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
    yield from map("".join, itertools.product(*choices))


def _numbers(ranges: str, text: str, where: str) -> Iterator[str]:
    for part in ranges.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and 0 <= int(last) - int(first) < MOST_ENDS):
            raise UserError(f"field {where}: {text!r}: {part.strip()!r} is no range, as 1-16")
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
