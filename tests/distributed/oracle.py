"""Training in shards against one process: the cases, and what runs on the ranks."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.recompute import HOST, Recomputed
from hzplan.core.schedule import MessageOrder, Use
from hzplan.models.gpt import GPT, GPTConfig
from hzplan.models.hooks import attach
from hzplan.models.units import find_units, master_dtype_of
from hzplan.models.workload import next_token_loss
from hzplan.runtime.apply import Choice, apply, full_parameters
from hzplan.runtime.optimizer import ShardedOptimizer
from tests.distributed.lean import lean

VOCAB, LENGTH, ROWS = 32, 8, 2


@dataclass(frozen=True)
class Case:
    """One way to train. ``levels``: the triple of every tensor, or None for a random one each (``seed``).

    ``dtype``: what the model computes in, ``reduce_dtype``: what gradients travel in. ``lean``: nothing is
    gathered that is not read, small units travel with others. ``offload``: most units keep their optimizer
    state in the host's memory, some layers their activations. ``compiled``: every layer is, by torch.compile.
    """

    mesh: str
    levels: tuple[int, int, int] | None = None
    accumulation: int = 1
    prefetch: int = 1
    steps: int = 10
    clip: bool = True
    dtype: str = "float64"
    optimizer: str = "AdamW"
    frozen: bool = False
    groups: bool = False
    seed: int = 0
    lean: bool = False
    reduce_dtype: str | None = None
    offload: bool = False
    compiled: bool = False
    device: str = "cpu"

    @property
    def name(self) -> str:
        """For pytest."""
        levels = "".join(map(str, self.levels)) if self.levels else f"random{self.seed}"
        more = "".join(f"-{word}" for word in ("offload", "compiled") if getattr(self, word) and self.on_gpu)
        return f"{self.mesh}-{levels}-acc{self.accumulation}-pre{self.prefetch}-{self.dtype}{more}"

    @property
    def on_gpu(self) -> bool:
        """Whether it trains on one."""
        return self.device != "cpu"


def legal(mesh: str) -> list[tuple[int, int, int]]:
    """Every legal triple, levels that add no shards included."""
    levels = range(Mesh.parse(mesh).levels + 1)
    return [(p, g, o) for o in levels for g in range(o + 1) for p in range(o + 1)]


def run_cases(payload: list[dict[str, Any]]) -> dict[str, list[float]]:
    """On every rank: each case's largest error of a loss, and of a weight tensor's norm."""
    return {case.name: list(compare(case)) for case in (Case(**fields) for fields in payload)}


def as_payload(cases: list[Case]) -> list[dict[str, Any]]:
    """Cases as JSON."""
    return [asdict(case) for case in cases]


def compare(case: Case) -> tuple[float, float]:
    """Train in shards and compare with one process; the same on every rank."""
    model, optimizer = sharded(case)
    losses = train(case, model, optimizer)
    weights = full_parameters(optimizer)
    optimizer.engine.close()
    expected_losses, expected = reference(case)
    return (
        worst([abs(a - b) for a, b in zip(losses, expected_losses, strict=True)]),
        worst([float((weights[name].cpu() - expected[name].cpu()).norm()) for name in expected]),
    )


def worst(errors: Sequence[float]) -> float:
    """The largest; not a number is infinitely wrong."""
    return max(error if error == error else 1e300 for error in errors)


def batch(step: int, micro_batch: int, rank: int) -> Tensor:
    """Different tokens for every step, micro-batch and rank."""
    generator = torch.Generator().manual_seed(1 + step * 10_000 + micro_batch * 100 + rank)
    return torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross entropy of the next token; in float32 where the model computes in bfloat16."""
    return next_token_loss(model, tokens.to(next(model.parameters()).device))


def fresh_model(case: Case) -> nn.Module:
    """The same initial values everywhere; for bfloat16 the master weights."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=VOCAB, layers=2, width=16, heads=2, seq_len=LENGTH))
    model = model.to(case.device, master_dtype_of(getattr(torch, case.dtype)))
    if case.frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad = not (name.startswith("layers.0.") or name.endswith("norm1.weight"))
    return model


def param_groups(case: Case, model: nn.Module) -> list[dict[str, Any]]:
    """One group, or two with different weight decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not case.groups:
        return [{"params": trained}]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]


def options(case: Case) -> dict[str, float]:
    """What the optimizer is called with."""
    return {"lr": 1e-2} if case.optimizer != "SGD" else {"lr": 1e-1, "momentum": 0.9}


def uses_of(case: Case) -> tuple[Use, ...]:
    """The recorded uses of one forward and backward."""
    model, found = fresh_model(case), []

    class Recorder:
        def enter(self, unit: str, phase: Any) -> None:
            found.append(Use(unit, phase))

        def gradient(self, parameter: nn.Parameter) -> None:
            pass

        def backward_end(self) -> None:
            pass

    detach = attach(find_units(model), Recorder())
    loss_of(model, batch(0, 0, 0)).backward()
    detach()
    return tuple(found)


def choice(case: Case) -> Choice:
    """The case as the runtime takes it."""
    mesh, rng = Mesh.parse(case.mesh), random.Random(case.seed)
    triples = [Levels(*triple) for triple in legal(case.mesh)]
    names = [name for name, _ in fresh_model(case).named_parameters()]
    levels = {name: Levels(*case.levels) if case.levels else rng.choice(triples) for name in names}
    if (
        mesh.whole is not None
        and case.reduce_dtype is None
        and random.Random(f"flat {case.name}").random() < 0.5
    ):
        levels = {name: one._replace(flat=one.three == (0, 0, 0)) for name, one in levels.items()}
    uses, requires = lean_uses() if case.lean else (uses_of(case), {})
    units = dict.fromkeys(use.unit for use in uses)
    on_host = {"layers.0", "layers.1"} if case.seed % 3 else {"layers.0"}
    replicated = all(mesh.shards[max(of.grad, of.optim)] == 1 for of in levels.values())
    return Choice(
        mesh,
        levels,
        uses,
        case.prefetch,
        case.accumulation,
        case.clip,
        case.dtype,
        case.reduce_dtype,
        requires=requires,
        offload=frozenset(unit for unit in units if case.offload and rng.random() < 0.7),
        recompute=Recomputed.of([unit for unit in units if unit in on_host] if case.offload else (), HOST),
        message_bytes=random.Random(case.name).choice((0, 0, 4096, 1 << 30)),  # a unit or two, or all
        message_order=order_of(case),
        local_norm=case.clip and replicated,
    )


def order_of(case: Case) -> MessageOrder | None:
    """A message order for every other of the cases without given levels."""
    rng = random.Random(f"order {case.seed}")
    if case.levels or rng.random() < 0.5:
        return None
    uses, _ = lean_uses() if case.lean else (uses_of(case), {})
    tiers = Mesh.parse(case.mesh).tiers
    ahead = (
        (unit, tuple(sorted(rng.randint(0, case.prefetch + 1) for _ in tiers)))
        for unit in dict.fromkeys(use.unit for use in uses)
    )
    return MessageOrder(tuple(ahead), rng.randint(0, 2 * case.prefetch))


@cache
def lean_uses() -> tuple[tuple[Use, ...], dict[str, Any]]:
    """The uses as the profiler writes them down, with small units joined to others."""
    model = fresh_model(Case("1"))
    uses, requires = lean(model, lambda: loss_of(model, batch(0, 0, 0)))
    assert [str(use) for use in uses if not use.reads] == ["b positions", "b embed"]
    # The head is tied to the embedding, so neither takes others along.
    assert requires["norm"] == ("norm", "layers.1") and requires["positions"] == ("positions", "layers.0")
    return uses, requires


def sharded(case: Case) -> tuple[nn.Module, ShardedOptimizer]:
    """The case's model and optimizer, parallelised."""
    model = fresh_model(case)
    if case.compiled:
        for layer in model.get_submodule("layers"):
            layer.compile(backend="aot_eager")
    return apply(
        model,
        choice(case),
        getattr(torch.optim, case.optimizer),
        params=param_groups(case, model),
        **options(case),
    )


def train(case: Case, model: nn.Module, optimizer: ShardedOptimizer) -> list[float]:
    """The mean loss over ranks and micro-batches of every step."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    losses = []
    for step in range(case.steps):
        total = 0.0
        for micro_batch in range(case.accumulation):
            loss = loss_of(model, batch(step, micro_batch, rank)) / case.accumulation
            loss.backward()
            total += float(loss.detach())
        if case.clip:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        losses.append(total)
    mean = torch.tensor(losses, dtype=torch.float64)
    if world > 1:
        dist.all_reduce(mean)
    return list(map(float, mean / world))


def reference(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """One process that sees every rank's data."""
    world = Mesh.parse(case.mesh).world
    same = (case.accumulation, case.steps, case.clip, case.dtype, case.optimizer, case.frozen, case.groups)
    return _reference(world, *same, case.device)


@cache
def _reference(
    world: int,
    accumulation: int,
    steps: int,
    clip: bool,
    dtype: str,
    optimizer_name: str,
    frozen: bool,
    groups: bool,
    device: str,
) -> tuple[list[float], dict[str, Tensor]]:
    case = Case(
        *("1", None, accumulation, 1, steps, clip, dtype, optimizer_name, frozen, groups), device=device
    )
    model = fresh_model(case)
    optimizer = getattr(torch.optim, optimizer_name)(param_groups(case, model), **options(case))
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for micro_batch in range(accumulation):
            for rank in range(world):
                loss = loss_of(model, batch(step, micro_batch, rank)) / (accumulation * world)
                loss.backward()
                total += float(loss.detach())
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return losses, copy.deepcopy(dict(model.named_parameters()))


def every_legal_case(*, whole: bool) -> Iterator[Case]:
    """float64: every triple × accumulation × prefetch (or one of each, in turns); float32: every triple."""
    for mesh in ("4", "2|2", "1|3"):
        for number, levels in enumerate(legal(mesh)):
            for accumulation in (1, 3) if whole else (1 + number % 2 * 2,):
                for prefetch in (1, 2) if whole else (1 + (number // 2) % 2,):
                    yield Case(mesh, levels, accumulation, prefetch, clip=prefetch == 1)
            yield Case(mesh, levels, accumulation=2, dtype="float32")


def on_device(device: str) -> Iterator[Case]:
    """Ranks that share one device: 1, 2 and 4 of them; compiled or not, offloaded or not; float64 too."""
    for mesh in ("1", "2", "2|2"):
        for dtype in ("float64", "float32", "bfloat16"):
            for seed, (compiled, offload) in enumerate(itertools.product((False, True), repeat=2)):
                yield Case(
                    *(mesh, None, 1 + seed % 2, 1 + seed // 2, 4),
                    dtype=dtype,
                    seed=seed,
                    compiled=compiled,
                    offload=offload,
                    device=device,
                )


def random_cases(number: int) -> Iterator[Case]:
    """Different levels for every tensor, frozen tensors, groups, SGD and offloaded state among them."""
    for seed in range(number):
        rng = random.Random(seed)
        yield Case(
            rng.choice(("4", "2|2", "2,2")),
            None,
            accumulation=rng.choice((1, 2, 3)),
            prefetch=rng.choice((1, 2, 3)),
            steps=4,
            clip=rng.random() < 0.5,
            optimizer=rng.choice(("AdamW", "AdamW", "SGD", "Adam")),
            frozen=rng.random() < 0.3,
            groups=rng.random() < 0.3,
            seed=seed,
            lean=rng.random() < 0.5,
            offload=seed % 2 == 0,
        )
