"""A loop of Accelerate's under a plan.

hzplan profile mymodel:Transformer --nproc 2 --micro-batch 4 -o profile.json
hzplan solve profile.json --memory 18MiB --global-batch 16 -o plan.json
accelerate launch --cpu --num-processes 2 train_accelerate.py

``PlannedAccelerator(plan="plan.json")`` in the place of ``Accelerator()``: accumulation is the plan's, and
the loop prepares, clips, saves and goes on as ever: ``… train_accelerate.py resume``.
"""

from __future__ import annotations

import itertools
import sys

import torch
from mymodel import Transformer, batch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from hzplan.integrations.accelerate import PlannedAccelerator

STEPS, ACCUMULATION, RANKS, SAVED = 60, 2, 2, 40
"""Steps, and after how many of them the state is saved."""


def rows() -> DataLoader[Tensor]:
    """Every rank's micro-batches, in turns."""
    parts = itertools.product(range(STEPS), range(ACCUMULATION), range(RANKS))
    return DataLoader([row for part in parts for row in batch(*part)], batch_size=4)  # type: ignore[arg-type]


def main() -> None:
    """Train."""
    accelerator = PlannedAccelerator(plan="plan.json", cpu=True)
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20 * RANKS, 0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, rows(), scheduler)
    begun = 0
    if "resume" in sys.argv:
        accelerator.load_state("accelerated")
        begun = SAVED * ACCUMULATION
    for micro_batch, tokens in enumerate(accelerator.skip_first_batches(loader, begun), begun):
        with accelerator.accumulate(model):
            loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if micro_batch % 20 == 19:
            accelerator.print(f"loss {accelerator.reduce(loss.detach(), 'mean').item():.5f}")
        if micro_batch + 1 == SAVED * ACCUMULATION and not begun:
            accelerator.save_state("accelerated")
    accelerator.end_training()


if __name__ == "__main__":
    main()
