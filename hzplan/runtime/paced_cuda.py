"""A tier's link on a GPU: a kernel holds each stream for as long as what it has under way needs.

The host is ahead of the device, so it is the kernels that look at what else is under way, in a few words of
the device's memory. NOT RUN ON A GPU YET: no machine of ours has one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

MOST_STREAMS = 8
"""Kinds of collectives that a tier has a stream each for."""

SOURCE = """
extern "C" __global__ void hold(volatile int* under_way, int stream, double alone_ns, double collision) {
    under_way[stream] = 1;
    double left = alone_ns;
    unsigned long long last = NOW();
    while (left > 0.0) {
        int many = 0;
        for (int other = 0; other < MOST_STREAMS; ++other) many += under_way[other];
        unsigned long long now = NOW();
        left -= (double)(now - last) / (many > 1 ? many * collision : 1.0);
        last = now;
    }
    under_way[stream] = 0;
}
"""
"""One thread. The streams that have something under way share the link equally, as ``paced.Wire``'s do."""

ON_A_GPU = """
static __device__ unsigned long long NOW() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}
"""


@cache
def _kernel(device: torch.device) -> Any:
    with torch.cuda.device(device):
        return torch.cuda._compile_kernel(
            f"#define MOST_STREAMS {MOST_STREAMS}\n{ON_A_GPU}\n{SOURCE}", "hold"
        )


class DeviceWire:
    """``collision``: how many times as long several streams take together as one after the other."""

    def __init__(self, device: torch.device, collision: float = 1.0) -> None:
        self._device, self._collision = device, collision
        self._under_way = torch.zeros(MOST_STREAMS, dtype=torch.int32, device=device)
        self._places: dict[str, int] = {}

    def hold(self, stream: str, seconds: float) -> None:
        """Hold the current CUDA stream for so long, and longer where others have something under way.

        ``stream``: what is under way for one and the same goes in order, on one CUDA stream.
        """
        place = self._places.setdefault(stream, len(self._places))
        arguments = [self._under_way, place, seconds * 1e9, float(self._collision)]
        _kernel(self._device)((1, 1, 1), (1, 1, 1), arguments)
