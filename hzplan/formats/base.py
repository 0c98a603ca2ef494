"""Reading and writing the files: strict models, one-line errors, atomic replacement."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hzplan.errors import UserError
from hzplan.formats.migrations import MIGRATIONS, as_version_1

# The limits keep every product that is formed of them inside 64 bits; nothing real comes near them.
NonNegativeInt = Annotated[int, Field(ge=0, le=2**52)]
PositiveInt = Annotated[int, Field(ge=1, le=2**52)]
Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Measured = Annotated[float, Field(ge=0, le=1e3, allow_inf_nan=False)]  # seconds
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Gap = Annotated[float, Field(allow_inf_nan=False, ge=0)]


class Strict(BaseModel):
    """A frozen record that refuses unknown keys and coercions (JSON lists become tuples)."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Document(Strict):
    """A file's content; subclasses have the fields ``format`` and ``version`` with their only value as
    default."""

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file of this format; UserError of one line when it is not one."""
        form, version = (cls.model_fields[name].default for name in ("format", "version"))
        return read(Path(path), cls, form=form, version=version)

    def save(self, path: str | Path) -> None:
        """Write the canonical text, whole or not at all."""
        write_text(Path(path), to_text(self))


StrictModel = TypeVar("StrictModel", bound=Strict)

MAX_FILE_BYTES = 256 * 2**20
"""Largest file that is read, bytes; real ones are a few MiB."""


def read(path: Path, kind: type[StrictModel], *, form: str, version: int) -> StrictModel:
    """Read and validate a file; every failure is a UserError of one line that names file and field."""
    data = read_json(path)
    if not isinstance(data, dict) or data.get("format") != form:
        raise UserError(f"{path}: not a {form} file (its field 'format' must be {form!r})")
    data = migrated(data, form, version, path)
    try:
        # JSON mode is strict about types yet lets lists become tuples.
        return kind.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "(the whole file)"
        raise UserError(f"{path}: field {field}: {_one_line(first['msg'])}") from None


def migrated(data: dict[str, Any], form: str, version: int, path: Path) -> dict[str, Any]:
    """A file's data as ``version`` has it; UserError when there is no way from its own version."""
    found = data.get("version")
    steps = MIGRATIONS.get(form, {})
    if type(found) is int and found > version:
        raise UserError(
            f"{path}: field 'version' is {found}, this hzplan reads {version}; it was made by a newer one: "
            "install that"
        )
    while type(found) is not int or found != version:  # true and 1.0 equal 1
        if type(found) is not int or found not in steps:
            raise UserError(
                f"{path}: field 'version' is {found!r}, this hzplan reads {version}; "
                "make the file again with this version"
            )
        try:
            data = {**steps[found](data), "version": found + 1}
        except ValueError as error:
            raise UserError(f"{path}: field 'version' is {found}, but {error}") from None
        found += 1
    return data


def read_json(path: Path, *, finite: bool = True) -> Any:
    """Parse a JSON file; UserError naming the file and the place. ``finite``: refuse NaN and infinity, which
    are no JSON but which Python writes."""
    try:
        content = _content(path)
        if len(content) > MAX_FILE_BYTES:
            raise UserError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB, not a file of hzplan")
        return json.loads(
            content.decode("utf-8"), parse_constant=_refuse if finite else float, object_pairs_hook=_once
        )
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder, a file is needed") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}: not valid JSON at line {error.lineno} column {error.colno} ({error.msg}); truncated?"
        ) from None
    except (RecursionError, ValueError) as error:
        raise UserError(f"{path}: not valid JSON ({_one_line(str(error))})") from None


def _content(path: Path) -> bytes:
    """A file's bytes, at most one more than allowed; a pipe or device has no size to ask for."""
    try:
        file = path.open("rb")
    except ValueError:  # it has a NUL
        raise UserError(f"{path}: no file has such a name") from None
    with file:
        return file.read(MAX_FILE_BYTES + 1)


def to_text(document: Strict) -> str:
    """The canonical text: declared field order, two blanks, lists of plain values on one line."""
    return _render(document.model_dump(mode="json", exclude_none=True), "") + "\n"


def fingerprint(document: Strict) -> str:
    """SHA-256 of the canonical text, hexadecimal."""
    return hashlib.sha256(to_text(document).encode()).hexdigest()


def has_fingerprint(document: Strict, sha256: str) -> bool:
    """Whether ``sha256`` is the hash of a version-2 document's text, or of the same values' in version 1."""
    earlier = _render(as_version_1(document.model_dump(mode="json", exclude_none=True)), "") + "\n"
    return sha256 in (fingerprint(document), hashlib.sha256(earlier.encode()).hexdigest())


def write_text(path: Path, text: str) -> None:
    """Write beside, then rename: the file is whole or untouched. UserError when it cannot be written.

    A link is followed, and a device or pipe (``/dev/null``) is written to, never replaced.
    """
    named = path
    try:
        path = path.resolve()
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_text(text, encoding="utf-8")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".hzplan-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, file_mode())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UserError(f"{named}: cannot be written ({error.strerror})") from None


def file_mode() -> int:
    """The permission bits of a new file under the user's umask."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _render(value: Any, indent: str) -> str:
    """JSON text in which a container of plain values takes one line, so that a diff shows one choice per
    line."""
    inner = indent + "  "
    if isinstance(value, dict) and any(isinstance(item, dict | list) for item in value.values()):
        rows = (f"{inner}{json.dumps(key)}: {_render(item, inner)}" for key, item in value.items())
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return "[\n" + ",\n".join(inner + _render(item, inner) for item in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number that a file may hold")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's keys and values; of two values under one key readers would take different ones."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
        raise ValueError(f"the key {twice!r} appears twice in one object")
    return found


def _one_line(text: str) -> str:
    return " ".join(text.split())
