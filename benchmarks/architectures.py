"""Which models of transformers work: each is made small, counted, solved for, and trained on threads beside
one process. ``python -m benchmarks.architectures --docs docs/architectures.md``.

Causal models are tried by their configurations, as ``hf:`` takes them; others by a factory, as users write
them, which has the loss that transformers computes.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from hzplan.formats.base import write_text
from hzplan.models.hf import NARROW, fitting

STEPS = ("built", "counted", "solved for", "trains as one process")
TIMEOUT_S = 180.0
LAYERS = 2
LAYER_FIELDS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "n_layers",
    "num_decoder_layers",
    "decoder_layers",
    "encoder_layers",
)
SIZES = {
    **NARROW,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "n_embed"), 32),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "moe_intermediate_size", "ffn_dim", "decoder_ffn_dim"), 24
    ),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("num_attention_heads", "n_head", "decoder_attention_heads", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads",), 4),
    **dict.fromkeys(("encoder_ffn_dim", "d_ff", "d_inner", "hidden_dim", "embedding_size"), 32),
    "d_kv": 8,
    "image_size": 64,
    "patch_size": 8,
    "num_labels": 8,
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    "head_dim": 8,
    "vocab_size": 256,
}
"""Of a small model, by the names that configurations have for them."""


LENGTH = 16
"""Tokens in a sequence."""


@dataclass(frozen=True)
class Family:
    """Models for one task: what transformers calls their list and the class that builds them, and what a
    batch has beside labels."""

    title: str
    mapping: str
    built_by: str
    inputs: str | None = None

    def kinds(self) -> list[str]:
        """The model types of transformers that have such a model."""
        from transformers.models.auto import modeling_auto

        return sorted(getattr(modeling_auto, self.mapping))


CAUSAL = Family("Causal language models", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AutoModelForCausalLM")
FAMILIES = (
    CAUSAL,
    Family("Encoders", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", "AutoModelForMaskedLM", "input_ids"),
    Family(
        "Sequence to sequence",
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        "AutoModelForSeq2SeqLM",
        "input_ids",
    ),
    Family(
        "Vision",
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        "AutoModelForImageClassification",
        "pixel_values",
    ),
)


class Labelled:
    """A model with the loss that transformers computes from labels, as a factory returns it."""

    seq_len = LENGTH

    def __init__(self, family: Family, config: Any) -> None:
        import transformers

        self._inputs, self._config = family.inputs, config
        self.model: nn.Module = getattr(transformers, family.built_by).from_config(config)
        self.vocab = SIZES["vocab_size"]

    def batch(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Random tokens, or pictures, and labels."""
        if self._inputs == "pixel_values":
            inner = getattr(self._config, "vision_config", self._config)
            size = getattr(inner, "image_size", SIZES["image_size"])
            sizes = size if isinstance(size, list | tuple) else (size, size)
            shape = (count, getattr(inner, "num_channels", 3), *sizes)
            labels = torch.randint(self._config.num_labels, (count,), generator=generator)
            return {"pixel_values": torch.randn(shape, generator=generator), "labels": labels}
        tokens = torch.randint(2, self.vocab, (2, count, LENGTH), generator=generator)
        return {"input_ids": tokens[0], "labels": tokens[1]}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """As transformers computes it, in the dtype of the weights."""
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        cast = {n: t.to(dtype) if t.is_floating_point() else t for n, t in batch.items()}
        found: Tensor = model(**cast).loss
        return found


factory: Callable[[], Labelled]
"""Of the model that is being tried; ``tried`` sets it, in a process for each."""


def small_config(family: Family, kind: str) -> Any:
    """transformers' configuration of a small model."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind)
    config.architectures, config.use_cache = [], False
    pictures = family.inputs == "pixel_values"
    inner = getattr(config, "vision_config", config) if pictures else config.get_text_config()
    sizes = fitting({**SIZES, **dict.fromkeys(LAYER_FIELDS, LAYERS)}, inner)
    for field, size in sizes.items():
        if isinstance(getattr(inner, field, None), int):
            try:
                setattr(inner, field, size)
            except AttributeError:  # computed from others
                continue
    for field, value in [*vars(inner).items()]:
        if "drop" in field and isinstance(value, float):
            setattr(inner, field, 0.0)
        elif "drop" in field and isinstance(value, list):
            setattr(inner, field, [0.0] * len(value))
    if isinstance(vars(inner).get("layer_types"), list):
        inner.layer_types = inner.layer_types[:LAYERS]
    for field in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(inner, field, None) is not None:
            setattr(inner, field, 0)
    return config


def _named(family: Family, kind: str, path: Path) -> str:
    """The model as the command line names it."""
    config = small_config(family, kind)
    if family is CAUSAL:
        path.write_text(json.dumps({**config.to_dict(), "model_type": kind}, default=str))
        return f"hf:{path}"
    global factory  # noqa: PLW0603 by name, as users' factories are
    factory = lambda: Labelled(family, config)  # noqa: E731 a global that is a function
    return f"{__name__}:factory"


def tried(family: Family, kind: str) -> tuple[list[str], str]:
    """The steps that a kind of model got through, and why not the next one."""
    from hzplan.core.hierarchy import Mesh
    from hzplan.formats.cluster import find_cluster
    from hzplan.models.workload import load
    from hzplan.profiler.analytic import analyse
    from hzplan.solver.emit import emit
    from hzplan.solver.solve import Request, Solved, solve
    from hzplan.training.verify import verify

    warnings.simplefilter("ignore")
    done: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        try:
            name = _named(family, kind, path)
            workload = load(name, seq_len=LENGTH if family is CAUSAL else None)
            workload.build()
            done.append(STEPS[0])
            data, device = find_cluster("h100-8x400g")
            mesh = Mesh.of_tiers(*(tier.ranks for tier in data.tiers))
            profile = analyse(
                workload, data, device, mesh=mesh, micro_batches=[1], dtype="bfloat16", optimizer="adamw"
            )
            done.append(STEPS[1])
            request = Request(1 << 34, 2 * mesh.world, gap=0.05, time_limit_s=10)
            solved = solve(profile, request)
            if not isinstance(solved, Solved):
                return done, "no plan was found"
            done.append(STEPS[2])
            plan = emit(profile, request, solved, profile_path=path, plan_path=Path(folder, "plan.json"))
            found = verify(plan, name)
            if not found.ok:
                return done, f"{found.worst} is {found.weight_error:.1e} apart"
            done.append(STEPS[3])
        except Exception as error:  # of the model, or ours
            lines = str(error).strip().splitlines() or [""]
            return done, f"{type(error).__name__}: {lines[0]}".replace(str(path), "config.json")
    return done, ""


def _answer(family: Family, kind: str, pipe: Any) -> None:
    pipe.send(tried(family, kind))


def in_its_own_process(family: Family, kind: str) -> tuple[list[str], str]:
    """``tried``, where a model may end the process or never end."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(family, kind, there), daemon=True)
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(TIMEOUT_S) else ([], f"not done in {TIMEOUT_S:.0f} s")
    except EOFError:
        return [], "the process ended"
    finally:
        process.kill()
        process.join()


Found = dict[str, dict[str, tuple[list[str], str]]]
"""By family and model type, what ``tried`` says."""


def markdown(found: Found, version: str) -> str:
    """What works, and of the rest how far it came and why no farther."""
    lines = [
        "# Models of transformers",
        "",
        f"`python -m benchmarks.architectures --docs docs/architectures.md`, transformers {version}: every",
        f"model type of these tasks, from its default configuration with small sizes and {LAYERS} layers, in",
        f"sequences of {LENGTH} tokens. Each was built; counted in shapes only; solved for on 8 modelled",
        "H100; and trained two steps under that plan by ranks that are threads, in float64, beside one",
        "process.",
        "Causal models are named by their configuration (`hf:`), the others by a factory",
        "(`module:factory`) whose loss is transformers' own.",
        "",
        "Many that fail need sizes that fit each other, which this sweep does not know; a real configuration",
        "may work.",
    ]
    for title, of_family in found.items():
        lines += ["", f"## {title}", "", *_of_family(of_family)]
    return "\n".join(lines) + "\n"


def _of_family(found: dict[str, tuple[list[str], str]]) -> list[str]:
    whole = [kind for kind, (done, _) in found.items() if len(done) == len(STEPS)]
    counted = Counter(len(done) for done, _ in found.values())
    reached = ", ".join(
        f"{sum(number for steps, number in counted.items() if steps > index)} {step}"
        for index, step in enumerate(STEPS)
    )
    lines = [f"{len(found)} model types: {reached}.", "", "All of it: "]
    lines[-1] += ", ".join(f"`{kind}`" for kind in whole) + "."
    if len(whole) < len(found):
        lines += ["", "| model type | last that worked | then |", "|---|---|---|"]
    return lines + [
        f"| `{kind}` | {done[-1] if done else '–'} | {why[:160].replace('|', '/')} |"
        for kind, (done, why) in found.items()
        if kind not in whole
    ]


def main(
    docs: Annotated[Path | None, typer.Option(help="Where to write the tables.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="What was found, as JSON; what is there is not tried again.")
    ] = None,
    only: Annotated[str | None, typer.Option(help="Model types whose names contain this.")] = None,
    task: Annotated[str, typer.Option(help="Tasks whose titles contain this.")] = "",
) -> None:
    """Try every model type of transformers.

    Example: python -m benchmarks.architectures --output build/architectures.json --docs docs/architectures.md
    """
    import transformers

    import hzplan.training.verify  # noqa: F401 # before the fork, once

    found: Found = json.loads(output.read_text()) if output is not None and output.exists() else {}
    for family in (family for family in FAMILIES if task in family.title):
        of_family = found.setdefault(family.title, {})
        for kind in family.kinds():
            if kind in of_family or (only is not None and only not in kind):
                continue
            of_family[kind] = in_its_own_process(family, kind)
            done, why = of_family[kind]
            print(f"{family.title}: {kind}: {len(done)} of {len(STEPS)} {why}"[:200], flush=True)
            if output is not None:
                write_text(output, json.dumps(found, indent=1) + "\n")
    text = markdown(found, transformers.__version__)
    print(text) if docs is None else write_text(docs, text)


if __name__ == "__main__":
    typer.run(main)
