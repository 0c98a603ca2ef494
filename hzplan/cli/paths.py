"""Files named on the command line, checked before work begins."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hzplan.errors import UserError


def check_writable(path: Path, *, keep: Path | None = None) -> None:
    """UserError when a file cannot be written there, or would replace ``keep``.

    Leaves nothing behind, and what is there untouched.
    """
    if keep is not None and path.exists() and keep.exists() and path.samefile(keep):
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
