"""A loop of one's own under a plan; its twin under FSDP2 is train_fsdp2.py.

hzplan profile mymodel:Transformer --nproc 4 --micro-batch 4 -o profile.json
hzplan solve profile.json --memory 16MiB --global-batch 32 -o plan.json
torchrun --nproc-per-node 4 train.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from mymodel import Transformer, batch
from torch.nn.functional import cross_entropy

import hzplan

STEPS, ACCUMULATION = 60, 2

dist.init_process_group()
torch.manual_seed(0)
model = Transformer()
model, optimizer = hzplan.parallelize(model, hzplan.Plan.load("plan.json"), torch.optim.AdamW, lr=3e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)

for step in range(STEPS):
    total = torch.zeros(())
    for micro_batch in range(ACCUMULATION):
        tokens = batch(step, micro_batch, dist.get_rank())
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()) / ACCUMULATION
        loss.backward()
        total += loss.detach()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    dist.all_reduce(total)
    if dist.get_rank() == 0 and step % 10 == 9:
        print(f"step {step + 1}: loss {total.item() / dist.get_world_size():.5f}")

dist.destroy_process_group()
