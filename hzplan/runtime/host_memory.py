"""Memory on the host of a device, that the device copies from and to by itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from hzplan.errors import UserError
from hzplan.models.saved import unseen_host_buffer


def host_buffer(device: torch.device) -> Callable[[int], Tensor]:
    """What makes memory of so many bytes, of zeros, on the host of a device."""
    make = _locked if device.type == "cuda" else unseen_host_buffer

    def made(nbytes: int) -> Tensor:
        try:
            return make(nbytes)
        except (MemoryError, RuntimeError) as error:  # torch's is no class of its own on processors
            if isinstance(error, RuntimeError) and "memory" not in str(error):
                raise
        raise UserError(
            f"the host has no {nbytes} bytes of memory left for what the plan keeps there; solve with less "
            "--host-memory"
        )

    return made


def _locked(nbytes: int) -> Tensor:
    host = torch.zeros(nbytes, dtype=torch.uint8)
    _lock(host)
    return host


def _lock(host: Tensor) -> None:
    """Lock a buffer's pages, so that a GPU copies it by itself.

    torch's own page-locked memory is rounded up to a power of two, up to twice what the plan counts.
    """
    if not host.numel():
        return
    address, runtime = host.data_ptr(), torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(address, host.numel(), 0))
    if code:
        raise UserError(
            f"{host.numel()} bytes of the host's memory could not be page-locked (CUDA error {code}); allow "
            "more locked memory (ulimit -l), or solve with less --host-memory"
        )
    weakref.finalize(host.untyped_storage(), runtime.cudaHostUnregister, address)
