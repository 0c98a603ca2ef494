"""Which causal models of transformers work: each is made small, counted, solved for, and trained on threads
beside one process. ``python -m benchmarks.architectures --docs docs/architectures.md``."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from hzplan.formats.base import write_text

STEPS = ("built", "counted", "solved for", "trains as one process")
TIMEOUT_S = 120.0
LAYERS = 2
LAYER_FIELDS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "n_layers",
    "num_decoder_layers",
    "decoder_layers",
)
SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "n_embed"), 32),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "moe_intermediate_size", "ffn_dim", "decoder_ffn_dim"), 24
    ),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("num_attention_heads", "n_head", "decoder_attention_heads", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    "head_dim": 8,
    "vocab_size": 256,
}
"""Of a small model, by the names that configurations have for them."""


def causal_models() -> list[str]:
    """The model types of transformers that have a causal model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small_config(kind: str) -> dict[str, Any]:
    """The fields of a small model's config.json."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind)
    inner = config.get_text_config()
    for field, size in {**SIZES, **dict.fromkeys(LAYER_FIELDS, LAYERS)}.items():
        if isinstance(getattr(inner, field, None), int):
            try:
                setattr(inner, field, size)
            except AttributeError:  # computed from others
                continue
    if isinstance(vars(inner).get("layer_types"), list):
        inner.layer_types = inner.layer_types[:LAYERS]
    for field in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(inner, field, None) is not None:
            setattr(inner, field, 0)
    found: dict[str, Any] = {**config.to_dict(), "model_type": kind}
    return found


def tried(kind: str) -> tuple[list[str], str]:
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
            path.write_text(json.dumps(small_config(kind), default=str))
            name = f"hf:{path}"
            workload = load(name, seq_len=16)
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


def _answer(kind: str, pipe: Any) -> None:
    pipe.send(tried(kind))


def in_its_own_process(kind: str) -> tuple[list[str], str]:
    """``tried``, where a model may end the process or never end."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(kind, there), daemon=True)
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(TIMEOUT_S) else ([], f"not done in {TIMEOUT_S:.0f} s")
    except EOFError:
        return [], "the process ended"
    finally:
        process.kill()
        process.join()


def markdown(found: dict[str, tuple[list[str], str]], version: str) -> str:
    """What works, and of the rest how far it came and why no farther."""
    whole = [kind for kind, (done, _) in found.items() if len(done) == len(STEPS)]
    counted = Counter(len(done) for done, _ in found.values())
    reached = ", ".join(
        f"{sum(number for steps, number in counted.items() if steps > index)} {step}"
        for index, step in enumerate(STEPS)
    )
    lines = [
        "# Models of transformers",
        "",
        f"`python -m benchmarks.architectures --docs docs/architectures.md`, transformers {version}: every",
        f"causal model type, {len(found)} of them, from its default configuration with small sizes and",
        f"{LAYERS} layers, in sequences of 16 tokens. Each was built; counted in shapes only; solved for on",
        "8 modelled H100; and trained two steps under that plan by ranks that are threads, in float64,",
        "beside one process.",
        f"{reached}.",
        "",
        "## All of it",
        "",
        ", ".join(f"`{kind}`" for kind in whole) + ".",
        "",
        "## Not all of it",
        "",
        "Many of these need sizes that fit each other, which this sweep does not know; a real configuration",
        "may work.",
        "",
        "| model type | last that worked | then |",
        "|---|---|---|",
    ]
    lines += [
        f"| `{kind}` | {done[-1] if done else '–'} | {why[:160].replace('|', '/')} |"
        for kind, (done, why) in found.items()
        if kind not in whole
    ]
    return "\n".join(lines) + "\n"


def main(
    docs: Annotated[Path | None, typer.Option(help="Where to write the table.")] = None,
    only: Annotated[str | None, typer.Option(help="Model types whose names contain this.")] = None,
) -> None:
    """Try every causal model of transformers.

    Example: python -m benchmarks.architectures --docs docs/architectures.md
    """
    import transformers

    import hzplan.training.verify  # noqa: F401 # before the fork, once

    found = {}
    for kind in causal_models():
        if only is None or only in kind:
            found[kind] = in_its_own_process(kind)
            done, why = found[kind]
            print(f"{kind}: {len(done)} of {len(STEPS)} {why}"[:200], flush=True)
            if docs is not None:  # as far as it came: all of them take half an hour
                write_text(docs, markdown(found, transformers.__version__))
    text = markdown(found, transformers.__version__)
    print(text) if docs is None else write_text(docs, text)


if __name__ == "__main__":
    typer.run(main)
