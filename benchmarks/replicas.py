"""Groups that do not wait for each other, all in one process: losses by step, without any link.

The mathematics is the runtime's own (``hzplan.runtime.relaxed.rules``), on units laid in flat buffers as
there; a group is one model, so what a group's ranks do among themselves is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hzplan.core.relaxed import Policy, part_bounds, parts_of_units
from hzplan.models.units import find_units
from hzplan.models.workload import Workload
from hzplan.runtime.relaxed.rules import Slice
from hzplan.training.data import Corpus, heldout_windows, sample

CLIP, WARM_UP = 1.0, 100
ANOTHER_SEED = 1_000_003
"""Added for each group, as in ``hzplan run``."""


class Flat:
    """A model whose units' parameters lie in flat buffers [elements]."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.model = model
        self.units: dict[str, Tensor] = {}
        for unit in find_units(model):
            if not unit.parameters:
                continue
            flat = torch.cat([p.detach().reshape(-1) for _, p in unit.parameters])
            start = 0
            for _, parameter in unit.parameters:
                parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
                start += parameter.numel()
            self.units[unit.name] = flat
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


@dataclass
class Replicas:
    """``groups`` of ``sequences`` each a step; ``policy``: None where gradients are averaged in every step.

    ``lr`` is reached after WARM_UP steps and kept.
    """

    workload: Workload
    corpus: Corpus
    groups: int
    sequences: int
    policy: Policy | None
    lr: float
    seed: int
    models: list[Flat] = field(init=False)

    def __post_init__(self) -> None:
        self.models = []
        for _ in range(self.groups if self.policy else 1):
            torch.manual_seed(self.seed)
            self.models.append(Flat(self.workload.build(), self.lr))
        self._slices = [
            {name: Slice(self.policy, flat) for name, flat in one.units.items()}
            for one in self.models
            if self.policy
        ]
        self._sent: dict[int, list[dict[str, Tensor]]] = {}
        units = self.models[0].units
        self._part_of = (
            parts_of_units({n: f.nbytes for n, f in units.items()}, self.policy.timetable.parts)
            if self.policy is not None and self.policy.rule == "periodic"
            else None
        )
        windows = heldout_windows(self.corpus.heldout, self.workload.seq_len, 64)
        self._heldout = windows.split(16)

    def losses(self, steps: int) -> Iterator[float]:
        """The mean loss of all groups in each step."""
        for step in range(steps):
            rate = self.lr * min(1.0, (step + 1) / WARM_UP)
            of_groups = []
            for group, one in enumerate(self.models):
                for options in one.optimizer.param_groups:
                    options["lr"] = rate
                loss = self.workload.loss(one.model, self._batch(step, group))
                loss.backward()
                nn.utils.clip_grad_norm_(one.model.parameters(), CLIP, foreach=True)
                one.optimizer.step()
                one.optimizer.zero_grad()
                of_groups.append(float(loss.detach()))
            self._exchange(step + 1)
            yield sum(of_groups) / len(of_groups)

    def _batch(self, step: int, group: int) -> Tensor:
        count = self.sequences if self.policy else self.sequences * self.groups
        return sample(
            self.corpus.train,
            first=step * count,
            count=count,
            seq_len=self.workload.seq_len,
            seed=self.seed + group * ANOTHER_SEED,
        )

    @torch.no_grad()
    def _exchange(self, updates: int) -> None:
        if self.policy is None:
            return
        table = self.policy.timetable
        due, sent = table.due(updates), table.sent(updates)
        if table.delay and due is not None:
            self._apply(due)
        if sent is not None:
            places = list(self._places(table.part(sent)))
            self._sent[sent] = [
                {name: slices[name].send(one.units[name], low, high).clone() for name, low, high in places}
                for one, slices in zip(self.models, self._slices, strict=True)
            ]
            if not table.delay:
                self._apply(sent)

    def _apply(self, number: int) -> None:
        assert self.policy is not None
        sent, table = self._sent.pop(number), self.policy.timetable
        for name, low, high in self._places(table.part(number)):
            mean = sum(of[name] for of in sent) / len(sent)
            assert isinstance(mean, Tensor)
            for one, slices in zip(self.models, self._slices, strict=True):
                slices[name].apply(one.units[name], mean, low, high)

    def _places(self, part: int) -> Iterator[tuple[str, int, int]]:
        assert self.policy is not None
        for name, flat in self.models[0].units.items():
            if self._part_of is None:
                yield name, *part_bounds(flat.numel(), part, self.policy.timetable.parts)
            elif self._part_of[name] == part:
                yield name, 0, flat.numel()

    @torch.no_grad()
    def heldout(self) -> float:
        """The held-out loss of the mean of all groups' parameters."""
        first = self.models[0]
        kept = {name: flat.clone() for name, flat in first.units.items()}
        for name, flat in first.units.items():
            flat.copy_(torch.stack([one.units[name] for one in self.models]).mean(0))
        first.model.eval()
        loss = sum(float(self.workload.loss(first.model, windows)) for windows in self._heldout)
        first.model.train()
        for name, flat in first.units.items():
            flat.copy_(kept[name])
        return loss / len(self._heldout)
