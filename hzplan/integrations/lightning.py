"""Lightning's Trainer under a plan: ``Trainer(strategy=PlannedStrategy("plan.json"), …)``.

Everything else is said as for any strategy: the module's own ``configure_optimizers``, and Trainer's
arguments for clipping, saving and resuming, validation, logging. Accumulation is the plan's.
``PlannedStrategy("auto")`` makes the plan in this job (``hzplan.auto``).
"""

from __future__ import annotations

import inspect
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

import hzplan
from hzplan.checkpoint.checkpoints import Checkpoints
from hzplan.checkpoint.entries import buffers
from hzplan.errors import UserError
from hzplan.formats.checkpoint import MODEL
from hzplan.formats.plan import Plan
from hzplan.integrations.shards import groups_of, hand_over, whole_weights
from hzplan.models.planned import planned_part
from hzplan.runtime.apply import parallelize
from hzplan.runtime.optimizer import ShardedOptimizer

SHARDS = ".hzplan"
"""What is added to a checkpoint's name, for the folder of shards of weights and optimizer state beside it."""
OF_DDP = frozenset({"process_group_backend", "timeout"})
OF_AUTO = frozenset(
    name
    for name, one in inspect.signature(hzplan.auto).parameters.items()
    if one.kind is one.KEYWORD_ONLY and name not in ("global_batch", "sample", "clip")
)
"""What the strategy does not know itself of what ``hzplan.auto`` can be told."""


class PlannedStrategy(DDPStrategy):
    """A strategy that shards the module's model and its one optimizer as a plan says.

    A checkpoint has whole weights, as ``load_from_checkpoint`` reads them, and a folder beside it what
    training goes on from, under any plan and number of ranks.
    """

    def __init__(self, plan: Plan | str | Path, **arguments: Any) -> None:
        """``plan``: or its file; "auto": made in this job, of what is measured here, for the data loader's
        micro-batches and ``accumulate_grad_batches``. ``arguments``: DDPStrategy's ``process_group_backend``
        and ``timeout``; with "auto" also what ``hzplan.auto`` takes (``memory_bytes``, ``dtype``, ``cache``,
        …), of which ``loss`` is by default the module's ``training_step``: where that has effects besides, or
        sends messages, say another."""
        asks = plan == "auto"
        if unknown := arguments.keys() - OF_DDP - (OF_AUTO if asks else frozenset()):
            of = 'PlannedStrategy("auto")' if min(unknown) in OF_AUTO else "DDP"
            raise UserError(f"PlannedStrategy: {min(unknown)} is for {of}; the plan says how to communicate")
        super().__init__(**{name: value for name, value in arguments.items() if name in OF_DDP})
        self._asked = {name: value for name, value in arguments.items() if name not in OF_DDP}
        self.plan: Plan | None = None
        if not asks:
            self.plan = plan if isinstance(plan, Plan) else Plan.load(plan)
        self._prefix = ""
        self._planned: nn.Module | None = None  # the part of the module that the plan is of
        self._sharded: ShardedOptimizer | None = None
        self._loaded_from: Path | None = None
        self._checkpoints: Checkpoints | None = None

    @property
    def precision_plugin(self) -> Precision:
        """Computes as the plan's model does."""
        return self._precision_plugin or _AsPlanned()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None and type(plugin) not in (Precision, _AsPlanned):
            raise UserError(
                f"precision={plugin.precision}: the plan says what is computed in; leave it out, and profile "
                "with --dtype bf16 for bfloat16"
            )
        self._precision_plugin = None if plugin is None else _AsPlanned()

    def setup(self, trainer: pl.Trainer) -> None:
        """Shard what is to be trained; what only runs is moved to its device."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if self._sharded is None:
            self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self._requeue_no_more()
            if self.plan is not None:
                self._accumulate(trainer, self.plan)
            self.setup_optimizers(trainer)
        for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            loop.inference_mode = False  # gathers write into buffers that backward uses too
        self.setup_precision_plugin()

    def _requeue_no_more(self) -> None:
        """Slurm's signal, at which Lightning saves and requeues, comes in the middle of a step, when there
        are no whole weights to be saved."""
        environment = self.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            environment.auto_requeue = False
            if self.global_rank == 0:
                warnings.warn(
                    "under a plan Lightning does not requeue a Slurm job at a signal: save with "
                    "ModelCheckpoint(every_n_train_steps=…, save_last=True), let Slurm requeue the job "
                    '(sbatch --requeue), and fit with ckpt_path="last"',
                    stacklevel=2,
                )

    @staticmethod
    def _accumulate(trainer: pl.Trainer, plan: Plan) -> None:
        planned = plan.batch.accumulation
        if trainer.accumulate_grad_batches not in (1, planned):
            raise UserError(
                f"accumulate_grad_batches={trainer.accumulate_grad_batches}, and the plan accumulates "
                f"{planned}; leave it out, or solve for another global batch"
            )
        trainer.accumulate_grad_batches = planned

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Put the sharded optimizer in the place of the module's own, and give it to the schedulers."""
        module = self.lightning_module
        assert module is not None
        if self._sharded is not None:
            raise UserError("the model is in shards already; fit again with a new Trainer and module")
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise UserError(f"configure_optimizers gives {len(self.optimizers)} optimizers; a plan has one")
        (theirs,) = self.optimizers
        groups = groups_of(theirs)
        if self.plan is None:
            self._planned = module
            self._sharded, self.plan = self._made(trainer, module, type(theirs), groups)
        else:
            self._prefix, self._planned = planned_part(module, self.plan)
            of_plan = {id(parameter) for parameter in self._planned.parameters()}
            for name, parameter in module.named_parameters():
                if parameter.requires_grad and id(parameter) not in of_plan:
                    raise UserError(
                        f"{name} is trained, and the plan does not have it; profile what has it too"
                    )
            _, self._sharded = parallelize(self._planned, self.plan, type(theirs), params=groups)
        self.optimizers = [self._sharded]
        for config in self.lr_scheduler_configs:
            hand_over(config.scheduler, self._sharded)

    def _made(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        kind: type[Optimizer],
        groups: list[dict[str, Any]],
    ) -> tuple[ShardedOptimizer, Plan]:
        """The module in shards, under a plan that is made here for the first batch of the data loader."""
        trainer.fit_loop.setup_data()
        loader: Any = trainer.train_dataloader
        sample = self.batch_to_device(next(iter(loader)))
        sizes = [len(leaf) for leaf in tree_leaves(sample) if isinstance(leaf, Tensor) and leaf.dim()]
        asked = {**self._asked, "loss": _through(self._asked.get("loss", _training_step))}
        with _quiet():
            _, sharded, plan = hzplan.auto(
                module,
                kind,
                global_batch=max(sizes, default=1) * trainer.accumulate_grad_batches * self.world_size,
                sample=sample,
                clip=bool(trainer.gradient_clip_val),
                params=groups,
                **asked,
            )
        self._accumulate(trainer, plan)
        return sharded, plan

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole weights, on the first rank; every rank calls it."""
        module = self.lightning_module
        assert module is not None
        if self._sharded is None or self._planned is None:
            return super().lightning_module_state_dict()
        found = whole_weights(self._planned, self._sharded)
        if not self.is_global_zero:
            return {}
        beside = [
            *module.named_parameters(),
            *((e.name.removeprefix(MODEL), e.values) for e in buffers(module)),
        ]
        return {
            **{name: value.detach() for name, value in beside if not name.startswith(self._prefix)},
            **{f"{self._prefix}{name}": value for name, value in found.items()},
        }

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Nothing: it is saved in shards."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """The file as Lightning has it; and beside it the shards, unless weights alone are wanted."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._sharded is None or self._planned is None or "optimizer_states" not in checkpoint:
            return
        folder = _shards_of(filepath)
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(folder, keep=1)
        self._checkpoints.move_to(folder)
        self._checkpoints.save(self._planned, self._sharded, int(checkpoint["global_step"]))
        self._checkpoints.wait()

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Both."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_shards_of(filepath), ignore_errors=True)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """As any; the shards beside it are loaded when there is an optimizer."""
        self._loaded_from = Path(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Into a whole model; into shards, what lies beside the file."""
        if self._sharded is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            self.load_optimizer_state_dict(checkpoint)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Weights and the optimizer's state, out of the shards."""
        assert self._sharded is not None and self._planned is not None and self._loaded_from is not None
        folder, step = _shards_of(self._loaded_from.resolve()), int(checkpoint["global_step"])
        if not folder.is_dir():
            raise UserError(
                f"{self._loaded_from}: not one of a planned run (there is no {folder.name} beside it); begin "
                "with its weights: load_from_checkpoint, and fit without ckpt_path"
            )
        if Checkpoints(folder).load(self._planned, self._sharded, step=step) is None:
            raise UserError(f"{folder}: has no shards of step {step}, which {self._loaded_from} is of")

    def teardown(self) -> None:
        """Leave the shards where they are: what is not gathered cannot be moved."""
        assert self.accelerator is not None and self.cluster_environment is not None
        if self._sharded is None:
            super().teardown()
            return
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self.cluster_environment.teardown()


def _training_step(module: Any, batch: Any) -> Tensor:
    """The loss of a module of Lightning's."""
    arguments = (batch, 0)[: len(inspect.signature(module.training_step).parameters)]
    found = module.training_step(*arguments)
    loss: Tensor = found["loss"] if isinstance(found, Mapping) else found
    return loss


def _through(loss: Callable[[Any, Any], Tensor]) -> Callable[[nn.Module, Any], Tensor]:
    """A loss of a module that may be in DDP or FSDP, which are there for what calls them."""

    @wraps(loss)
    def call(model: nn.Module, batch: Any) -> Tensor:
        if not isinstance(model, DistributedDataParallel | FSDPModule):
            return loss(model, batch)
        whole: Any = model
        module = whole.module if isinstance(model, DistributedDataParallel) else whole
        module.forward = partial(loss, module)
        try:
            found: Tensor = whole(batch)
        finally:
            del module.forward
        return found

    return call


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Lightning's warnings that a copy of the module logs to no trainer."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are trying to `self.log")
        yield


class _AsPlanned(Precision):
    """Computes as it finds the model; clips by the norm over all ranks, which the plan's optimizer knows."""

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Scale all gradients."""
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        assert isinstance(inner, ShardedOptimizer)
        inner.clip_grad_norm_(clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Refused."""
        raise UserError('gradient_clip_algorithm="value": gradients are in shards; clip by "norm"')


def _shards_of(filepath: str | Path) -> Path:
    if "://" in str(filepath):
        raise UserError(f"{filepath}: shards are saved to folders that all ranks see, not to addresses")
    return Path(f"{filepath}{SHARDS}")
