"""Hugging Face's Trainer under a plan: ``PlannedTrainer(…, plan="plan.json")``, in the place of ``Trainer``.

Everything else is said by Trainer's own arguments: the optimizer, clipping (``max_grad_norm``), saving and
resuming, evaluation, logging. Micro-batch and accumulation are the plan's.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments
from transformers.trainer import SCHEDULER_NAME

import hzplan
from hzplan.checkpoint.checkpoints import Checkpoints
from hzplan.errors import UserError
from hzplan.formats.plan import Plan
from hzplan.integrations.shards import groups_of, hand_over
from hzplan.runtime.apply import full_parameters, parallelize
from hzplan.runtime.optimizer import ShardedOptimizer

FOLDER = "hzplan"
"""Of a checkpoint's folder, where the shards of weights and optimizer state are."""


class PlannedTrainer(Trainer):
    """A Trainer whose model and optimizer are a plan's shards.

    Checkpoints have whole weights, as ``from_pretrained`` reads them, and in a folder of their own what
    training goes on from, under any plan and number of ranks.
    """

    model: Any  # Trainer has them as ones that may be None
    lr_scheduler: Any

    def __init__(
        self, model: Any, args: TrainingArguments, *arguments: Any, plan: Any, **keywords: Any
    ) -> None:
        """``plan``: a Plan, or its file; "auto": made in this job, of what is measured here (``hzplan.auto``)
        for the micro-batch and accumulation of ``args``. UserError for what a plan cannot be beside."""
        if args.fsdp or args.deepspeed:
            raise UserError(
                "the arguments ask for FSDP or DeepSpeed, and the plan shards the model; leave them out"
            )
        if args.load_best_model_at_end:
            raise UserError(
                "load_best_model_at_end: shards are not loaded in training; load the best one afterwards"
            )
        if args.fp16:
            raise UserError(
                "fp16: plans compute in fp32 or bf16; leave fp16 out, and profile with --dtype bf16"
            )
        self.plan: Plan | None = None
        if plan != "auto":
            self.plan = plan if isinstance(plan, Plan) else Plan.load(plan)
            if args.gradient_accumulation_steps not in (1, self.plan.batch.accumulation):
                raise UserError(
                    f"gradient_accumulation_steps={args.gradient_accumulation_steps}, and the plan "
                    f"accumulates {self.plan.batch.accumulation}; leave it out, or solve for another global "
                    "batch"
                )
            args.per_device_train_batch_size = self.plan.batch.micro_batch
            args.gradient_accumulation_steps = self.plan.batch.accumulation
        self._sharded: ShardedOptimizer | None = None
        self._checkpoints: Checkpoints | None = None
        super().__init__(model, args, *arguments, **keywords)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Shard the model; what accelerate is told is ready, it leaves as it is."""
        given = self.optimizer
        if self._sharded is not None and given is not None:  # of an earlier train()
            return given
        if self._sharded is not None:  # of an earlier model, as model_init makes one for each train()
            self._sharded.engine.close()
            self._sharded = None
        kind: Any
        if given is None:
            kind, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(
                self.args, self.model
            )
            options = {"params": self._groups(), **options}
        else:
            kind, options = type(given), {"params": groups_of(given)}
        if self.plan is None:
            args = self.args
            batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
            sample = next(iter(self.get_train_dataloader()))
            _, self._sharded, self.plan = hzplan.auto(
                self.model, kind, global_batch=batch, sample=dict(sample), clip=True, **options
            )
        else:
            _, self._sharded = parallelize(self.model, self.plan, kind, **options)
        if given is not None and self.lr_scheduler is not None:
            hand_over(self.lr_scheduler, self._sharded)
        self.accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)
        self.optimizer = self.accelerator.prepare(self._sharded, device_placement=[False])
        return self.optimizer

    def _groups(self) -> list[dict[str, Any]]:
        """What decays, and what does not, as Trainer has them."""
        decayed = set(self.get_decay_parameter_names(self.model))
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for n, p in trained if (n in decayed) is decays], "weight_decay": weight_decay}
            for decays, weight_decay in ((True, self.args.weight_decay), (False, 0.0))
        ]
        return [group for group in groups if group["params"]]

    def _clip_grad_norm(self, model: Any) -> Tensor:
        assert self._sharded is not None, "training has begun"
        return self._sharded.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Tensor | None = None) -> float | None:
        return None if grad_norm is None else float(grad_norm)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Whole weights, from rank 0; every rank calls it."""
        if self._sharded is None:
            super().save_model(output_dir, _internal_call)
            return
        weights: dict[str, Tensor] = full_parameters(self._sharded, rank0_only=True) or {}
        if self.args.should_save:
            kept = {n: b for n, b in self.model.named_buffers() if _is_kept(self.model, n)}
            self._save(output_dir or self.args.output_dir, state_dict={**kept, **weights})

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self._sharded is not None, "training has begun"
        folder = Path(output_dir) / FOLDER
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(folder, keep=1)
        self._checkpoints.move_to(folder)
        self._checkpoints.save(self.model, self._sharded, self.state.global_step)
        self._checkpoints.wait()
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights come with the optimizer's state."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self._sharded is not None, "training has begun"
        if Checkpoints(Path(checkpoint) / FOLDER).load(self.model, self._sharded) is None:
            raise UserError(
                f"{checkpoint}: not one of a planned run (it has no folder {FOLDER}); begin with its "
                "weights: from_pretrained, and train without resume_from_checkpoint"
            )
        path = os.path.join(checkpoint, SCHEDULER_NAME)
        if os.path.isfile(path):
            self.lr_scheduler.load_state_dict(torch.load(path, weights_only=True))


def _is_kept(model: torch.nn.Module, name: str) -> bool:
    """Whether a state dict has a buffer."""
    path, _, last = name.rpartition(".")
    return last not in model.get_submodule(path)._non_persistent_buffers_set
