"""``hzplan.auto``: measure, plan and shard in the job that trains, and remember the plan.

A plan that is not the known scheme at hand is trained beside torch's own, and kept where it is faster by more
than the interval of that comparison. What was measured is kept by what it depends on (the model's class and
tensors, the sample's shapes, how they are trained, the optimizer's state, the ranks and their machines,
versions), a plan also by what was asked. A second start reads them.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import os
import platform
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from hzplan import __version__
from hzplan.cost.memory import budget_of
from hzplan.errors import NoPlanFits, UserError, one_line
from hzplan.formats.plan import Plan
from hzplan.formats.profile import Profile
from hzplan.models.matrices import MatrixRule, named
from hzplan.models.units import find_units
from hzplan.models.workload import Workload
from hzplan.profiler import default_mesh, measure
from hzplan.profiler.model.optimizer import OPTIMIZERS, footprint
from hzplan.profiler.session.ranks import Ranks
from hzplan.profiler.session.rounds import QUICK
from hzplan.runtime.apply import parallelize
from hzplan.runtime.muon import Muon
from hzplan.runtime.optimizer import ShardedOptimizer
from hzplan.runtime.updates import as_groups

if TYPE_CHECKING:
    from hzplan.solver.evaluate import Evaluation
    from hzplan.solver.solve import Solved

NAMES: Mapping[Callable[..., Optimizer], str] = {made.func: name for name, made in OPTIMIZERS.items()}
"""The optimizers that are measured, by their names in profiles."""
_HOW = frozenset(("params", "lr", "fused", "foreach", "capturable", "differentiable"))
"""Of an optimizer's arguments those that do not change what it keeps; it is measured in its fastest form."""
FOLDER = "HZPLAN_CACHE"
"""The environment variable of the folder that profiles and plans are kept in."""

PEERS: Mapping[str, str] = {"DDP": "ddp", "ZeRO-3": "fsdp2"}
"""The schemes that a plan is held against in the job, and what trains so in torch."""


@dataclass(frozen=True)
class Rival:
    """A known scheme that fits without recomputation: the fastest of those, where the plan is another."""

    scheme: str
    plan: Plan


Loss = Callable[[nn.Module, Any], Tensor]
Kept = TypeVar("Kept", Profile, Plan)


def auto(
    model: nn.Module,
    optimizer_class: type[Optimizer] = torch.optim.AdamW,
    *,
    global_batch: int,
    sample: Any,
    loss: Loss | None = None,
    memory_bytes: int | None = None,
    clip: bool = True,
    dtype: str = "float32",
    time_limit_s: float = 10.0,
    gauge_s: float = 30.0,
    cache: str | Path | None = None,
    say: Callable[[str], None] | None = None,
    **arguments: Any,
) -> tuple[nn.Module, ShardedOptimizer, Plan]:
    """``parallelize`` without a plan: the plan is made here, of measurements on these ranks, and returned.

    ``sample``: a micro-batch as the loop has them, tensors [sequences, …] in any nesting; its number of
    sequences is the micro-batch of the plan. ``loss(model, batch)``: by default ``model(**batch).loss``, as
    models of transformers have it. ``global_batch``: sequences in a step over all ranks; the loop takes
    ``plan.batch.accumulation`` micro-batches a step. ``memory_bytes``: of a rank; by default the device's,
    less a reserve. ``dtype``: what the model computes in, "bfloat16" with float32 master weights.
    ``time_limit_s``: of the search. ``gauge_s``: at most so long the plan is trained beside torch's DDP, or
    FSDP2 where replicas do not fit; without a lead that is sure, the plan is that scheme's.
    ``cache``: the folder of what is remembered; by default that of the environment variable HZPLAN_CACHE, or
    ``~/.cache/hzplan``. ``say`` gets a line on what is done, on rank 0; by default it goes to stderr.
    ``arguments`` go to ``optimizer_class``.

    Every rank calls it, with torch.distributed initialised, or one process without a job. Raises UserError
    where the model cannot be measured, NoPlanFits where nothing fits; on all ranks.
    """
    if isinstance(model, DistributedDataParallel | FSDPModule):
        raise UserError("auto: the model is in DDP or FSDP already; give it as it is, the plan shards it")
    ranks = Ranks.here()
    tell = (say or _to_stderr) if ranks.rank == 0 else _to_nobody
    if optimizer_class not in NAMES:
        known = ", ".join(f"hzplan.{of.__name__}" if of is Muon else of.__name__ for of in NAMES)
        raise UserError(f"auto: {optimizer_class.__name__} is not measured; use {known}, or hzplan profile")
    workload = _workload(model, sample, loss)
    if arguments.get("params") is not None:
        arguments["params"] = as_groups(arguments["params"])  # which may be generators, and are read twice
    if optimizer_class is Muon:
        workload = replace(workload, matrices=_rule(model, arguments.get("params") or ()))
    size = _sequences(sample)
    if global_batch < 1 or global_batch % (ranks.size * size):
        raise UserError(
            f"auto: global_batch={global_batch} is no multiple of {ranks.size} ranks × {size} sequences of "
            "the sample"
        )
    with torch.random.fork_rng([ranks.device] if ranks.device.type == "cuda" else []):  # the caller's stay
        question = _Question(global_batch, clip, time_limit_s, gauge_s, memory_bytes)
        measured = _Measured(
            workload, size, dtype, NAMES[optimizer_class], _state(optimizer_class, dtype, ranks, arguments)
        )
        of_model = _of_model(ranks, model, sample, loss, measured)
        plan_path, plan = _made(ranks, measured, of_model, question, _folder(cache), tell)
    tell(
        f"auto: {plan_path}: {plan.predicted.step_s:.3g} s a step predicted, "
        f"{plan.predicted.peak_memory_bytes / 2**30:.2f} GiB, accumulation {plan.batch.accumulation}"
    )
    with warnings.catch_warnings():
        if measured.state is not None:  # which the plan has counted
            warnings.filterwarnings("ignore", message=".*tensors of state per parameter, the plan, for")
        made, optimizer = parallelize(model, plan, optimizer_class, **arguments)
    return made, optimizer, plan


class _Measured(NamedTuple):
    """What is measured: ``size`` sequences of a workload, in a dtype, for an optimizer; ``state``: what its
    arguments make of its tensors and temporaries per element, None where they make no difference."""

    workload: Workload
    size: int
    dtype: str
    optimizer: str
    state: tuple[int, float] | None


class _Question(NamedTuple):
    """What is asked; ``memory_bytes``: None for what a rank has."""

    global_batch: int
    clip: bool
    time_limit_s: float
    gauge_s: float
    memory_bytes: int | None


def _made(
    ranks: Ranks,
    measured: _Measured,
    of_model: list[Any],
    question: _Question,
    folder: Path,
    tell: Callable[[str], None],
) -> tuple[Path, Plan]:
    """The plan and its file: what the folder has, or else measured, solved and gauged here."""
    effort = QUICK if question.memory_bytes is None else QUICK._replace(spare=0.0)
    profile_path = folder / f"{_hash([*of_model, *effort])}.profile.json"
    plan_path = folder / f"{_hash([*of_model, *question])}.plan.json"
    profile = _kept(ranks, profile_path, Profile)
    if profile is None:
        tell(f"auto: measuring {measured.workload.name} and the links of {ranks.size} ranks")
        mesh, names = default_mesh()
        profile = measure(
            measured.workload,
            mesh=mesh,
            tier_names=names,
            micro_batches=[measured.size],
            dtype=measured.dtype,
            optimizer=measured.optimizer,
            progress=lambda text, fraction: None,
            effort=effort,
        )
        if measured.state is not None:
            state, temporary = measured.state
            of_element = {"state_per_element": state, "temporary_per_element": temporary}
            profile = profile.replaced(optimizer=profile.optimizer.model_copy(update=of_element))
        _keep(ranks, profile, profile_path)
    plan = _kept(ranks, plan_path, Plan)
    if plan is None:
        tell("auto: planning")
        plan, rival = _planned(ranks, profile, question, profile_path, plan_path)
        if rival is not None and ranks.size > 1:
            plan = _gauged(measured.workload, plan, rival, question.gauge_s, tell)
        _keep(ranks, plan, plan_path)
    return plan_path, plan


def _state(
    kind: type[Optimizer], dtype: str, ranks: Ranks, arguments: Mapping[str, Any]
) -> tuple[int, float] | None:
    """Tensors and temporaries per element of an optimizer with the caller's arguments, where those matter:
    momentum and amsgrad do. Of Muon it is its matrices' that matter, whatever is said for the rest."""
    of_dtype = getattr(torch, dtype, None)
    if kind is Muon or not isinstance(of_dtype, torch.dtype):  # which is refused when it is to be measured
        return None
    groups = arguments.get("params")
    first = groups[0] if isinstance(groups, list | tuple) and groups else None
    given = {**arguments, **(first if isinstance(first, Mapping) else {})}
    matter = inspect.signature(kind).parameters.keys() - _HOW
    asked = {name: value for name, value in given.items() if name in matter}
    if not asked:
        return None
    name = NAMES[kind]
    found = footprint(name, of_dtype, ranks.device, **asked)
    return None if found == footprint(name, of_dtype, ranks.device) else found


def _workload(model: nn.Module, sample: Any, loss: Loss | None) -> Workload:
    """The model that is there, as one to measure: its copies, on the sample's sequences over and over."""
    if loss is None and not (isinstance(sample, Mapping) and "labels" in sample):
        raise UserError("auto: the sample has no labels, so loss=… has to say what is trained on")

    def batch(count: int, generator: torch.Generator) -> object:
        return tree_map_only(Tensor, lambda t: t[torch.arange(count, device=t.device) % len(t)], sample)

    return Workload(
        name=type(model).__name__,
        build=partial(copy.deepcopy, model),
        batch=batch,
        loss=loss or _own_loss,
        seq_len=_length(sample),
        vocab=None,
    )


def _rule(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> MatrixRule:
    """Which parameters are matrices: by the rule, and where the caller's groups say otherwise."""
    units = find_units(model)
    names = {id(parameter): name for unit in units for name, parameter in unit.parameters}
    hidden = named(MatrixRule(), units)
    said: dict[str, list[str]] = {"muon": [], "adamw": []}
    for group in groups:
        for parameter in group["params"]:
            method, name = group.get("method"), names.get(id(parameter), "")
            if method not in said or not (name and parameter.requires_grad):
                continue
            if method == "muon" and not 2 <= parameter.ndim <= 3:
                raise UserError(
                    f"auto: {name} is in a group of Muon's, and has the shape {tuple(parameter.shape)}; "
                    "hzplan.Muon.of(model) makes a group of matrices and one of all others"
                )
            if (method == "muon") != (name in hidden):
                said[method].append(escape(name))
    return MatrixRule(tuple(said["muon"]), tuple(said["adamw"]))


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    found: Tensor = model(**batch).loss
    return found


def _tensors(sample: Any) -> list[Tensor]:
    found = [leaf for leaf in tree_leaves(sample) if isinstance(leaf, Tensor)]
    if not found or any(tensor.dim() == 0 for tensor in found):
        raise UserError("auto: the sample has to be tensors [sequences, …]")
    return found


def _sequences(sample: Any) -> int:
    counts = {len(tensor) for tensor in _tensors(sample)}
    if len(counts) != 1 or 0 in counts:
        raise UserError(
            f"auto: the sample's tensors have {sorted(counts)} sequences; all need the same number"
        )
    return counts.pop()


def _length(sample: Any) -> int:
    """Tokens in a sequence: the second size of whole numbers, 1 where there are none."""
    tokens = [t for t in _tensors(sample) if t.dim() > 1 and not t.is_floating_point()]
    return max((tensor.shape[1] for tensor in tokens), default=1)


def _of_model(
    ranks: Ranks, model: nn.Module, sample: Any, loss: Loss | None, measured: _Measured
) -> list[Any]:
    """What a measurement depends on."""
    device = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else platform.processor()
    return [
        f"{type(model).__module__}.{type(model).__qualname__}",
        [(n, [*p.shape], str(p.dtype), p.requires_grad) for n, p in model.named_parameters()],
        [(n, [*b.shape], str(b.dtype)) for n, b in model.named_buffers()],
        [([*t.shape], str(t.dtype)) for t in _tensors(sample)],
        None if loss is None else _of_loss(loss),
        None if measured.workload.matrices is None else [*astuple(measured.workload.matrices)],
        *(measured.dtype, measured.optimizer, measured.state, str(default_mesh()[0]), ranks.backend),
        *(device, os.cpu_count(), torch.get_num_threads()),
        *(sorted(ranks.gather(platform.node())), torch.__version__, __version__),
    ]


def _of_loss(loss: Loss) -> list[Any]:
    """Its name, and what it does: many are lambdas."""
    loss = inspect.unwrap(loss)
    code = getattr(loss, "__code__", None)
    does = [] if code is None else [code.co_code.hex(), *code.co_names]
    return [getattr(loss, "__qualname__", type(loss).__qualname__), *does]


def _hash(what: list[Any]) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def _folder(cache: str | Path | None) -> Path:
    given = cache or os.environ.get(FOLDER)
    return Path(given) if given else Path.home() / ".cache" / "hzplan"


def _kept(ranks: Ranks, path: Path, kind: type[Kept]) -> Kept | None:
    """What rank 0 finds in the folder, on every rank; None where there is nothing."""
    found: Kept | None = None
    refused = None
    if ranks.rank == 0:
        try:
            found = kind.load(path) if path.exists() else None
        except (OSError, UserError) as error:
            refused = f"{error}; remove it, and it is made again"
    found, refused = ranks.share((found, refused))
    if refused is not None:
        raise UserError(refused)
    return found


def _keep(ranks: Ranks, document: Profile | Plan, path: Path) -> None:
    """Write it on rank 0; every rank goes on when it is there."""
    refused = None
    if ranks.rank == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            document.save(path)
        except (OSError, UserError) as error:
            refused = f"auto: {path} cannot be written: {error}; say another folder with cache=…"
    if (refused := ranks.share(refused)) is not None:
        raise UserError(refused)


def _planned(
    ranks: Ranks,
    profile: Profile,
    question: _Question,
    profile_path: Path,
    plan_path: Path,
) -> tuple[Plan, Rival | None]:
    """Solved on rank 0, the same on every rank."""
    from hzplan.solver.emit import emit  # only where there is something to solve: imports take seconds
    from hzplan.solver.solve import Request, Solved, solve

    request = Request(
        question.memory_bytes or budget_of(profile),
        question.global_batch,
        clip=question.clip,
        time_limit_s=question.time_limit_s,
    )
    plan: Plan | None = None
    rival: Rival | None = None
    refused = ""
    failed: Exception | None = None
    if ranks.rank == 0:
        try:
            outcome = solve(profile, request)
            if isinstance(outcome, Solved):
                write = partial(emit, profile, request, profile_path=profile_path, plan_path=plan_path)
                plan = write(outcome)
                for row in sorted(outcome.rows, key=lambda row: -row.found.step_s):
                    known = row.name in PEERS and row.fits and not row.found.modes.recompute
                    if known and row.found.levels != outcome.best.levels:
                        rival = Rival(row.name, write(_of(outcome, row.found)))
            else:
                refused = "auto: no plan fits; give more memory_bytes, more ranks, or a smaller sample"
        except UserError as error:
            refused = f"auto: {error}"
        except Exception as error:  # the others wait for an answer
            failed, refused = error, f"auto: rank 0 failed: {one_line(error)}"
    plan, rival, refused = ranks.share((plan, rival, refused))
    if failed is not None:
        raise failed
    if plan is None:
        raise NoPlanFits(refused)
    return plan, rival


def _of(outcome: Solved, one: Evaluation) -> Solved:
    """Another plan than the best with what is proven of it: that none is faster than the bound."""
    bound = outcome.bound_ns
    return replace(outcome, best=one, status="feasible", replayed=None, in_order_bound_ns=bound)


def _gauged(
    workload: Workload, plan: Plan, rival: Rival, limit_s: float, tell: Callable[[str], None]
) -> Plan:
    """The plan, or the rival's where it is not surely faster than torch's own; every rank calls it."""
    from hzplan.peers import OURS, makers
    from hzplan.peers.compare import TRAINED, compare
    from hzplan.peers.contender import Setting
    from hzplan.peers.paired import MIN_ROUNDS
    from hzplan.training.batches import SyntheticBatches

    peer = PEERS[rival.scheme]
    steps = TRAINED + 2 * MIN_ROUNDS
    seconds = steps * (plan.predicted.step_s + rival.plan.predicted.step_s)
    if seconds > limit_s:
        tell(f"auto: not trained beside torch's {peer}, which would take {seconds:.0f} s (gauge_s)")
        return plan
    tell(f"auto: training the plan beside torch's {peer}, {steps} steps each")
    data = SyntheticBatches(workload, plan.batch.micro_batch, 0)
    setting = Setting(plan, workload, data, lr=1e-4, seed=0)
    made = makers(setting, dict.fromkeys([peer]))
    asked = {name: made[name] for name in (OURS, peer)}
    found = compare(asked, rounds=MIN_ROUNDS, steps_per_round=1)
    if peer in found.absent:
        tell(f"auto: torch's {peer} did not train: {found.absent[peer]}")
        return plan
    ratio = found.ratio(peer, OURS)
    said = f"auto: torch's {peer} takes {ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) of its time"
    if ratio.low > 1:
        tell(said)
        return plan
    tell(f"{said}: {rival.scheme} it is, as a plan" + ("; torch's own is faster here" * (ratio.high < 1)))
    return rival.plan


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _to_nobody(text: str) -> None:
    pass
