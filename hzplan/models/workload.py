"""What MODEL on the command line names: a model, its loss, and batches to measure it with.

``gpt:<preset>`` and ``moe:<preset>`` are built in, ``hf:<config>`` is a model of transformers, and
``package.module:factory`` the user's own code, imported by `load` and never because a file says so.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hzplan.errors import UserError, one_line
from hzplan.models import moe
from hzplan.models.deferred import deferred_if_possible
from hzplan.models.gpt import GPT, PRESETS, cross_entropy
from hzplan.models.matrices import MatrixRule, check_rule
from hzplan.models.units import Unit, blocks_like, dtype_name, find_units, master_dtype_of

BUILT_IN = ("gpt:", "moe:", "hf:")
"""Models that a plan may name; anything else is code, which runs only when the user names it."""

DEFAULT_SEQ_LEN = 128
"""Tokens in a sequence for a factory that does not say, when the user does not either."""


@dataclass(frozen=True)
class Workload:
    """A model to plan for, and how to run one training micro-batch of it.

    ``build()`` makes the model anew; under the same torch.manual_seed, which the caller sets, with the same
    weights. ``batch(n, generator)`` is a synthetic micro-batch of n sequences; for language models int64
    [n, seq_len + 1], inputs and, one later, targets. ``loss(model, batch)`` is the mean over its tokens.
    ``seq_len`` is in tokens; ``vocab`` is None where the model does not say how many tokens it knows.
    ``units``: classes or names of the modules to shard as one, as in ``blocks_like``; found where empty.
    ``matrices``: which parameters a matrix optimizer updates as matrices; None: there is none.
    ``in_shapes()``: a context in which a pass without values takes the branches of one with values.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], object]
    loss: Callable[[nn.Module, object], Tensor]
    seq_len: int
    vocab: int | None
    in_shapes: Callable[[], AbstractContextManager[object]] = nullcontext
    units: tuple[str, ...] = ()
    matrices: MatrixRule | None = None

    def made(self, device: torch.device, dtype: str) -> nn.Module:
        """The model on a device, in the dtype of the master weights of a plan that computes in ``dtype``.

        One that is built in has no memory until ``parallelize`` gives it values.
        """
        master_dtype = master_dtype_of(getattr(torch, dtype))

        def build() -> nn.Module:
            return for_training(self.build()).to(device, master_dtype)

        return deferred_if_possible(build) if self.name.startswith(BUILT_IN) else build()

    def units_of(self, model: nn.Module) -> tuple[Unit, ...]:
        """The units of a model that ``build`` made; UserError where no parameter is trained."""
        units = find_units(model, blocks_like(model, self.units))
        if not any(parameter.requires_grad for unit in units for _, parameter in unit.parameters):
            raise UserError(f"{self.name}: no parameter is trained, so there is nothing to plan")
        if self.matrices is not None:
            check_rule(self.matrices, {name for unit in units for name, _ in unit.parameters})
            if not any(self.matrices.of(unit) for unit in units):
                raise UserError(
                    f"{self.name}: no parameter is a matrix inside of a repeated block, and so none for a "
                    "matrix optimizer; name some with --matrix"
                )
        return units

    def matrices_of(self, unit: Unit) -> frozenset[str]:
        """The names of a unit's parameters that a matrix optimizer updates as matrices."""
        return frozenset() if self.matrices is None else self.matrices.of(unit)


def for_training(model: nn.Module) -> nn.Module:
    """The model as it is trained: one that comes for inference, as ``from_pretrained`` gives it, in training
    mode, all of it. UserError for complex parameters, of which a change of dtype would keep the real part."""
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise UserError(
                f"parameter {name} has dtype {dtype_name(parameter.dtype)}; plans are of real numbers"
            )
    return model if model.training else model.train()


def load(spec: str, *, seq_len: int | None = None) -> Workload:
    """The workload that ``spec`` names, with sequences of ``seq_len`` tokens where given.

    A factory takes no arguments and returns a Module that maps tokens [B, S] to logits [B, S, vocab] (or what
    has ``logits``), or an object with such a ``model`` and, optionally, ``batch(n, generator)``,
    ``loss(model, batch)``, ``seq_len`` and ``vocab``. It is called once here, to see what it returns, and
    once in every ``build()``.

    Raises UserError, naming ``spec``, for anything that does not lead to a model.
    """
    if seq_len is not None and seq_len < 1:
        raise UserError(f"--seq-len {seq_len}: a sequence has at least 1 token")
    kind, separator, name = spec.partition(":")
    if kind == "gpt" and separator:
        return _gpt(spec, name, seq_len)
    if kind == "hf" and separator:
        return _hf(spec, name, seq_len)
    if kind == "moe" and separator:
        return _moe(spec, name, seq_len)
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*", spec):
        raise UserError(
            f"{spec or '(empty)'}: not a model; use gpt:<preset>, moe:<preset>, hf:<config> or "
            "package.module:factory"
        )
    return _from_factory(spec, seq_len)


def _gpt(spec: str, preset: str, seq_len: int | None) -> Workload:
    config = PRESETS.get(preset)
    if config is None:
        known = ", ".join(f"gpt:{name}" for name in PRESETS)
        raise UserError(f"{spec}: no such preset; the presets are {known}")
    if seq_len is not None:
        config = replace(config, seq_len=seq_len)
    return Workload(
        name=spec,
        build=partial(GPT, config),
        batch=partial(_random_tokens, config.vocab, config.seq_len),
        loss=next_token_loss,
        seq_len=config.seq_len,
        vocab=config.vocab,
    )


def _moe(spec: str, preset: str, seq_len: int | None) -> Workload:
    config = moe.PRESETS.get(preset)
    if config is None:
        known = ", ".join(f"moe:{name}" for name in moe.PRESETS)
        raise UserError(f"{spec}: no such preset; the presets are {known}")
    if seq_len is not None:
        config = replace(config, seq_len=seq_len)
    return Workload(
        name=spec,
        build=partial(moe.MoEGPT, config),
        batch=partial(_random_tokens, config.vocab, config.seq_len),
        loss=moe.balanced_loss,
        seq_len=config.seq_len,
        vocab=config.vocab,
        in_shapes=moe.evenly_routed,
    )


def _hf(spec: str, name: str, seq_len: int | None) -> Workload:
    from hzplan.models.hf import builder, causal_loss, load_config, not_packed, seq_len_of

    config = load_config(spec, name)
    length, vocab = seq_len_of(spec, config, seq_len), int(config.get_text_config().vocab_size)
    return Workload(
        name=spec,
        build=builder(spec, config),
        batch=partial(_random_tokens, vocab, length),
        loss=causal_loss,
        seq_len=length,
        vocab=vocab,
        in_shapes=not_packed,
    )


def _from_factory(spec: str, seq_len: int | None) -> Workload:
    factory = _import_factory(spec)
    # Looking at the product must not move the caller's random numbers.
    with torch.random.fork_rng(devices=[]):
        product, model = _call(spec, factory)
    vocab = _positive(spec, product, model, "vocab")
    if vocab is None:
        # By convention the first table is the tokens'.
        vocab = next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), None)
    declared = _positive(spec, product, model, "seq_len")
    length = seq_len or declared or min(DEFAULT_SEQ_LEN, _positions(model))
    batch = None if product is model else _method(spec, product, "batch")
    loss = None if product is model else _method(spec, product, "loss")
    if batch is not None:
        if seq_len not in (None, declared):
            raise UserError(f"{spec}: the factory makes its own batches; leave --seq-len {seq_len} out")
    elif vocab is not None:
        batch = partial(_random_tokens, vocab, length)
    else:
        raise UserError(
            f"{spec}: no batches without a vocabulary; return an object with `model` and `vocab`, "
            "or with `model`, `batch` and `loss`"
        )
    return Workload(
        name=spec,
        build=lambda: _call(spec, factory)[1],
        batch=batch,
        loss=loss or next_token_loss,
        seq_len=length,
        vocab=vocab,
    )


def _positions(model: nn.Module) -> int:
    """How many tokens a sequence of a model of transformers may have; very many for any other."""
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else sys.maxsize


NARROW_SEQ_LEN, NARROW_VOCAB, NARROW_HEADS, NARROW_HEAD, NARROW_EXPERTS = 8, 64, 2, 8, 4


def narrow(workload: Workload) -> Workload:
    """A small copy of a built-in model: as many units and tensors, less of everything else.

    Other models are returned as they are.
    """
    kind, _, name = workload.name.partition(":")
    if kind == "gpt":
        width = NARROW_HEADS * NARROW_HEAD
        config = replace(
            PRESETS[name], vocab=NARROW_VOCAB, width=width, heads=NARROW_HEADS, seq_len=NARROW_SEQ_LEN
        )
        build: Callable[[], nn.Module] = partial(GPT, config)
    elif kind == "moe":
        width = NARROW_HEADS * NARROW_HEAD
        mixture = replace(
            moe.PRESETS[name],
            vocab=NARROW_VOCAB,
            width=width,
            heads=NARROW_HEADS,
            seq_len=NARROW_SEQ_LEN,
            experts=min(NARROW_EXPERTS, moe.PRESETS[name].experts),
            active=min(2, moe.PRESETS[name].active),
            expert_width=NARROW_HEAD,
        )
        build = partial(moe.MoEGPT, mixture)
    elif kind == "hf":
        from hzplan.models.hf import builder, load_config, narrow_config

        build = builder(workload.name, narrow_config(load_config(workload.name, name), NARROW_VOCAB))
    else:
        return workload
    return replace(
        workload,
        build=build,
        batch=partial(_random_tokens, NARROW_VOCAB, NARROW_SEQ_LEN),
        seq_len=NARROW_SEQ_LEN,
        vocab=NARROW_VOCAB,
    )


def _import_factory(spec: str) -> Callable[[], object]:
    """The callable that ``spec`` names, imported from the path with the current directory on it."""
    module_name, _, path = spec.partition(":")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(
                f"{spec}: no module `{error.name}` in {here} or among the installed packages; "
                "check the name, or change to the folder that holds it"
            ) from None
        raise UserError(f"{spec}: importing {module_name} failed: {one_line(error)}") from error
    except (Exception, SystemExit) as error:  # the user's code, which may raise anything
        raise UserError(f"{spec}: importing {module_name} failed: {one_line(error)}") from error
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            raise UserError(f"{spec}: module {module_name} has no `{path}`; check the name after the colon")
        found = getattr(found, attribute)
    if not callable(found):
        raise UserError(f"{spec}: `{path}` is a {type(found).__name__}, not a function that returns a model")
    return found


def _call(spec: str, factory: Callable[[], object]) -> tuple[object, nn.Module]:
    """What the factory returns, and the module in it."""
    try:
        product = factory()
    except (Exception, SystemExit) as error:  # the user's code, which may raise anything
        raise UserError(f"{spec}: the factory raised {one_line(error)}") from error
    model = product if isinstance(product, nn.Module) else getattr(product, "model", None)
    if not isinstance(model, nn.Module):
        raise UserError(
            f"{spec}: the factory returned a {type(product).__name__}; "
            "return a torch.nn.Module, or an object whose `model` is one"
        )
    return product, model


def _positive(spec: str, product: object, model: nn.Module, name: str) -> int | None:
    """The integer that the product, or else its model, has under ``name``; None without one."""
    value = getattr(product, name, None)
    if value is None:
        value = getattr(model, name, None)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    if product is model:
        return None  # a module's attribute of that name may be anything, a submodule for instance
    raise UserError(f"{spec}: the factory's `{name}` must be a positive integer, not {value!r:.80}")


def _method(spec: str, product: object, name: str) -> Callable[..., Any] | None:
    method = getattr(product, name, None)
    if method is not None and not callable(method):
        raise UserError(f"{spec}: the factory's `{name}` must be a function, not a {type(method).__name__}")
    return method


def _random_tokens(vocab: int, seq_len: int, sequences: int, generator: torch.Generator) -> Tensor:
    """Uniform random tokens, int64 [sequences, seq_len + 1], on the generator's device."""
    return torch.randint(vocab, (sequences, seq_len + 1), generator=generator, device=generator.device)


def next_token_loss(model: nn.Module, batch: object) -> Tensor:
    """Mean cross-entropy, in nats, of every next token of ``batch`` int64 [n, seq_len + 1]; of logits, or of
    what has some, as models of transformers return."""
    assert isinstance(batch, Tensor)
    found = model(batch[:, :-1])
    return cross_entropy(getattr(found, "logits", found), batch[:, 1:])
