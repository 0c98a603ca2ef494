"""Network namespaces without names: held by a descriptor, gone with the processes that use them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_CLONE_NEWNET = 0x40000000


def current() -> int:
    """A descriptor of the network that this process is in."""
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def create() -> int:
    """A descriptor of a new empty network; this process stays where it is. Raises OSError."""
    before = current()
    _call("unshare", _CLONE_NEWNET)
    made = current()
    _call("setns", before, _CLONE_NEWNET)
    os.close(before)
    return made


@contextmanager
def inside(network: int) -> Iterator[None]:
    """What is started and each socket that is opened in this block is in that network. Raises OSError."""
    before = current()
    _call("setns", network, _CLONE_NEWNET)
    try:
        yield
    finally:
        _call("setns", before, _CLONE_NEWNET)
        os.close(before)


def own_proc() -> bool:
    """Show in /proc the processes of this world under their own numbers; False where that is refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.mount(b"proc", b"/proc", b"proc", ctypes.c_ulong(0), None)) == 0


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
