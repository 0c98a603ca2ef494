"""Muon for matrices, with AdamW for the rest: an optimizer of its own, and in halves for sharded matrices.

The mathematics is torch.optim.Muon's (2.13): momentum m ← βm + (1 − β)g, with Nesterov u = (1 − β)g + βm; the
orthogonalised u by five quintic Newton–Schulz iterations (Jordan et al., 2024, kellerjordan.github.io/posts/
muon); weights w ← (1 − ηλ)w − η·c·o, c from the shape. Momentum and the step work element by element,
orthogonalising needs the whole matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from hzplan.core.matrices import STEPS
from hzplan.errors import UserError
from hzplan.formats.plan import Plan
from hzplan.models.local import split_over
from hzplan.models.matrices import MatrixRule, check_rule, named
from hzplan.models.planned import planned_part
from hzplan.models.units import find_units

Method = Literal["muon", "adamw"]
METHODS: tuple[Method, ...] = ("muon", "adamw")

NS_DTYPES = ("bfloat16", "float16", "float32", "float64")
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(Optimizer):
    """Muon for groups whose ``method`` is "muon" (the default), AdamW for those where it is "adamw".

    ``lr`` … ``adjust_lr_fn`` are torch.optim.Muon's, for the first; ``adamw``: torch.optim.AdamW's, for the
    others, whose learning rate is ``lr`` where it has none; their weight decay is not ``weight_decay``, but
    what ``adamw`` says. A tensor of more than two dimensions is a stack of matrices, as of experts.
    ``ns_dtype``: torch's name of the dtype that Newton–Schulz computes in, and that a matrix travels in.
    UserError for options that are not known, and in a step for Muon's parameters of one dimension.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = STEPS,
        adjust_lr_fn: str | None = None,
        ns_dtype: str = "bfloat16",
        adamw: Mapping[str, Any] | None = None,
    ) -> None:
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise UserError(f"adjust_lr_fn is {adjust_lr_fn!r}; it is original, match_rms_adamw or None")
        if ns_dtype not in NS_DTYPES:
            raise UserError(f"ns_dtype is {ns_dtype!r}; it is one of {', '.join(NS_DTYPES)}")
        if not float(lr) >= 0:
            raise UserError(f"lr is {float(lr)}; a learning rate is at least 0")
        if unknown := sorted((adamw or {}).keys() - _adamw_defaults().keys()):
            raise UserError(f"adamw has no option {unknown[0]}; it has {', '.join(_adamw_defaults())}")
        defaults = {
            "method": "muon",
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
        }
        self._prepare()
        self.of_adamw = dict(adamw or {})
        super().__init__(_as_groups(params), defaults)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        plan: Plan | str | Path | None = None,
        matrices: Sequence[str] = (),
        others: Sequence[str] = (),
        **options: Any,
    ) -> Muon:
        """A model's parameters in two groups: hidden matrices, and for AdamW the rest, as plans have them.

        ``plan``: one, or its file, that says which are matrices; without it a rule does, and ``matrices`` and
        ``others`` name, with wildcards, what is one besides and what is none, as ``hzplan profile --matrix``
        and ``--no-matrix``. ``options``: see ``Muon``. UserError for names that the model does not have, and
        where there is no matrix.
        """
        hidden = (
            _of_rule(model, MatrixRule(tuple(matrices), tuple(others)))
            if plan is None
            else _of_plan(model, plan if isinstance(plan, Plan) else Plan.load(plan))
        )
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups: dict[Method, list[nn.Parameter]] = {
            "muon": [parameter for parameter in trained if id(parameter) in hidden],
            "adamw": [parameter for parameter in trained if id(parameter) not in hidden],
        }
        if not groups["muon"]:
            raise UserError(
                f"{type(model).__name__} has no trained matrix inside of a repeated block; name some with "
                'matrices=["…"], or train it by AdamW'
            )
        return cls([{"params": of, "method": method} for method, of in groups.items()], **options)

    def _prepare(self) -> None:
        made: dict[str, Any] = {"places": {}, "shapes": {}, "begun": set(), "of_adamw": {}, "_adamw": None}
        for name, value in made.items():
            self.__dict__.setdefault(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also of a copy, and of what is loaded, which have torch's own attributes alone."""
        self._prepare()
        super().__setstate__(state)

    places: dict[nn.Parameter, list[tuple[int, Tensor]]]
    """By slice of a matrix where the first half of its update goes, and where it comes back from: from an
    element on, as many as there are."""
    shapes: dict[nn.Parameter, Sequence[int]]
    """Of a matrix that is kept flat, or a slice of it, the matrix's shape."""
    begun: set[nn.Parameter]
    """The slices whose step is half done."""
    of_adamw: dict[str, Any]
    _adamw: AdamW | None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's optimizers; of a group for AdamW with its options."""
        super().add_param_group(_of_method(param_group, self.of_adamw, self.defaults["lr"]))

    def _step_others(self) -> None:
        """torch's AdamW on its groups and their state, which are this optimizer's: whoever changes one of
        them changes the other's."""
        groups = [group for group in self.param_groups if group["method"] == "adamw" and group["params"]]
        if not groups:
            return
        if self._adamw is None:
            self._adamw = AdamW(groups)
        self._adamw.param_groups, self._adamw.state = groups, self.state
        self._adamw.step()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; of slices (``places``) its first half."""
        found = None
        if closure is not None:
            with torch.enable_grad():
                found = closure()
        self._step_others()
        for group in self.param_groups:
            for parameter in group["params"] if group["method"] == "muon" else ():
                if parameter.grad is not None:
                    self._begin(parameter, group)
        return found

    def _begin(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        shape, gradient = self.shapes.get(parameter, parameter.shape), parameter.grad
        assert gradient is not None
        if len(shape) < 2 and parameter.numel():
            raise UserError("Muon is for matrices, and a parameter has one dimension; give it to AdamW")
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        momentum = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        if (places := self.places.get(parameter)) is not None:
            for start, place in places:
                place.copy_(update[start : start + place.numel()])
            self.begun.add(parameter)
            return
        found = self.orthogonal(update.view(shape), group)
        finish(parameter, found.reshape(parameter.shape), group, shape)

    def orthogonal(self, update: Tensor, group: Mapping[str, Any]) -> Tensor:
        """``orthogonalized``; what a subclass may do otherwise."""
        return orthogonalized(update, group)

    @torch.no_grad()
    def finish(self) -> None:
        """The second half of the step of all slices whose first half there was: their updates are back."""
        for group in self.param_groups:
            for parameter in self.begun.intersection(group["params"]):
                for start, place in self.places[parameter]:
                    finish(parameter[start : start + place.numel()], place, group, self.shapes[parameter])
        self.begun.clear()


def by_method(
    groups: Sequence[Mapping[str, Any]],
    matrices: Mapping[int, str],
    names: Mapping[int, str],
    optimizer_class: Callable[..., Optimizer],
) -> list[dict[str, Any]]:
    """A user's parameter groups, each of one method: those that name none cut in two, as the plan says.

    ``matrices``, ``names``: by ``id`` the name of parameters that the plan updates as matrices, and of all.
    UserError where plan and optimizer, or plan and group, differ.
    """
    if optimizer_class is not Muon:
        if matrices:
            raise UserError(
                f"the plan updates {min(matrices.values())} and others as matrices; give hzplan.Muon, or "
                "solve with a profile of another optimizer"
            )
        return [dict(group) for group in groups]
    if not matrices:
        raise UserError(
            "the plan updates no tensor as a matrix, and Muon does; profile with --optimizer muon, and solve "
            "again"
        )
    for parameter in (p for group in groups for p in group["params"] if id(p) in matrices):
        name = matrices[id(parameter)]
        if parameter.ndim < 2:
            raise UserError(
                f"the plan updates {name} as a matrix, and its shape is {tuple(parameter.shape)}; solve again"
            )
        if split_over(parameter):
            raise UserError(
                f"parameter {name} is in parts over the ranks of tensor parallelism, and Muon needs all of a "
                "matrix; profile with --optimizer adamw, or train without tensor parallelism"
            )
    found: list[dict[str, Any]] = []
    for group in groups:
        given = group.get("method")
        before = len(found)
        trained = [p for p in group["params"] if p.requires_grad]
        ways: dict[Method, list[nn.Parameter]] = {
            "muon": [p for p in trained if id(p) in matrices],
            "adamw": [p for p in trained if id(p) not in matrices],
        }
        for method, of in ways.items():
            if of and given is not None and method != given:
                raise UserError(
                    f"parameter {names.get(id(of[0]), 'of a group')} is in a group of the method {given}, "
                    f"but the plan has it under {method}; hzplan.Muon.of(model, plan=…) makes groups as the "
                    "plan has them, and profile --matrix and --no-matrix change those"
                )
            if of:
                found.append({**group, "method": method, "params": of})
        if given is not None and len(found) == before:  # schedulers count groups
            found.append({**group, "params": []})
    return found


def _of_rule(model: nn.Module, rule: MatrixRule) -> set[int]:
    """By ``id`` the parameters that a rule says are matrices."""
    check_rule(rule, {name for name, _ in model.named_parameters()}, ("matrices=", "others="))
    units = find_units(model)
    names = named(rule, units)
    return {id(p) for unit in units for name, p in unit.parameters if name in names}


def _of_plan(model: nn.Module, plan: Plan) -> set[int]:
    """By ``id`` the parameters that a plan updates as matrices."""
    part = dict(planned_part(model, plan)[1].named_parameters())
    return {id(part[name]) for unit in plan.units for b in unit.buckets if b.matrix for name in b.tensors}


def _as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    listed = list(params)
    return listed if listed and isinstance(listed[0], dict) else [{"params": listed}]


def _of_method(group: Mapping[str, Any], adamw: Mapping[str, Any], lr: float | Tensor) -> dict[str, Any]:
    """A group with AdamW's options where that is its method."""
    method = group.get("method", "muon")
    if method not in METHODS:
        raise UserError(f"a parameter group has the method {method!r}; known are {', '.join(METHODS)}")
    if method == "muon":
        return dict(group)
    said = {name: value for name, value in group.items() if value is not None}  # not fused=None over True
    return {**_adamw_defaults(), "lr": lr, **adamw, **said}


@cache
def _adamw_defaults() -> dict[str, Any]:
    return AdamW([nn.Parameter(torch.zeros(0))]).defaults


@torch.no_grad()
def orthogonalized(update: Tensor, group: Mapping[str, Any]) -> Tensor:
    """About the orthogonal matrix nearest to ``update`` [..., rows, columns], in the group's ``ns_dtype``:
    U·S·Vᵀ with singular values S between 0.5 and 1.5 (see the module)."""
    if update.ndim > 2:
        stack = torch.empty(update.shape, dtype=getattr(torch, group["ns_dtype"]), device=update.device)
        for one, of in zip(update, stack, strict=True):
            of.copy_(orthogonalized(one, group))
        return stack
    a, b, c = group["ns_coefficients"]
    found = update.to(getattr(torch, group["ns_dtype"]), copy=True)
    tall = found.size(0) > found.size(1)
    if tall:
        found = found.T
    found.div_(found.norm().clamp(min=group["eps"]))
    for _ in range(group["ns_steps"]):
        gram = found @ found.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        found = torch.addmm(found, polynomial, found, beta=a)
    return found.T if tall else found


def finish(parameter: Tensor, update: Tensor, group: Mapping[str, Any], shape: Sequence[int]) -> None:
    """Decay and step of a parameter, or a slice of one of ``shape``, by an orthogonalised update."""
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    rate = group["lr"] * scale(group["adjust_lr_fn"], shape)
    if isinstance(rate, Tensor):
        parameter.addcmul_(update.to(parameter.dtype), -rate.to(parameter))
    else:
        parameter.add_(update, alpha=-rate)


def scale(adjust: str | None, shape: Sequence[int]) -> float:
    """The factor on a matrix's learning rate: √max(1, rows/columns), or that which gives its update AdamW's
    usual size, 0.2·√max(rows, columns) (Moonlight, arXiv 2502.16982, §2.2)."""
    rows, columns = shape[-2:]
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
