"""Accelerate's loops under a plan: ``PlannedAccelerator(plan=…)`` in the place of ``Accelerator()``.

The loop stays as it is: ``prepare``, ``accumulate``, ``backward``, ``clip_grad_norm_``, ``save_state`` and
``load_state``. Accumulation is the plan's.
"""

from __future__ import annotations

import re
import uuid
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, broadcast_object_list
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

import hzplan
from hzplan.checkpoint.checkpoints import Checkpoints
from hzplan.checkpoint.folder import listed
from hzplan.errors import UserError, one_line
from hzplan.formats.base import write_text
from hzplan.formats.plan import Plan
from hzplan.integrations.shards import groups_of, hand_over, whole_weights
from hzplan.runtime.apply import parallelize
from hzplan.runtime.optimizer import ShardedOptimizer

FOLDER = "hzplan"
"""Of a saved state's folder, where the shards of weights and optimizer state are."""
NAME = "hzplan.id"
"""Of a saved state's folder the file, written last, that says which shards the rest belongs to."""
OTHERS = {
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.FSDP: "FSDP",
    DistributedType.MEGATRON_LM: "Megatron-LM",
}


class PlannedAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator that shards the model and its optimizer as a plan says.

    A saved state has whole weights, as any program reads them, and in a folder of its own what training goes
    on from, under any plan and number of ranks.
    """

    step: int
    gradient_accumulation_steps: int

    def __init__(self, *arguments: Any, plan: Plan | str | Path, auto: Any = None, **keywords: Any) -> None:
        """``plan``: or its file; "auto": made in this job, of what is measured here, for the batches of the
        first data loader that is prepared with the model and for ``gradient_accumulation_steps``; ``auto``:
        a dict of what ``hzplan.auto`` is to be told besides. UserError for what a plan cannot be beside."""
        super().__init__(*arguments, **keywords)
        if (other := OTHERS.get(self.distributed_type)) is not None:
            raise UserError(
                f"accelerate is configured for {other}, and the plan shards the model; configure none"
            )
        if self.mixed_precision not in (None, "no"):
            raise UserError(
                f"mixed_precision={self.mixed_precision}: the plan says what is computed in; leave it out, "
                "and profile with --dtype bf16 for bfloat16"
            )
        if auto is not None and plan != "auto":
            raise UserError('auto= is for plan="auto"; leave it out')
        self.plan: Plan | None = None
        self._asked = dict(auto or {})
        self._planned: nn.Module | None = None
        self._sharded: ShardedOptimizer | None = None
        self._theirs: Optimizer | None = None
        self._checkpoints: Checkpoints | None = None
        self._planned_steps = self._accumulating = False
        if plan != "auto":
            self._follow(plan if isinstance(plan, Plan) else Plan.load(plan))

    def _follow(self, plan: Plan) -> None:
        planned = plan.batch.accumulation
        if self.gradient_accumulation_steps not in (1, planned):
            raise UserError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}, and the plan accumulates "
                f"{planned}; leave it out, or solve for another global batch"
            )
        self._planned_steps = self.gradient_accumulation_steps != planned
        self.gradient_accumulation_steps, self.plan = planned, plan

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """As Accelerator's; the model and its optimizer are prepared in one call, once."""
        for one in args:
            self._take_over(one)
        models = [one for one in args if isinstance(one, nn.Module)]
        optimizers = [one for one in args if isinstance(one, Optimizer)]
        if not models and not optimizers:
            return super().prepare(*args, device_placement=device_placement)
        if (len(models), len(optimizers)) != (1, 1) or self._sharded is not None:
            again = ", after those of before" if self._sharded is not None else ""
            raise UserError(
                f"prepare has {len(models)} models and {len(optimizers)} optimizers{again}; a plan is of one "
                "model and its optimizer, prepared in one call; what only runs need not be prepared"
            )
        (model,), (theirs,) = models, optimizers
        loaders = [one for one in args if isinstance(one, DataLoader)]
        sharded = self._shard(model, theirs, loaders)
        self._planned, self._sharded, self._theirs = model, sharded, theirs
        for one in args:
            self._take_over(one)
        replaced = [sharded if one is theirs else one for one in args]
        placed = list(device_placement or [None] * len(args))
        for number, one in enumerate(replaced):
            if one is model or one is sharded:
                placed[number] = False
        return super().prepare(*replaced, device_placement=placed)

    def _take_over(self, one: Any) -> None:
        """A scheduler of the optimizer that there was before."""
        if self._sharded is not None and isinstance(one, LRScheduler) and one.optimizer is self._theirs:
            hand_over(one, self._sharded)

    def _shard(self, model: nn.Module, theirs: Optimizer, loaders: list[Any]) -> ShardedOptimizer:
        if theirs.state:
            raise UserError(
                "the optimizer has state already, and shards begin without; load_state() after prepare, or "
                "hzplan.load_dcp, brings it back"
            )
        if self.device_placement and any(p.device != self.device for p in model.parameters()):
            try:
                model.to(self.device)
            except RuntimeError as error:  # of what was made without values
                raise UserError(f"the model cannot be moved to {self.device}: {one_line(error)}") from None
        sharded = self._cut(model, theirs, loaders)
        theirs.param_groups = sharded.param_groups  # for whoever sets rates there
        return sharded

    def _cut(self, model: nn.Module, theirs: Optimizer, loaders: list[Any]) -> ShardedOptimizer:
        if self.plan is not None:
            planned, ranks = self.plan.batch.micro_batch, self.num_processes if self.split_batches else 1
            sizes = [loader.batch_size // ranks for loader in loaders if loader.batch_size]
            if sizes and planned not in sizes:
                warnings.warn(
                    f"the plan's micro-batch is {planned}, and a rank's batches of the data loader have "
                    f"{sizes[0]}: memory and seconds will be others",
                    stacklevel=3,
                )
            return parallelize(model, self.plan, type(theirs), params=groups_of(theirs))[1]
        if not loaders:
            raise UserError(
                'plan="auto": prepare the data loader in the same call; the plan is for its batches'
            )
        loader = super().prepare_data_loader(loaders[0])
        self._dataloaders.remove(loader)
        sample = next(iter(loader))
        sample = dict(sample) if isinstance(sample, Mapping) else sample
        sequences = max(len(one) for one in tree_leaves(sample) if isinstance(one, Tensor) and one.dim())
        batch = sequences * self.gradient_accumulation_steps * self.num_processes
        asked = {"global_batch": batch, "sample": sample, "params": groups_of(theirs), **self._asked}
        _, sharded, plan = hzplan.auto(model, type(theirs), **asked)
        self._follow(plan)
        return sharded

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """What is in shards is wrapped in nothing."""
        if model is self._planned:
            device_placement, evaluation_mode = False, True
        return super().prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Refused for one that the plan is not for."""
        if optimizer is not self._sharded and not isinstance(optimizer, AcceleratedOptimizer):
            raise UserError("prepare_optimizer: prepare the model and its optimizer in one call of prepare")
        return super().prepare_optimizer(optimizer, device_placement)

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """As Accelerator's."""
        self._accumulating = True
        try:
            with super().accumulate(*models):
                yield
        finally:
            self._accumulating = False

    def backward(self, loss: Tensor, **keywords: Any) -> None:
        """As Accelerator's: the loss is divided by how many micro-batches are accumulated."""
        if self._planned_steps and not self._accumulating:
            raise UserError(
                f"backward: the plan accumulates {self.gradient_accumulation_steps} micro-batches; put "
                "forward, backward and step into `with accelerator.accumulate(model):`"
            )
        super().backward(loss, **keywords)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """By the norm of all gradients over all ranks, which the plan's optimizer knows."""
        if self._sharded is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        if not self.sync_gradients:
            raise UserError("clip_grad_norm_: clip where a step ends: `if accelerator.sync_gradients:`")
        if norm_type != 2:
            raise UserError(
                f"clip_grad_norm_: norm_type={norm_type}: gradients in shards have the norm of type 2"
            )
        return self._sharded.clip_grad_norm_(max_norm)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Refused."""
        if self._sharded is None:
            super().clip_grad_value_(parameters, clip_value)
            return
        raise UserError("clip_grad_value_: gradients are in shards; clip by the norm")

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Tensor]:
        """Whole weights, on rank 0; empty on others. Every rank calls it. Of tied weights Accelerate saves
        one, where they are in an OrderedDict."""
        bare = self.unwrap_model(model, keep_torch_compile=False)
        if self._sharded is None or self._planned is None or bare is not self._planned:
            found: dict[str, Tensor] = super().get_state_dict(model, unwrap)
            return found
        return OrderedDict(whole_weights(self._planned, self._sharded))

    def save_state(self, output_dir: str | None = None, *arguments: Any, **keywords: Any) -> Any:
        """As Accelerator's, with the optimizer's state in shards. Every rank calls it."""
        if self._sharded is None or self._planned is None:
            return super().save_state(output_dir, *arguments, **keywords)
        if self._sharded.engine.step_state.open:
            raise UserError("save_state: save between steps, `if accelerator.sync_gradients:` after step()")
        named = [uuid.uuid4().hex]
        broadcast_object_list(named)
        if output_dir is not None and self.is_main_process:
            # What is overwritten next belongs to none, until all is there.
            (Path(output_dir).expanduser() / NAME).unlink(missing_ok=True)
        with self._without("_optimizers"):
            location = super().save_state(output_dir, *arguments, **keywords)
        folder = Path(location) / FOLDER
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(folder, keep=1)
        self._checkpoints.move_to(folder)
        self._checkpoints.save(self._planned, self._sharded, self.step, extra={"state": named[0]})
        self._checkpoints.wait()
        if self.is_main_process:
            write_text(Path(location) / NAME, named[0])
        self.wait_for_everyone()
        return location

    def load_state(self, input_dir: str | None = None, *arguments: Any, **keywords: Any) -> None:
        """As Accelerator's; weights and the optimizer's state come out of the shards."""
        if self._sharded is None or self._planned is None:
            super().load_state(input_dir, *arguments, **keywords)
            return
        folder = Path(input_dir).expanduser() if input_dir is not None else self._newest()
        loaded = Checkpoints(folder / FOLDER).load(self._planned, self._sharded)
        if loaded is None:
            raise UserError(
                f"{folder}: not of a planned run (it has no folder {FOLDER}); begin with its weights, loaded "
                "before prepare"
            )
        path = folder / NAME
        if "state" in loaded.extra and loaded.extra["state"] != (path.read_text() if path.exists() else ""):
            raise UserError(
                f"{folder}: a save was interrupted, and its schedulers and samplers are of another step than "
                "the shards; load another state"
            )
        with self._without("_models", "_optimizers"):
            super().load_state(str(folder), *arguments, **keywords)
        # Also where other ranks saved it, or under another plan: between two steps.
        self.step = loaded.position.step - loaded.position.step % self.gradient_accumulation_steps

    def _newest(self) -> Path:
        """The state that was saved last under automatic names, and whole."""
        if not self.project_configuration.automatic_checkpoint_naming:
            raise UserError("load_state: say which folder, or save under automatic names")
        folders = Path(self.project_dir or ".").glob("checkpoints/*")
        numbered = [(int(last[0]), one) for one in folders if (last := re.findall(r"\d+$", one.name))]
        numbered = [(number, one) for number, one in numbered if listed(one / FOLDER)]
        if not numbered:
            raise UserError("load_state: nothing was saved yet under automatic names")
        return max(numbered)[1]

    @contextmanager
    def _without(self, *lists: str) -> Iterator[None]:
        """While Accelerator's own functions save and load what is not in shards."""
        kept = {name: getattr(self, name) for name in lists}
        for name in lists:
            setattr(self, name, [])
        try:
            yield
        finally:
            for name, value in kept.items():
                setattr(self, name, value)
