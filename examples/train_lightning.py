"""Lightning's Trainer under a plan.

hzplan profile mymodel:Transformer --nproc 2 --micro-batch 4 -o profile.json
hzplan solve profile.json --memory 18MiB --global-batch 16 -o plan.json
torchrun --nproc-per-node 2 train_lightning.py

``strategy=PlannedStrategy("plan.json")`` is all that is said of the plan: the module has an optimizer and a
scheduler as ever, and Trainer clips, validates, saves and goes on by its own arguments:
``torchrun … train_lightning.py resume``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from mymodel import Transformer, batch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from hzplan.integrations.lightning import PlannedStrategy

EPOCHS, STEPS, ACCUMULATION = 3, 20, 2
"""Steps: of an epoch."""


class LanguageModel(L.LightningModule):
    """Trained on the mean loss of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer()

    def configure_optimizers(self) -> dict[str, object]:
        """AdamW, and a rate that is halved every twenty steps."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def loss(self, tokens: Tensor) -> Tensor:
        """In nats a token."""
        return cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        """Say the loss now and then."""
        loss = self.loss(tokens)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0 and index % 20 == 19:
            print(f"loss {mean.item() / dist.get_world_size():.5f}")
        return loss

    def train_dataloader(self) -> DataLoader[Tensor]:
        """This rank's micro-batches of an epoch."""
        first, rank = self.current_epoch * STEPS, self.global_rank
        rows = [batch(first + n // ACCUMULATION, n % ACCUMULATION, rank) for n in range(STEPS * ACCUMULATION)]
        return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Two more."""
        return DataLoader([batch(1000, n, self.global_rank) for n in range(2)], batch_size=None)  # type: ignore[arg-type]

    def validation_step(self, tokens: Tensor, _: int) -> None:
        """On a batch that is not trained on."""
        self.log("held out", self.loss(tokens), sync_dist=True)


def main() -> None:
    """Train."""
    torch.manual_seed(0)
    trainer = L.Trainer(
        strategy=PlannedStrategy("plan.json"),
        accelerator="cpu",
        devices=2,
        max_epochs=EPOCHS,
        reload_dataloaders_every_n_epochs=1,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint("lightning", save_top_k=-1)],
        logger=False,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    newest = max(Path("lightning").glob("*.ckpt"), default=None) if "resume" in sys.argv else None
    trainer.fit(LanguageModel(), ckpt_path=newest)
    if trainer.is_global_zero:
        print(f"held out {float(trainer.callback_metrics['held out']):.5f}")


if __name__ == "__main__":
    main()
