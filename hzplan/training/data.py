"""What to train on: text as bytes, the standard library's own or the user's, or a file of tokens."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hzplan.errors import UserError, one_line

HELDOUT_EVERY = 20
"""One file of this many is held out; of fewer files, that share of the bytes."""

STDLIB_LIMIT_BYTES = 16 << 20
DATA_LIMIT_BYTES = 1 << 30

# Installed packages differ between machines, and tests are full of generated data.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


TOKEN_FILES = (".npy", ".bin")
BARE = {"uint16": "<u2", "int32": "<i4", "uint32": "<i4", "int64": "<i8"}
"""Numbers of .bin files, little-endian, by what their names say before .bin. torch does little with unsigned
ones of 32 bits; a token that needs the last bit is below 0 here, and refused."""
"""Files of tokens: numpy's, of any integers, or bare unsigned 16-bit numbers, the low byte first."""

LOOKED_AT = 1 << 24
"""Tokens at the beginning whose frequencies stand for all."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Two disjoint parts, integers [tokens] each, of a text uint8; ``description`` says for people what was
    read.

    ``unigram_entropy_nats`` is that of the training part's frequencies: the loss, in nats a token, of the
    best model that ignores context.
    """

    train: Tensor
    heldout: Tensor
    description: str
    unigram_entropy_nats: float


def load_corpus(path: Path | None = None, *, limit_bytes: int | None = None, seq_len: int = 1) -> Corpus:
    """The text at ``path``, a file or a whole folder in order of path; by default the standard library.

    Files with a NUL byte are no text and are skipped, as are hidden ones. Reading stops at ``limit_bytes``
    (16 MiB of the standard library, 1 GiB of anything else). Every 20th file is held out whole; of fewer than
    20 files, the last 20th of all bytes. The same on every rank that sees the same files.

    Raises UserError when the path is missing, unreadable or without text, or when a part has no
    ``seq_len`` + 1 bytes.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = list(_source_files(root))
        name = f"Python {sys.version_info[0]}.{sys.version_info[1]} standard library"
        limit = STDLIB_LIMIT_BYTES
        advice = "pass --data with a file or folder of text"
    else:
        root, files, name, limit = path, list(_user_files(path)), str(path), DATA_LIMIT_BYTES
        advice = "give a file or folder of plain text"
    texts, cut = _read(files, limit if limit_bytes is None else limit_bytes)
    if not texts:
        raise UserError(f"{root}: no text in it; {advice}")
    train, heldout = _split(texts)
    for part, kind in ((train, "training"), (heldout, "held-out")):
        if len(part) <= seq_len:
            raise UserError(
                f"{root}: too little text: {len(part)} {kind} bytes, a sequence needs {seq_len + 1}; "
                f"{advice}, or pass a smaller --seq-len"
            )
    plural = "" if len(texts) == 1 else "s"
    size = (len(train) + len(heldout)) / 2**20
    description = f"{name}: {'the first ' if cut else ''}{len(texts)} file{plural}, {size:.1f} MiB"
    return Corpus(train, heldout, description, _entropy_nats(train))


def _numbers_of(path: Path, vocab: int) -> str:
    """The numbers of a file of bare ones: those that its name says before .bin, else uint16. UserError where
    the model knows more tokens than uint16 has, and the name says none."""
    said = path.suffixes[-2].removeprefix(".") if len(path.suffixes) > 1 else ""
    if said in BARE:
        return BARE[said]
    if vocab > 1 << 16:
        raise UserError(
            f"{path}: the model knows {vocab} tokens, and a .bin file has uint16 unless its name says more, "
            f"as {path.stem}.uint32.bin does"
        )
    return BARE["uint16"]


def load_tokens(path: Path, *, vocab: int, seq_len: int) -> Corpus:
    """A file of tokens, which stays where it is: parts of it are read when they are trained on.

    The last 20th is held out. UserError when it is no such file, holds a token outside of [0, ``vocab``), or
    is too short.
    """
    try:
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="c", allow_pickle=False)
        else:
            tokens = np.memmap(path, dtype=_numbers_of(path, vocab), mode="c")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, EOFError) as error:
        raise UserError(f"{path}: not a file of tokens ({one_line(error)})") from None
    if not isinstance(tokens, np.ndarray):
        raise UserError(f"{path}: several arrays; one row of integers is needed")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise UserError(f"{path}: {tokens.dtype} {list(tokens.shape)}; one row of integers is needed")
    if not tokens.dtype.isnative:
        raise UserError(f"{path}: {tokens.dtype}: the bytes of its numbers are in another machine's order")
    edge = len(tokens) - len(tokens) // HELDOUT_EVERY
    if min(edge, len(tokens) - edge) <= seq_len:
        raise UserError(
            f"{path}: too few tokens: {len(tokens) - edge} held out, a sequence needs {seq_len + 1}; give "
            "more, or pass a smaller --seq-len"
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab:
        wrong = low if low < 0 else high
        raise UserError(f"{path}: token {wrong} in it; the model knows 0 to {vocab - 1}")
    train, heldout = (torch.from_numpy(part) for part in (tokens[:edge], tokens[edge:]))
    counts = np.bincount(tokens[: min(edge, LOOKED_AT)])
    share = torch.from_numpy(counts).double() / counts.sum()
    entropy = float(-torch.special.xlogy(share, share).sum())
    return Corpus(train, heldout, f"{path}: {len(tokens):,} tokens", entropy)


def sample(part: Tensor, *, first: int, count: int, seq_len: int, seed: int) -> Tensor:
    """Sequences ``first`` to ``first + count`` of a run, int64 [count, seq_len + 1]: windows at random.

    They depend on nothing but the part, their length, the seed and their number, so whoever resumes a run,
    on however many ranks, sees what an uninterrupted one would have seen.

    Raises UserError when the part is shorter than a window.
    """
    places = _places(part, seq_len)
    starts = (_place(seed, number, places) for number in range(first, first + count))
    return torch.stack([part[start : start + seq_len + 1].long() for start in starts])


def _place(seed: int, number: int, places: int) -> int:
    """Evenly distributed: 2^64 is large beside any text. A digest, as it needs no state."""
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % places


def heldout_windows(part: Tensor, seq_len: int, count: int) -> Tensor:
    """``count`` evenly spaced windows, from the first to the last: int64 [count, seq_len + 1].

    Raises UserError when the part is shorter than a window.
    """
    last = _places(part, seq_len) - 1
    starts = [number * last // max(count - 1, 1) for number in range(count)]
    return torch.stack([part[start : start + seq_len + 1].long() for start in starts])


def _places(part: Tensor, seq_len: int) -> int:
    """How many windows a part has."""
    if len(part) <= seq_len:
        raise UserError(
            f"the text has {len(part)} bytes, a sequence needs {seq_len + 1}; pass --data with more text"
        )
    return len(part) - seq_len


def _source_files(root: Path) -> Iterator[Path]:
    return (path for path in _walk(root, _SKIPPED_FOLDERS) if path.suffix == ".py")


def _user_files(path: Path) -> Iterator[Path]:
    # os.path answers False, where Path raises, for what permissions hide.
    if os.path.isdir(path):
        return (file for file in _walk(path) if not file.name.startswith("."))
    if not os.path.isfile(path):
        raise UserError(f"{path}: no such file or folder; check the path given to --data")
    return iter([path])


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """The regular files under ``root`` in order of path, without hidden and ``skipped`` folders."""

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror}); check its permissions")

    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = sorted(name for name in folders if name not in skipped and name[0] != ".")
        yield from (path for name in sorted(files) if os.path.isfile(path := Path(folder, name)))


def _read(files: list[Path], limit_bytes: int) -> tuple[list[bytes], bool]:
    """The texts among ``files``, up to ``limit_bytes`` in all, and whether that limit left some out."""
    texts: list[bytes] = []
    left = limit_bytes
    for path in files:
        try:
            with path.open("rb") as file:
                text = file.read(left + 1)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
        if not text or b"\0" in text:
            continue
        texts.append(text[:left])
        if len(text) > left:
            return [text for text in texts if text], True
        left -= len(text)
    return texts, False


def _split(texts: list[bytes]) -> tuple[Tensor, Tensor]:
    """Training and held-out part."""
    if len(texts) < HELDOUT_EVERY:
        everything = b"".join(texts)
        edge = len(everything) - len(everything) // HELDOUT_EVERY
        return _tensor(everything[:edge]), _tensor(everything[edge:])
    held = range(HELDOUT_EVERY - 1, len(texts), HELDOUT_EVERY)
    train = b"".join(text for index, text in enumerate(texts) if index not in held)
    return _tensor(train), _tensor(b"".join(texts[index] for index in held))


def _tensor(data: bytes) -> Tensor:
    # torch wants memory it may write to, and some of it.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _entropy_nats(part: Tensor) -> float:
    share = part.bincount(minlength=256).double() / len(part)
    return float(-torch.special.xlogy(share, share).sum())
