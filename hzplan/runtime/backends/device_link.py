"""A tier's link on a GPU: a kernel takes as long as a transfer, on a CUDA stream beside the one that waits.

The host is ahead of the device, so it is the kernels that look at which other transfers are under way, in a
few words of the device's memory. NOT RUN ON A GPU YET.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils import cpp_extension

MOST_STREAMS = 8
"""Upper limit of the kinds of collectives of a tier; each has a stream."""

SOURCE = """
extern "C" __global__ void hold(volatile int* under_way, int stream, double alone_ns, double contention) {
    under_way[stream] = 1;
    double left = alone_ns;
    unsigned long long last = NOW();
    while (left > 0.0) {
        int many = 0;
        for (int other = 0; other < MOST_STREAMS; ++other) many += under_way[other];
        unsigned long long now = NOW();
        left -= (double)(now - last) / (many > 1 ? many * contention : 1.0);
        last = now;
    }
    under_way[stream] = 0;
}
"""
"""One thread. Streams with a transfer under way share the link equally, as in ``rate_limited.Link``."""

ON_A_GPU = """
static __device__ unsigned long long NOW() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}
"""


@cache
def _kernel(device: torch.device) -> Any:
    source = f"#define MOST_STREAMS {MOST_STREAMS}\n{ON_A_GPU}\n{SOURCE}"
    with torch.cuda.device(device), _a_place_for_headers():
        return torch.cuda._compile_kernel(source, "hold")


@contextmanager
def _a_place_for_headers() -> Iterator[None]:
    """torch wants to know where CUDA's headers are, which wheels do not bring; the kernel includes none."""
    known = cpp_extension.CUDA_HOME
    cpp_extension.CUDA_HOME = known or "/usr/local/cuda"
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = known


class DeviceLink:
    """``contention``: how many times as long several streams take together as one after the other."""

    def __init__(self, device: torch.device, contention: float = 1.0) -> None:
        self._device, self._contention = device, contention
        self._under_way = torch.zeros(MOST_STREAMS, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)  # or streams would look at it before it is zero
        self._queues: dict[str, torch.cuda.Stream] = {}

    def start(self, stream: str, seconds: float) -> torch.cuda.Event:
        """Put a transfer under way from where the current CUDA stream is now; the event is its end.

        ``stream``: transfers of one stream go in order.
        """
        if stream not in self._queues:
            assert len(self._queues) < MOST_STREAMS, "a tier has a stream for each kind of collective"
            self._queues[stream] = torch.cuda.Stream(self._device, priority=-1)
        queue = self._queues[stream]
        queue.wait_stream(torch.cuda.current_stream(self._device))
        place = list(self._queues).index(stream)
        with torch.cuda.stream(queue):
            arguments = [self._under_way, place, seconds * 1e9, float(self._contention)]
            _kernel(self._device)((1, 1, 1), (1, 1, 1), arguments)
        over = torch.cuda.Event()
        over.record(queue)
        return over
