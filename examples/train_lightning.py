"""Lightning's Trainer under a plan.

hzplan profile mymodel:Transformer --nproc 2 --micro-batch 4 -o profile.json
hzplan solve profile.json --memory 18MiB --global-batch 16 -o plan.json
torchrun --nproc-per-node 2 train_lightning.py

To Lightning every rank is alone with one device; that they train together is in the model and its optimizer.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from mymodel import Transformer, batch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import hzplan

STEPS = 60


class Planned(L.LightningModule):
    """A language model that trains as its plan says."""

    def __init__(self, plan: hzplan.Plan) -> None:
        super().__init__()
        self.plan, self.model = plan, Transformer()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The plan's, for the model in shards."""
        return hzplan.parallelize(self.model, self.plan, torch.optim.AdamW, lr=3e-3)[1]

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **_: Any) -> None:
        """By the norm over all ranks, which the plan's optimizer knows."""
        optimizer.clip_grad_norm_(gradient_clip_val)

    def training_step(self, tokens: Tensor, _: int) -> Tensor:
        """The mean loss of a micro-batch."""
        loss = cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0 and self.trainer.fit_loop.epoch_loop.batch_progress.current.ready % 20 == 0:
            print(f"loss {mean.item() / dist.get_world_size():.5f}")
        return loss


def main() -> None:
    """Train."""
    dist.init_process_group()
    plan = hzplan.Plan.load("plan.json")
    torch.manual_seed(0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        accumulate_grad_batches=plan.batch.accumulation,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    accumulation, rank = plan.batch.accumulation, dist.get_rank()
    rows = [batch(n // accumulation, n % accumulation, rank) for n in range(STEPS * accumulation)]
    trainer.fit(Planned(plan), DataLoader(rows, batch_size=None))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
