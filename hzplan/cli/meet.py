"""``hzplan meet``: the place where groups that do not wait for each other meet."""

from __future__ import annotations

import socket
from typing import Annotated

import typer

from hzplan.errors import UserError


def command(
    port: Annotated[int, typer.Option(help="The port to listen on; 0: any that is free.")] = 29400,
    host: Annotated[str, typer.Option(help="The name or address that groups reach this machine by.")] = "",
) -> None:
    """Keep the place where the groups of a relaxed plan meet, until Ctrl-C.

    Groups say here who is there and what has become of a round; parameters travel between them directly.
    Where it is gone each group trains on by itself.

    Example: hzplan meet --port 29400
    """
    import threading
    from datetime import timedelta

    import torch.distributed as dist

    from hzplan.cli import console

    if not 0 <= port < 1 << 16:
        raise UserError(f"--port {port}: from 0 to 65535")
    try:
        timeout = timedelta(seconds=30)
        store = dist.TCPStore("localhost", port, None, True, timeout, wait_for_workers=False)  # type: ignore[attr-defined]
    except RuntimeError:
        raise UserError(f"--port {port}: cannot be listened on; give another one") from None
    console.remark(f"groups meet here: --meet {host or socket.gethostname()}:{store.port}")
    threading.Event().wait()
