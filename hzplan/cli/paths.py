"""Files named on the command line, checked before work begins."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from hzplan.errors import UserError


def check_writable(path: Path, *, keep: Iterable[Path] = ()) -> None:
    """UserError when a file cannot be written there, or would replace one of ``keep``.

    Leaves nothing behind, and what is there untouched.
    """
    if str(path).startswith("-"):
        raise UserError(f"{path}: looks like an option; a file of that name is ./{path}")
    if os.path.exists(path) and any(os.path.exists(read) and path.samefile(read) for read in keep):
        raise UserError(f"{path}: is what is read; name another file to write")
    if path.resolve().is_dir():
        raise UserError(f"{path}: is a folder; name a file to write")
    if path.exists() and not path.is_file():
        return  # a device or a pipe
    folder = path.resolve().parent
    while not folder.exists():  # a missing folder is made when the file is written
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another place") from None
