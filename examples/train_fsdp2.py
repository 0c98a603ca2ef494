"""A loop of one's own under FSDP2; its twin under a plan is train.py.

torchrun --nproc-per-node 4 train_fsdp2.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from mymodel import Transformer, batch
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

STEPS, ACCUMULATION = 60, 2

dist.init_process_group()
torch.manual_seed(0)
model = Transformer()
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)

for step in range(STEPS):
    total = torch.zeros(())
    for micro_batch in range(ACCUMULATION):
        tokens = batch(step, micro_batch, dist.get_rank())
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()) / ACCUMULATION
        loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    dist.all_reduce(total)
    if dist.get_rank() == 0 and step % 10 == 9:
        print(f"step {step + 1}: loss {total.item() / dist.get_world_size():.5f}")

dist.destroy_process_group()
