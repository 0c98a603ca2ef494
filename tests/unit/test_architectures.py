"""Models of transformers, as they are: counted, solved for, and trained as one process would."""

from __future__ import annotations

import json
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.formats.cluster import find_cluster
from hzplan.models.hf import builder, causal_loss, load_config, narrow_config
from hzplan.models.workload import load
from hzplan.profiler.analytic import analyse
from hzplan.solver.solve import Request, Solved, solve
from hzplan.training.verify import verify
from tests.configs import LIKE_LLAMA
from tests.long import shorter
from tests.plans import make_plan

LIKE_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}

LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
LATENT |= {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT |= {"num_key_value_heads": 4}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": LIKE_LLAMA,
    "mistral": LIKE_LLAMA | {"head_dim": 8},
    "qwen2": LIKE_LLAMA,
    "qwen3": LIKE_LLAMA | {"head_dim": 8},
    "gemma2": LIKE_LLAMA | {"head_dim": 8},
    "olmo2": LIKE_LLAMA,
    "phi": LIKE_LLAMA | {"num_key_value_heads": 4},
    "phi3": LIKE_LLAMA | {"pad_token_id": 0},
    "gpt2": LIKE_GPT2,
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 256},
    "gpt_neox": LIKE_LLAMA,
    "opt": LIKE_LLAMA | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "mixtral": LIKE_LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": LIKE_LLAMA | EXPERTS,
    "deepseek_v3": LIKE_LLAMA | EXPERTS | LATENT,
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_model_of_transformers_trains_as_it_is(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind} | ARCHITECTURES[kind]))
    name = f"hf:{tmp_path / 'config.json'}"
    workload = load(name, seq_len=16)
    plan = make_plan(workload, mesh="2|2", levels=Levels(1, 0, 2), accumulation=2, clip=True)
    assert sum(unit.name.rpartition(".")[2].isdigit() for unit in plan.units) == 2  # its two layers
    found = verify(plan, name)
    assert found.ok, found


MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v3")
"""torch knows the shapes of their grouped products in bfloat16 only."""


USUAL = ("llama",)


@pytest.mark.parametrize(
    "kind", shorter(sorted(ARCHITECTURES.keys() - MIXTURES), without=ARCHITECTURES.keys() - USUAL)
)
def test_a_model_of_transformers_is_counted_and_solved_for(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind} | ARCHITECTURES[kind]))
    workload = load(f"hf:{tmp_path / 'config.json'}", seq_len=16)
    data, device = find_cluster("h100-8x400g")
    mesh = Mesh.of_tiers(*(tier.ranks for tier in data.tiers))
    profile = analyse(
        workload, data, device, mesh=mesh, micro_batches=[1], dtype="float32", optimizer="adamw"
    )
    model = workload.build()
    assert sum(t.spec.numel for unit in profile.units for t in unit.tensors) == sum(
        parameter.numel() for parameter in model.parameters()
    )
    assert isinstance(solve(profile, Request(1 << 34, 2 * mesh.world)), Solved)


@pytest.mark.parametrize("infinity", ["Infinity", '{"__float__": "Infinity"}'])
def test_a_configuration_may_hold_infinities(infinity: str, tmp_path: Path) -> None:
    """Those of state spaces do, as Python writes them or as transformers does."""
    (tmp_path / "config.json").write_text(f'{{"model_type": "mamba2", "time_step_limit": [0.0, {infinity}]}}')
    assert load_config("hf:mamba2", str(tmp_path)).time_step_limit == [0.0, inf]


@pytest.mark.parametrize("kind", ["deepseek_v3", "gptj", "mamba2", "nemotron_h"])
def test_a_small_copy_of_a_full_size_configuration_runs(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    config = narrow_config(load_config(f"hf:{kind}", str(tmp_path)), vocab=64)
    for field in ("num_hidden_layers", "n_layer"):
        if isinstance(getattr(config, field, None), int):
            with suppress(AttributeError, NotImplementedError):  # nemotron_h has a list of them
                setattr(config, field, 4)
    model = builder("hf:", config)()
    loss = causal_loss(model, torch.randint(64, (2, 17)))
    loss.backward()
    assert loss.isfinite()
