"""The figures of ``cost_models/`` that are fitted, and devices and clusters with other values of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from benchmarks.published.settings import Setting
from hzplan.formats.cluster import (
    ClusterModel,
    DeviceModel,
    NetworkModel,
    composed,
    load_device,
    load_network,
)

Values = Mapping[str, float]
"""Values of figures by path, as in ``a100.product_share`` or ``roce.latency_s``; others are as shipped."""

CHIPS = {
    "a100": ("a100-sxm-80g", "a100-sxm-40g", "a800-sxm-80g"),
    "h100": ("h100-sxm", "h800-sxm", "h200-sxm"),
    "b200": ("b200-sxm", "b300-sxm"),
    "gb200": ("gb200-nvl72", "gb300-nvl72"),
    "mi300x": ("mi300x",),
    "mi325x": ("mi325x",),
    "h100-hbm2e": ("h100-hbm2e-96g",),
}
"""Devices that share a chip, and so its fitted figures."""
PARENTS = {"h100-hbm2e": "h100"}
"""Chips that are another one but for what is fitted of their own."""
CHIP_OF = {device: chip for chip, devices in CHIPS.items() for device in devices}


@lru_cache
def _device(stem: str) -> DeviceModel:
    return load_device(stem)


@lru_cache
def _network(stem: str) -> NetworkModel:
    return load_network(stem)


def models(setting: Setting, values: Values) -> tuple[ClusterModel, DeviceModel]:
    """The cluster and the device of a row, with these values."""
    _, ranks_gbit, name = setting.cluster.rsplit("-", 2)
    ranks, gbit = (int(part) for part in ranks_gbit.removesuffix("g").split("x"))
    key = frozenset((path, value) for path, value in values.items())
    return _models(setting.cluster, setting.device, name, ranks, gbit, key)


@lru_cache(maxsize=4096)
def _models(
    cluster: str, stem: str, network: str, ranks: int, gbit: int, values: frozenset[tuple[str, float]]
) -> tuple[ClusterModel, DeviceModel]:
    chip = CHIP_OF[stem]
    device = with_values(_device(stem), PARENTS.get(chip, chip), values)
    device = with_values(device, chip, values)
    assert device.link is not None
    link = with_values(_network(device.link), device.link, values)
    outer = with_values(_network(network), network, values)
    made = composed(cluster, stem, device, outer, ranks, gbit)
    return made.model_copy(update={"tiers": (link.joining(ranks), made.tiers[1])}), device


def with_values(model: Any, prefix: str, values: Iterable[tuple[str, float]]) -> Any:
    """A device or a network with other values of its figures."""
    for path, value in values:
        owner, _, field = path.partition(".")
        if owner == prefix:
            model = _replaced(model, field.split("."), value)
    return model


def _replaced(model: Any, fields: list[str], value: float) -> Any:
    """The model with one figure's value replaced; a way into a mapping is one of its keys."""
    name, *rest = fields
    if isinstance(model, dict):
        return model | {name: _replaced(model[name], rest, value)} if name in model else model
    if not rest:
        figure = getattr(model, name)
        return model.model_copy(update={name: figure.model_copy(update={"value": value})})
    return model.model_copy(update={name: _replaced(getattr(model, name), rest, value)})
