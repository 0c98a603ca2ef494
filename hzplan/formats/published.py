"""Published measurements, ``cost_models/published/*.jsonl``: training results and microbenchmarks.

One JSON object a line. What a source does not say is null and stays so. Lines that are no row, and rows that
contradict themselves, are named in one line each; a row that merely contradicts itself is kept and marked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import ConfigDict, Field, ValidationError

from hzplan.errors import UserError
from hzplan.formats.base import Strict
from hzplan.formats.cluster import FOLDERS, load_device

Size = Annotated[int, Field(ge=1, le=2**40)] | None
Positive = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)] | None
Share = Annotated[float, Field(gt=0, le=1)] | None

HALF = ("bf16", "fp16")
"""Dtypes of 16 bits, as rows name them; all devices compute as fast in one as in the other."""
MOST_APART = 0.06
"""Relative difference between two statements of one quantity that rounding may explain."""
UNITS = {
    "busbw": ("GB/s busbw", "GB/s algbw", "GB/s", "GB/s (Galvatron allreduce bandwidth)", "ms", "us"),
    "matmul": ("TFLOP/s", "ms"),
    "attention": ("TFLOP/s", "ms"),
    "hbm": ("GB/s",),
    "overlap": ("factor", "% of summed kernel time in NCCL", "% gap of step"),
}
"""Units that a microbenchmark's value may have, by its kind."""


class Row(Strict):
    """What both kinds of rows say."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    id: str = Field(min_length=1)
    source: str = Field(min_length=1)
    device: str = Field(min_length=1)
    notes: str | None = None

    @property
    def family(self) -> str:
        """The source without its file and version: rows of one family come from the same authors."""
        return re.split(r"[\s@:]", self.source.strip())[0].rstrip(",;")

    @property
    def device_name(self) -> str | None:
        """The file in ``cost_models/devices/`` that a device is; None where there is none."""
        return device_name(self.device)


class TrainingRow(Row):
    """A published training result. Sizes in elements, sequences and tokens; ``memory_gib`` of one device."""

    model: str
    kind: str
    arch: str
    layers: Size
    hidden: Size
    heads: Size
    kv_heads: Size
    ffn: Size
    vocab: Size
    seq_len: Size
    micro_batch: Annotated[int, Field(ge=1, le=2**20)] | None
    accumulation: Size
    global_batch: Size
    global_batch_tokens: Size
    dtype: str
    recompute: str
    sharding: str | None
    devices: Size
    devices_per_node: Size
    network_gbps_per_node: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None
    tokens_per_s_per_device: Positive
    mfu: Share
    tflops: Positive
    memory_gib: Positive
    step_s: Positive
    compile: bool | str | None
    flash_attention: bool | str | None
    tp: Size
    pp: Size
    cp: Size
    ep: Size

    @property
    def degrees(self) -> tuple[int, int, int, int]:
        """Ranks of tensor, pipeline, context and expert parallelism; 1 where not said."""
        return self.tp or 1, self.pp or 1, self.cp or 1, self.ep or 1

    def contradictions(self) -> Iterator[str]:
        """Statements of the row that cannot all be true, each with the fields' names."""
        tokens = self.global_batch_tokens
        if (
            self.global_batch
            and self.seq_len
            and tokens
            and not _near(tokens, self.global_batch * self.seq_len)
        ):
            yield (
                f"global_batch_tokens {tokens} is not global_batch {self.global_batch} × seq_len "
                f"{self.seq_len}"
            )
        held = tokens or (self.global_batch or 0) * (self.seq_len or 0)
        if self.step_s and self.tokens_per_s_per_device and held and self.devices:
            said = held / self.step_s / self.devices
            if not _near(said, self.tokens_per_s_per_device, 3 * MOST_APART):
                yield (
                    f"tokens_per_s_per_device {self.tokens_per_s_per_device:g}, but step_s {self.step_s:g} "
                    f"gives {said:.0f}"
                )
        tensor, pipeline, context, _ = self.degrees
        ways = tensor * pipeline * context
        if self.devices and self.devices % ways:
            yield f"devices {self.devices} are no multiple of tp × pp × cp = {ways}"
        elif self.devices and self.micro_batch and self.accumulation and self.global_batch:
            held = self.micro_batch * self.accumulation * (self.devices // ways)
            if held != self.global_batch:
                yield (
                    f"global_batch {self.global_batch} is not micro_batch {self.micro_batch} × accumulation "
                    f"{self.accumulation} × {self.devices // ways} ranks"
                )
        yield from self._beyond_device()
        yield from self._beyond_model()
        if self.hidden and self.heads and self.kv_heads and self.heads % self.kv_heads:
            yield f"heads {self.heads} are no multiple of kv_heads {self.kv_heads}"

    def _beyond_device(self) -> Iterator[str]:
        """Statements that the device's data sheet rules out."""
        if self.device_name is None:
            return
        device = load_device(self.device_name)
        peak = max(rate.value for rate in device.flops_per_s.values()) / 1e12
        if self.dtype in HALF and self.tflops and self.tflops > peak:
            yield f"tflops {self.tflops:g} is above the {peak:g} that {self.device_name} reaches at most"
        if self.dtype in HALF and self.tflops and self.mfu:
            by_share = self.mfu * device.flops_per_s["bfloat16"].value / 1e12
            if not _near(self.tflops, by_share, 3 * MOST_APART):
                yield f"tflops {self.tflops:g}, but mfu {self.mfu:g} of {self.device_name} is {by_share:.0f}"
        card = device.memory_bytes.value / 2**30
        if self.memory_gib and self.memory_gib > card * (1 + MOST_APART):
            yield f"memory_gib {self.memory_gib:g} is above the {card:.0f} GiB of {self.device_name}"

    def _beyond_model(self) -> Iterator[str]:
        """A rate of FLOPs and one of tokens that no way of counting FLOPs (the rows' README) joins."""
        rate, sizes = self._flops_per_s(), (self.layers, self.hidden, self.ffn, self.vocab, self.seq_len)
        if self.kind != "dense" or rate is None or not self.tokens_per_s_per_device or None in sizes:
            return
        layers, hidden, ffn, vocab, seq_len = (int(size or 0) for size in sizes)
        kept = (self.kv_heads or self.heads or 1) / (self.heads or 1)
        least = 6 * layers * (2 * hidden**2 * (1 + kept) + 2 * hidden * ffn)
        # Heads may be wider than their share of the hidden dimension, which rows do not say: up to twice.
        attention = 12 * layers * hidden * seq_len + 6 * layers * 2 * hidden**2 * (1 + kept)
        whole = least + 6 * (layers * hidden * ffn + 2 * vocab * hidden) + 2 * attention
        said = rate / self.tokens_per_s_per_device
        if not (1 - 3 * MOST_APART) * least <= said <= (1 + 3 * MOST_APART) * 4 / 3 * whole:
            yield (
                f"tokens_per_s_per_device {self.tokens_per_s_per_device:g} and tflops or mfu give {said:.3g} "
                f"FLOPs a token; the model has {least:.3g} to {4 / 3 * whole:.3g}"
            )

    def _flops_per_s(self) -> float | None:
        """Per device, as published or by the share of the data sheet's peak."""
        if self.tflops:
            return self.tflops * 1e12
        if self.mfu and self.device_name and self.dtype in HALF:
            return self.mfu * load_device(self.device_name).flops_per_s["bfloat16"].value
        return None


class MicroRow(Row):
    """One published microbenchmark: a collective, a matrix product, an attention kernel, or memory."""

    kind: str
    ranks: Size
    ranks_per_node: Size
    network: str | None
    op: str
    bytes: Annotated[int, Field(ge=0, le=2**50)] | None
    shape: str | None
    value: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    unit: str = Field(min_length=1)

    def contradictions(self) -> Iterator[str]:
        """Statements of the row that cannot be true."""
        if self.unit not in UNITS.get(self.kind, (self.unit,)):
            yield f"unit {self.unit!r} is not one of {self.kind}: {', '.join(UNITS[self.kind])}"
        if self.ranks and self.ranks_per_node and self.ranks < self.ranks_per_node and self.kind == "matmul":
            yield f"ranks {self.ranks} are fewer than ranks_per_node {self.ranks_per_node}"


AnyRow = TypeVar("AnyRow", TrainingRow, MicroRow)


@dataclass(frozen=True)
class Rows(Generic[AnyRow]):
    """The rows of a file, and a line for everything in it that cannot be right. ``marked``: ids of rows that
    are kept although they contradict themselves."""

    rows: tuple[AnyRow, ...]
    problems: tuple[str, ...]
    marked: frozenset[str]


def read_rows(path: Path, kind: type[AnyRow]) -> Rows[AnyRow]:
    """Read a file of rows strictly; UserError only where it cannot be read at all."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    rows: list[AnyRow] = []
    problems: list[str] = []
    marked: set[str] = set()
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path.name}:{number}"
        try:
            data = json.loads(line)
            row = kind.model_validate_json(line, strict=True)
        except json.JSONDecodeError as error:
            problems.append(f"{where}: not JSON ({error.msg})")
            continue
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"][:1])) or "(the whole line)"
            value = first.get("input")
            given = "" if first["type"] == "missing" else f", not {value!r:.40}"
            message = " ".join(first["msg"].split())
            problems.append(f"{where}: {_id(data)}: field {field}: {message}{given}; the row is left out")
            continue
        if row.id in seen:
            problems.append(f"{where}: {row.id}: the id appears twice; the row is left out")
            continue
        seen.add(row.id)
        rows.append(row)
        for found in row.contradictions():
            problems.append(f"{where}: {row.id}: {found}; the row is kept and marked")
            marked.add(row.id)
    return Rows(tuple(rows), tuple(problems), frozenset(marked))


def shipped_rows() -> Path:
    """The folder of the rows that come with hzplan."""
    return next(path for folder in FOLDERS if (path := folder / "published").is_dir())


def device_name(text: str) -> str | None:
    """A device as sources spell it, as the name of its file; None for those without one.

    What is in brackets only decides where nothing else does, as in "B200 (table says H200)".
    """
    text = re.sub(r"_|(?<=\d)x(?=[A-Z])", " ", text)
    if re.search(r"PCI-?e|H[128]00\b.{0,8}\bNVL\b", text, re.IGNORECASE):
        return None  # cards that no NVSwitch joins
    outside = re.sub(r"\(.*?\)", " ", text)
    for said in (outside, text):
        for pattern, name in DEVICES:
            if re.search(pattern, said, re.IGNORECASE):
                found = name
                if name == "a100-sxm-80g" and re.search(r"\b40 ?Gi?B?\b", text, re.IGNORECASE):
                    found = "a100-sxm-40g"
                if name == "h100-sxm" and re.search(r"\b9[46] ?GB", text, re.IGNORECASE):
                    found = "h100-hbm2e-96g"
                return found
    return None


DEVICES = (
    (r"GB300", "gb300-nvl72"),
    (r"GB200", "gb200-nvl72"),
    (r"\bB300", "b300-sxm"),
    (r"\bB200", "b200-sxm"),
    (r"GH200", None),
    (r"\bH200", "h200-sxm"),
    (r"\bH[18]00\W+H[18]00", None),
    (r"\bH800", "h800-sxm"),
    (r"\bH100", "h100-sxm"),
    (r"\bA800", "a800-sxm-80g"),
    (r"\bA100", "a100-sxm-80g"),
    (r"MI300X?\b", "mi300x"),
    (r"MI325X?\b", "mi325x"),
)
"""Patterns of a device's name, the more particular first, and its file; None: none yet, or not said which."""


def _near(one: float, other: float, apart: float = MOST_APART) -> bool:
    return isclose(one, other, rel_tol=apart)


def _id(data: Any) -> str:
    return str(data.get("id", "(no id)"))[:60] if isinstance(data, dict) else "(no object)"
