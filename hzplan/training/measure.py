"""How much memory a step takes on a rank."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hzplan.profiler.model.memory import memory_trace


def peak_memory_bytes(
    step: Callable[[], None], device: torch.device, *, ignore: Iterable[Tensor] = ()
) -> int:
    """Run a step and return the highest number of bytes that tensors took in it.

    That is what is alive before it plus the most that the calling thread allocates inside it. On CUDA the
    allocator knows both. On the CPU what is alive are the distinct storages of all tensors that Python knows,
    without those of ``ignore`` (data sets); a tensor that only C++ holds is missed, as are buffers inside the
    communication library.
    """
    alive = torch.cuda.memory_allocated(device) if device.type == "cuda" else alive_bytes(device, ignore)
    with memory_trace(device) as trace:
        trace.cut()
        step()
    return alive + trace.segments()[0].peak_bytes


def alive_bytes(device: torch.device, ignore: Iterable[Tensor] = ()) -> int:
    """Bytes of the distinct storages of all tensors that Python knows on a device, without ``ignore``."""
    gc.collect()
    ignored = {tensor.untyped_storage().data_ptr() for tensor in ignore}
    sizes: dict[int, int] = {}
    for found in gc.get_objects():
        # Not isinstance: it would ask proxies what they pretend to be.
        if not issubclass(type(found), Tensor) or found.device != device or found.layout != torch.strided:
            continue
        # A DTensor has no storage, but its local tensor is found; a fake one has none at all.
        if is_traceable_wrapper_subclass(found) or issubclass(type(found), FakeTensor):
            continue
        storage = found.untyped_storage()
        if storage.data_ptr() not in ignored:
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
