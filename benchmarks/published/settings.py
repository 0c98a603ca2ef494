"""What a published row says of its run, as a question to the model; what it leaves open stays open."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Literal

import torch

from benchmarks.published.loss import METRIC_PASSES, fused_loss
from hzplan.core.layout import Dtype
from hzplan.formats.cluster import load_device, load_network
from hzplan.formats.parallel import ModelParallel
from hzplan.formats.published import HALF, TrainingRow
from hzplan.models.gpt import GPT, GPTConfig
from hzplan.models.workload import Workload, next_token_loss
from hzplan.profiler.model.kernels import Kernels

Recompute = Literal["none", "full", "attention", "operations"]
Scheme = Literal["ddp", "zero1", "zero2", "zero3"]

USUAL_GBIT = {"a100": 200, "a800": 200}
"""Gbit/s of each device's NIC where the row does not say: of the maker's reference node; 400 for the rest."""
MOST_MICRO_TOKENS = 16384
"""Tokens of the largest micro-batch that is tried where the row does not say its size."""


@dataclass(frozen=True)
class Options:
    """What is usual in a source's software, where its rows do not say; with the reason.

    ``by_hand``: whether its kernels are fused without a compiler; ``devices``: what it calls by another name;
    ``copies_out``: whether gathered parameters are copied out of a buffer, as FSDP2 does;
    ``metrics``: how often the loss is computed once more for the log.
    """

    kernels: Kernels = "eager"
    by_hand: bool = False
    attention: str | None = None
    network: str = "infiniband"
    reduce: Dtype | None = None
    devices: tuple[tuple[str, str], ...] = ()
    fused_loss: bool = False
    reason: str = ""
    copies_out: bool = False
    metrics: int = 0


TRANSFORMER_ENGINE = Options(
    kernels="compiled",
    by_hand=True,
    attention="cudnn",
    fused_loss=True,
    reason="Transformer Engine's fused kernels",
)
SOFTWARE = {
    "mosaicml/llm-foundry": Options(
        attention="triton",
        fused_loss=True,
        metrics=1,
        reason="Composer runs without a compiler, with a fused loss, and computes the training loss once "
        "more as a metric (inferred: models whose vocabulary weighs most are slowest); MPT's attention was "
        "FlashAttention-1's port to Triton: at 65,536 tokens the rows leave it 85 to 165 TFLOP/s, "
        "FlashAttention-2 has 171 to 328",
    ),
    "InternLM/InternEvo": Options(
        network="roce",
        reduce="bfloat16",
        fused_loss=True,
        reason="no compiler; a fused loss; 4 NICs of 100 Gbit/s on RoCE; gradients in bf16",
    ),
    "pytorch/ao": Options(
        devices=(("h100-sxm", "h100-hbm2e-96g"),),
        reason="measured with torchtitan by authors whose H100 are the 500 W part with HBM2e (torchtitan's "
        "own tables say so of the same set-up); the rows do not state a memory size",
    ),
    "pytorch/torchtitan": Options(copies_out=True, reason="FSDP2"),
    "Dao-AILab/flash-attention": Options(
        kernels="compiled", by_hand=True, fused_loss=True, reason="fused kernels and loss, as the source says"
    ),
    "NVIDIA-NeMo/Megatron-Bridge": TRANSFORMER_ENGINE,
    "NVIDIA-NeMo/NeMo": TRANSFORMER_ENGINE,
    "NVIDIA/NeMo-Framework-Launcher": TRANSFORMER_ENGINE,
    "huggingface/nanotron": Options(
        kernels="compiled", by_hand=True, reason="fused norms and rotary positions"
    ),
    "bigscience-workshop/bigscience": Options(
        kernels="compiled", by_hand=True, fused_loss=True, reason="Megatron's fused kernels"
    ),
    "foundation-model-stack/fms-fsdp": Options(kernels="compiled", reason="its default is torch.compile"),
}
"""By family of sources."""


@dataclass(frozen=True)
class Setting:
    """One way in which a row may have run.

    ``nodes`` × ``per_node`` devices; ``inside``: whether states are sharded within a node; ``every``: of how
    many blocks one is recomputed; ``parallel``: None without model parallelism.
    """

    row: TrainingRow
    device: str
    cluster: str
    per_node: int
    nodes: int
    scheme: Scheme
    inside: bool
    micro_batch: int
    accumulation: int
    kernels: Kernels
    attention: str | None
    reduce: Dtype | None
    recompute: Recompute
    every: int = 1
    fused_loss: bool = False
    copies_out: bool = False
    metrics: int = 0
    parallel: ModelParallel | None = None

    @property
    def shape(self) -> tuple[object, ...]:
        """What a pass in shapes depends on."""
        row = self.row
        return (
            *("gpt" if row.arch == "gpt" else "llama", row.layers, row.hidden, row.heads, row.kv_heads),
            *(row.ffn, row.vocab, row.seq_len, self.micro_batch, self.fused_loss, self.metrics),
        )

    @property
    def tokens(self) -> int:
        """Of one device in a step."""
        assert self.row.seq_len is not None
        held = self.micro_batch * self.accumulation * self.row.seq_len
        return held if self.parallel is None else held // self.parallel.ranks


def settings(row: TrainingRow) -> list[Setting] | str:
    """The ways in which a row may have run, the usual one first; or why it cannot be predicted."""
    if (reason := _outside(row)) is not None:
        return reason
    assert row.devices is not None and row.device_name is not None
    usual = SOFTWARE.get(row.family, Options())
    device = dict(usual.devices).get(row.device_name, row.device_name)
    per_node = min(row.devices, row.devices_per_node or 8)
    if load_device(device).link == "nvl72":  # a rack is one domain, however many devices a tray has
        per_node = next(size for size in range(min(row.devices, 72), 0, -1) if row.devices % size == 0)
    most = load_network(load_device(device).link or "").most
    if most is not None and per_node > most:
        return f"{per_node} devices a node: their links join at most {most}"
    if row.devices % per_node:
        return f"{row.devices} devices do not fill nodes of {per_node}"
    # One device shards nothing.
    sharding = _sharding(row.sharding) if row.devices > 1 else ("ddp", False)
    if sharding is None:
        return f"sharding {row.sharding!r} is not known"
    scheme, inside = sharding
    again: tuple[Recompute, ...] = ("none", "full") if row.recompute == "unknown" else (_recompute(row),)
    tensor, pipeline, context, _ = row.degrees
    parallel = ModelParallel(tensor=tensor, pipeline=pipeline, context=context)
    if row.devices % parallel.ranks:
        return f"{row.devices} devices are no multiple of tp × pp × cp = {parallel.ranks}"
    batches = _batches(row)
    if not batches:
        return "neither a micro-batch nor a global batch is said"
    short = load_device(device).short
    gbit = USUAL_GBIT.get((short or "").partition("-")[0], 400)
    if row.network_gbps_per_node:
        gbit = max(1, round(row.network_gbps_per_node / (row.devices_per_node or 8)))
    kernels: Kernels = usual.kernels
    if row.compile is True:
        kernels = "compiled"
    elif row.compile is False and not usual.by_hand:
        kernels = "eager"
    attention = "standard" if row.flash_attention is False else usual.attention
    if attention not in load_device(device).attention:
        attention = None
    return [
        Setting(
            row=row,
            device=device,
            cluster=f"{short}-{per_node}x{gbit}g-{_network(row, usual)}",
            per_node=per_node,
            nodes=row.devices // per_node,
            scheme=scheme,
            inside=inside,
            micro_batch=micro_batch,
            accumulation=accumulation,
            kernels=kernels,
            attention=attention,
            reduce=usual.reduce,
            recompute=recompute,
            every=_every(row),
            fused_loss=usual.fused_loss,
            metrics=usual.metrics,
            copies_out=usual.copies_out or "FSDP2" in (row.sharding or ""),
            parallel=parallel if parallel.ranks > 1 else None,
        )
        for micro_batch, accumulation in batches
        for recompute in again
    ]


def workload(setting: Setting) -> Workload:
    """The model of a row, in the library's own GPT or transformers' Llama."""
    row = setting.row
    assert row.seq_len and row.vocab and row.layers and row.hidden and row.heads and row.ffn
    if row.arch == "gpt" and row.ffn % row.hidden == 0:
        config = GPTConfig(row.vocab, row.layers, row.hidden, row.heads, row.seq_len, row.ffn // row.hidden)
        build: Callable[[], torch.nn.Module] = partial(GPT, config)
        fused = partial(fused_loss, passes=setting.metrics * METRIC_PASSES)
        return _workload(row, build, loss=fused if setting.fused_loss else next_token_loss)
    from hzplan.models.hf import builder, causal_loss, not_packed

    loss = _fused_causal_loss if setting.fused_loss else causal_loss
    return _workload(row, builder(row.id, _llama(row)), loss=loss, in_shapes=not_packed)


def _fused_causal_loss(model: torch.nn.Module, batch: object) -> torch.Tensor:
    return fused_loss(partial(model, use_cache=False), batch)  # type: ignore[arg-type]


def _llama(row: TrainingRow) -> object:
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "llama",
        hidden_size=row.hidden,
        num_hidden_layers=row.layers,
        num_attention_heads=row.heads,
        num_key_value_heads=row.kv_heads or row.heads,
        intermediate_size=row.ffn,
        vocab_size=row.vocab,
        max_position_embeddings=row.seq_len,
        tie_word_embeddings=False,
    )
    config.use_cache = False
    return config


def _workload(row: TrainingRow, build: Callable[[], torch.nn.Module], **how: object) -> Workload:
    from hzplan.models.workload import _random_tokens

    assert row.vocab and row.seq_len
    return Workload(
        name=row.model,
        build=build,
        batch=partial(_random_tokens, row.vocab, row.seq_len),
        seq_len=row.seq_len,
        vocab=row.vocab,
        **how,  # type: ignore[arg-type]
    )


def counted(row: TrainingRow) -> bool:
    """Whether a row is among those that the model is held to: dense, 16 bits, recomputation stated, no
    model parallelism."""
    return (
        row.kind == "dense"
        and row.dtype in HALF
        and row.recompute != "unknown"
        and row.degrees == (1, 1, 1, 1)
    )


def apart(row: TrainingRow) -> bool:
    """Whether a row is predicted but counted apart: with model parallelism, or unstated recomputation."""
    return row.kind == "dense" and row.dtype in HALF and not counted(row)


def published_tokens_per_s(row: TrainingRow) -> float | None:
    """Tokens per second of a device, as published or from its step time; None where neither is said."""
    if row.tokens_per_s_per_device:
        return row.tokens_per_s_per_device
    if row.step_s and row.devices and row.seq_len:
        tokens = row.global_batch_tokens or (row.global_batch or 0) * row.seq_len
        if tokens:
            return tokens / row.step_s / row.devices
    return _from_flops(row)


def _from_flops(row: TrainingRow) -> float | None:
    """Tokens per second from TFLOP/s, or from MFU, by the convention of the source (the rows' README)."""
    rate = row.tflops * 1e12 if row.tflops else None
    if rate is None and row.mfu and row.device_name:
        rate = row.mfu * load_device(row.device_name).flops_per_s["bfloat16"].value
    if rate is None or not (
        row.layers and row.hidden and row.heads and row.ffn and row.vocab and row.seq_len
    ):
        return None
    matrices = 2 if row.arch == "gpt" else 3
    attention = 2 * row.hidden**2 * (1 + (row.kv_heads or row.heads) / row.heads)
    weights = row.layers * (attention + matrices * row.hidden * row.ffn) + row.vocab * row.hidden
    pairs = 12 * row.layers * row.hidden * row.seq_len
    if re.search(r"bridge|automodel", row.source, re.IGNORECASE):
        pairs //= 2  # causal attention
    flops = 6 * weights + pairs
    again = re.search(r"Megatron-LM|bigscience|InternEvo", row.source) and row.recompute == "full"
    return rate / (flops * (4 / 3 if again else 1))


RECOMPUTE = ("none", "selective", "full", "unknown")
"""What rows may say is recomputed."""
ARCHITECTURES = ("gpt", "llama")
"""What is built: two matrices in a block's MLP and learned positions, or three and rotary ones."""


def _outside(row: TrainingRow) -> str | None:
    """Why a row cannot be predicted at all; None where it can."""
    if row.kind != "dense" or row.dtype not in HALF:
        return f"{row.kind}, {row.dtype}"
    if row.ep not in (None, 1):
        return "experts in parallel"
    if row.device_name is None:
        return f"no file in cost_models/devices/ for {row.device}"
    if row.recompute not in RECOMPUTE:
        return f"recompute {row.recompute!r} is none of {', '.join(RECOMPUTE)}"
    if row.arch not in ARCHITECTURES:
        return f"arch {row.arch!r} is none of {', '.join(ARCHITECTURES)}"
    if row.arch == "gpt" and row.kv_heads and row.kv_heads != row.heads:
        return f"arch 'gpt' with {row.kv_heads} kv_heads of {row.heads} heads is not built"
    if "offload" in _used(row.sharding):
        return f"parameters or state offloaded to the host ({row.sharding})"
    missing = [
        name
        for name in ("layers", "hidden", "heads", "ffn", "vocab", "seq_len", "devices")
        if getattr(row, name) is None
    ]
    return f"not said: {', '.join(missing)}" if missing else None


def _network(row: TrainingRow, usual: Options) -> str:
    """The kind of network, from what the row says of it."""
    said = f"{row.notes} {row.source} {row.device}"
    if re.search(r"\bEFA\b|\bp4de?\b|\bp5e?n?\b|aws-samples", said):
        return "efa"
    return "roce" if re.search(r"\bRoCE", said) else usual.network


UNKNOWN_SHARDING = r"zero\+\+|quanti|\bqwz|\bqgz|\bhpz|\bq(?:lora|adam)|int8|1-?bit"
"""Sharding that sends other bytes than the model's."""
NEGATED = (
    r"\b(?:no|not|none|without)\b[ -]*(?:cpu[ -]*)?(?!shard|sync)[\w+-]+"
    r"|[\w+-]+(?: is| =|=)? (?:off|disabled)\b"
)
"""What a source says that it did not use."""


def _used(text: str | None) -> str:
    """Free text on sharding without what it says was not used, in lower case."""
    said = (text or "").lower()
    if re.fullmatch(r"not (?:stated|said|known).*|none.*|unknown.*|n/?a.*", said):
        return said
    return re.sub(NEGATED, " ", said)


def _sharding(text: str | None) -> tuple[Scheme, bool] | None:
    """A scheme, and whether its groups lie inside a node, from free text."""
    said = _used(text)
    if re.search(UNKNOWN_SHARDING, said):
        return None
    inside = bool(re.search(r"within|in node|one node|hsdp|hybrid.?shard|inside", said))
    inside &= "over all" not in said
    zero = r"zero[\s_-]*(?:stage)?[\s_=-]*"
    whole = rf"hsdp|fsdp|{zero}3|full.?shard|fully.?shard|hybrid.?shard"
    keeps = r"reshard_after_forward\W*(?:false|0)\b|grad.?op"
    if re.search(whole, said) and not re.search(rf"{zero}[12]|{keeps}|no.?shard", said):
        return "zero3", inside
    for pattern, scheme in (
        (rf"{zero}3", "zero3"),
        (rf"{zero}2|{keeps}", "zero2"),
        (rf"{zero}1|distributed.optim", "zero1"),
    ):
        if re.search(pattern, said):
            return scheme, inside  # type: ignore[return-value]
    if re.search(r"ddp|none|unknown|not stated|no.?shard|^\s*$", said):
        return "ddp", False
    return None


def _recompute(row: TrainingRow) -> Recompute:
    """What a row computes again; "selective" means several things, which its notes tell apart."""
    if row.recompute != "selective":
        return "full" if row.recompute == "full" else "none"
    if _every(row) > 1:
        return "full"
    said = f"{row.notes} {row.source}".lower()
    return "operations" if re.search(r"per-?op|\bsac\b|torchtitan|selective ac|float8", said) else "attention"


def _every(row: TrainingRow) -> int:
    found = re.search(r"every (\d+)(?:st|nd|rd|th)? (?:layer|block)", f"{row.notes}".lower())
    return int(found.group(1)) if found and row.recompute == "selective" else 1


def _batches(row: TrainingRow) -> list[tuple[int, int]]:
    """Micro-batch and accumulation; of an unknown micro-batch all powers of two that are not too large."""
    assert row.devices is not None and row.seq_len is not None
    total = row.global_batch
    if total is None and row.global_batch_tokens:
        total = row.global_batch_tokens // row.seq_len
    each = max(1, total * prod(row.degrees[:3]) // row.devices) if total else None
    if row.micro_batch:
        return [(row.micro_batch, row.accumulation or max(1, (each or 1) // row.micro_batch))]
    if each is None:
        return []
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if each % size == 0]
    small = [size for size in sizes if size * row.seq_len <= MOST_MICRO_TOKENS] or sizes[:1]
    return [(size, each // size) for size in reversed(small[-3:])]
