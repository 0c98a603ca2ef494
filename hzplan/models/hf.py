"""``hf:`` models: Hugging Face causal language models from a configuration, without any download.

Only transformers' own classes are built; what a configuration says of code elsewhere is not followed.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hzplan.errors import UserError, one_line
from hzplan.formats.base import read_json

CONFIGS = Path(__file__).parent / "configs"
DEFAULT_SEQ_LEN = 4096
"""Tokens in a sequence when the user does not say; at most what the model's positions allow."""


def known_configs() -> list[str]:
    """The configurations that come with hzplan, by name."""
    return sorted(path.stem for path in CONFIGS.glob("*.json"))


def load_config(spec: str, name: str) -> Any:
    """transformers' configuration for ``name``: one of ``known_configs``, a config.json, or its folder.

    Raises UserError, naming ``spec``, for anything else, and where transformers is missing.
    """
    if importlib.util.find_spec("transformers") is None:
        raise UserError(f"{spec}: needs the package transformers; pip install transformers")
    path = Path(name)
    if Path(name).name == name and (CONFIGS / f"{name}.json").exists():
        path = CONFIGS / f"{name}.json"
    elif path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise UserError(
            f"{spec}: no such file; use a config.json, its folder, or {', '.join(known_configs())}"
        )
    data = _with_infinities(read_json(path, finite=False))
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise UserError(f"{path}: not a model's config.json (it has no text in its field 'model_type')")
    from transformers import AutoConfig

    fields = {key: value for key, value in data.items() if key not in ("model_type", "auto_map")}
    try:
        config = AutoConfig.for_model(data["model_type"], **fields)
    except Exception as error:  # transformers raises anything about fields that it does not like
        raise UserError(f"{path}: transformers does not take it: {one_line(error)}") from error
    config.use_cache = False
    return config


def _with_infinities(value: Any) -> Any:
    """A file's values, with the numbers that JSON has no word for, such as limits of state-space models:
    transformers writes ``{"__float__": "Infinity"}``."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {key: _with_infinities(inner) for key, inner in value.items()}
    return [_with_infinities(inner) for inner in value] if isinstance(value, list) else value


def seq_len_of(spec: str, config: Any, asked: int | None) -> int:
    """Tokens in a sequence: as asked, or by default; UserError for more than the model has positions."""
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if asked is not None and most is not None and asked > most:
        raise UserError(f"--seq-len {asked}: {spec} has {most} positions (its field max_position_embeddings)")
    return asked or min(DEFAULT_SEQ_LEN, most or DEFAULT_SEQ_LEN)


NARROW = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "moe_intermediate_size", "ffn_dim"), 24),
    "shared_expert_intermediate_size": 24,
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "rotary_dim"), 8),
    # latent attention: a head's two parts, and what keys and values are compressed to
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("qk_head_dim", "q_lora_rank", "kv_lora_rank"), 16),
    # state spaces: heads are as wide together as the model, twice
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 8),
    "mamba_d_ssm": 64,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 32),
}
"""Sizes of a small copy, by the names that configurations have for them."""


def narrow_config(config: Any, vocab: int) -> Any:
    """A copy of a configuration with small sizes and no dropout or noise; what decides on tensors stays."""
    found = copy.deepcopy(config)
    found._experts_implementation = "eager"  # the default's kernel knows no float64
    inner = found.get_text_config()
    sizes = fitting({**NARROW, "vocab_size": vocab}, inner)
    for field, size in sizes.items():
        if isinstance(getattr(inner, field, None), int) and not _is_computed(inner, field):
            setattr(inner, field, size)
    for field in vars(inner):
        if ("drop" in field or "jitter" in field) and isinstance(getattr(inner, field), float):
            setattr(inner, field, 0.0)
    for field in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(inner, field, None) is not None:
            setattr(inner, field, 0)
    return found


def fitting(sizes: Mapping[str, int], config: Any) -> dict[str, int]:
    """Small sizes, with as many heads of each sort as this configuration asks for."""
    found = dict(sizes)
    if getattr(config, "num_key_value_heads", None) == getattr(config, "num_attention_heads", 0):
        found["num_key_value_heads"] = found["num_attention_heads"]
    if getattr(config, "expand", None) == 2 and hasattr(config, "num_heads"):  # of a state space
        found["num_heads"] = 8
    return found


def _is_computed(config: object, field: str) -> bool:
    """Whether a configuration has a field that follows from others."""
    own = getattr(type(config), field, None)
    return isinstance(own, property) and own.fset is None


@contextmanager
def not_packed() -> Iterator[None]:
    """Our sequences are not packed. transformers looks at positions to know; where these have no values, it
    would build masks that no run of the model has, and repeat keys and values for them."""
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    kept = getattr(masking_utils, name, None)
    if kept is None:  # another version, which does not ask
        yield
        return
    setattr(masking_utils, name, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(masking_utils, name, kept)


def builder(spec: str, config: Any) -> partial[nn.Module]:
    """What makes the model anew, in float32."""
    return partial(_build, spec, config)


def _build(spec: str, config: Any) -> nn.Module:
    import torch
    from transformers import AutoModelForCausalLM

    def made(attention: str) -> nn.Module:
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.float32, trust_remote_code=False
        )
        return model

    try:
        try:
            return made("sdpa")
        except ValueError as error:
            if "attention implementation" not in str(error):
                raise
            return made("eager")  # some models have no other
    except Exception as error:  # likewise
        raise UserError(f"{spec}: transformers cannot build it: {one_line(error)}") from error


def causal_loss(model: nn.Module, batch: object) -> Tensor:
    """Mean cross-entropy, in nats, of every next token of ``batch`` int64 [n, seq_len + 1]."""
    assert isinstance(batch, Tensor)
    logits: Tensor = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
