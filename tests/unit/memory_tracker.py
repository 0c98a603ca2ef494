"""What torch's own tracker says of a rank's memory under FSDP2, 64 ranks, without any of them: JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from hzplan.models.gpt import GPT, GPTConfig

WORLD, MICRO_BATCH = 64, 4


@dataclass(frozen=True)
class Sized:
    """A factory's result."""

    model: GPT
    seq_len: int
    vocab: int


def model() -> Sized:
    """4 blocks, of sizes that 64 ranks divide."""
    config = GPTConfig(vocab=4096, layers=4, width=512, heads=8, seq_len=256)
    return Sized(GPT(config), config.seq_len, config.vocab)


def track() -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state, and of activations after forward."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    mesh = init_device_mesh("cpu", (WORLD,))
    with FakeTensorMode():
        sized = model()
        for block in sized.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(sized.model, mesh=mesh)
        optimizer = torch.optim.AdamW(sized.model.parameters(), foreach=False)
        tokens = torch.randint(0, sized.vocab, (MICRO_BATCH, sized.seq_len))
        tracker = FSDPMemTracker(sized.model, optimizer)
        tracker.track_inputs((tokens,))
        with tracker:
            for _ in range(2):  # the optimizer's state is made in the first step
                loss = cross_entropy(sized.model(tokens).flatten(0, 1), tokens.flatten())
                whole = _snapshot(tracker)
                loss.backward()
                after = _snapshot(tracker)
                optimizer.step()
                optimizer.zero_grad()
                tracker.reset_mod_stats()
    return {
        "parameters": after["SHARDED_PARAM"],
        "gradients": after["SHARDED_GRAD"],
        "optimizer": after["OPT"],
        "activations": whole["ACT"],
    }


def _snapshot(tracker: object) -> dict[str, int]:
    found = tracker.get_tracker_snapshot("current")  # type: ignore[attr-defined]
    return {getattr(kind, "name", str(kind)): size for kind, size in found[torch.device("cpu")].items()}


if __name__ == "__main__":
    print(json.dumps(track()))
