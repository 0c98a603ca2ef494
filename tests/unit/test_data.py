"""Text as bytes: what is read, how it is split, and which windows a rank sees."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hzplan.errors import UserError
from hzplan.training.data import Corpus, heldout_windows, load_corpus, load_tokens, sample


@pytest.fixture(scope="module")
def stdlib() -> Corpus:
    return load_corpus()


def text(part: Tensor) -> bytes:
    return bytes(part.tolist())


def test_the_standard_library_is_the_default(stdlib: Corpus) -> None:
    total = len(stdlib.train) + len(stdlib.heldout)
    assert 2**20 < total <= 16 * 2**20
    assert 0.02 < len(stdlib.heldout) / total < 0.1
    assert stdlib.train.dtype == stdlib.heldout.dtype == torch.uint8
    assert 3.0 < stdlib.unigram_entropy_nats < 3.3
    assert "standard library" in stdlib.description
    again = load_corpus()
    assert torch.equal(stdlib.train, again.train) and torch.equal(stdlib.heldout, again.heldout)


def test_the_limit_holds_and_is_said() -> None:
    corpus = load_corpus(limit_bytes=300_000)
    assert len(corpus.train) + len(corpus.heldout) == 300_000
    assert "the first " in corpus.description


def test_every_20th_file_is_held_out_whole(tmp_path: Path) -> None:
    for index in range(45):
        (tmp_path / f"{index:02}.txt").write_bytes(b"<%02d>" % index)
    corpus = load_corpus(tmp_path)
    assert text(corpus.heldout) == b"<19><39>"
    assert text(corpus.train) == b"".join(b"<%02d>" % index for index in range(45) if index not in (19, 39))
    assert "45 files" in corpus.description


def test_of_one_file_the_end_is_held_out(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"a" * 950 + b"b" * 50)
    corpus = load_corpus(file)
    assert text(corpus.train) == b"a" * 950 and text(corpus.heldout) == b"b" * 50
    assert corpus.unigram_entropy_nats == 0
    file.write_bytes(b"abcd" * 250)
    assert load_corpus(file).unigram_entropy_nats == pytest.approx(math.log(4), abs=1e-3)


def test_a_folder_is_read_in_order_of_path_without_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "2.txt").write_bytes(b"2" * 20)
    (tmp_path / "b" / "1.md").write_bytes(b"1" * 20)
    (tmp_path / "tests" / "3").write_bytes(b"3" * 20)  # only in the standard library are tests left out
    (tmp_path / "0.bin").write_bytes(b"x\0x")
    (tmp_path / "empty").touch()
    (tmp_path / ".hidden").write_bytes(b"h" * 20)
    (tmp_path / ".git" / "object").write_bytes(b"g" * 20)
    corpus = load_corpus(tmp_path)
    assert text(corpus.train) + text(corpus.heldout) == b"1" * 20 + b"2" * 20 + b"3" * 20
    assert "3 files" in corpus.description


def nothing(path: Path) -> Path:
    return path / "missing"


def empty_folder(path: Path) -> Path:
    return path


def empty_file(path: Path) -> Path:
    (path / "a").touch()
    return path / "a"


def binary(path: Path) -> Path:
    (path / "a").write_bytes(b"\0" * 1000)
    return path


def short(path: Path) -> Path:
    (path / "a").write_bytes(b"a" * 600)  # 30 of them are held out
    return path


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (nothing, "no such file"),
        (empty_folder, "no text"),
        (empty_file, "no text"),
        (binary, "no text"),
        (short, "30 held-out bytes, a sequence needs 33"),
    ],
)
def test_no_text_is_one_line_that_names_the_path(
    make: Callable[[Path], Path], says: str, tmp_path: Path
) -> None:
    path = make(tmp_path)
    with pytest.raises(UserError) as caught:
        load_corpus(path, seq_len=32)
    message = str(caught.value)
    assert says in message and str(path) in message and "\n" not in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize("locked", ["file", "folder"])
def test_an_unreadable_path_is_one_line(locked: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_text("text")
    path = folder if locked == "folder" else folder / "file"
    path.chmod(0)
    try:
        with pytest.raises(UserError, match=f"{locked}: cannot be read"):
            load_corpus(tmp_path)
    finally:
        path.chmod(0o700)


def draw(part: Tensor, *, seed: int = 0, first: int = 0, count: int = 4) -> Tensor:
    return sample(part, first=first, count=count, seq_len=32, seed=seed)


def test_a_sample_depends_on_seed_and_number_alone(stdlib: Corpus) -> None:
    first = draw(stdlib.train)
    assert first.shape == (4, 33) and first.dtype == torch.int64
    torch.manual_seed(99)  # the global generator has no say
    assert torch.equal(draw(stdlib.train), first)
    assert torch.equal(torch.cat([draw(stdlib.train, count=1), draw(stdlib.train, first=1, count=3)]), first)
    everything = [first, draw(stdlib.train, seed=1), draw(stdlib.train, first=4)]
    for i, one in enumerate(everything):
        for other in everything[i + 1 :]:
            assert not torch.equal(one, other)


def test_samples_are_windows_of_the_text_and_reach_both_ends() -> None:
    part = torch.arange(36, dtype=torch.uint8)
    starts = set()
    for number in range(0, 80, 4):
        windows = draw(part, first=number)
        assert torch.equal(windows, windows[:, :1] + torch.arange(33))
        starts.update(windows[:, 0].tolist())
    assert starts == {0, 1, 2, 3}


def test_heldout_windows_are_evenly_spaced_from_end_to_end() -> None:
    part = torch.arange(100, dtype=torch.uint8)
    windows = heldout_windows(part, 9, 4)
    assert windows.dtype == torch.int64
    assert windows[:, 0].tolist() == [0, 30, 60, 90]
    assert torch.equal(windows, windows[:, :1] + torch.arange(10))
    assert heldout_windows(part, 9, 1)[:, 0].tolist() == [0]


def test_a_part_shorter_than_a_window_is_refused() -> None:
    part = torch.zeros(32, dtype=torch.uint8)
    with pytest.raises(UserError, match="32 bytes, a sequence needs 33"):
        draw(part)
    with pytest.raises(UserError, match="32 bytes, a sequence needs 33"):
        heldout_windows(part, 32, 1)
    assert heldout_windows(part, 31, 3).shape == (3, 32)


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64", "uint8"])
def test_tokens_are_windows_of_their_file(dtype: str, tmp_path: Path) -> None:
    tokens = (np.arange(4000) * 7 % 200).astype(dtype)
    path = tmp_path / "tokens.npy"
    np.save(path, tokens)
    corpus = load_tokens(path, vocab=200, seq_len=32)
    assert (len(corpus.train), len(corpus.heldout)) == (3800, 200)
    windows = draw(corpus.train)
    assert windows.dtype == torch.int64 and windows.shape == (4, 33)
    assert torch.equal(windows, (windows[:, :1] + 7 * torch.arange(33)) % 200)
    assert heldout_windows(corpus.heldout, 9, 4)[:, 0].tolist() == [
        int(tokens[3800 + at]) for at in (0, 63, 126, 190)
    ]
    assert corpus.unigram_entropy_nats == pytest.approx(math.log(200), rel=1e-3)


def test_bare_tokens_are_unsigned_of_16_bits(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(1000, dtype="<u2").tofile(path)
    corpus = load_tokens(path, vocab=1000, seq_len=8)
    assert corpus.train[:3].long().tolist() == [0, 1, 2] and corpus.description.endswith(": 1,000 tokens")


@pytest.mark.parametrize("numbers", ["int32", "uint32", "int64"])
def test_bare_tokens_of_more_bits_are_named(tmp_path: Path, numbers: str) -> None:
    plain, named = tmp_path / "tokens.bin", tmp_path / f"tokens.{numbers}.bin"
    for path in (plain, named):
        np.arange(100_000, 101_000).astype(np.dtype(numbers).newbyteorder("<")).tofile(path)
    corpus = load_tokens(named, vocab=128_256, seq_len=8)
    assert corpus.train[:3].long().tolist() == [100_000, 100_001, 100_002]
    with pytest.raises(UserError, match=r"as tokens.uint32.bin does"):
        load_tokens(plain, vocab=128_256, seq_len=8)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.array([1, 2, 300] * 400), "token 300 in it; the model knows 0 to 199"),
        (np.array([1, -2] * 400), "token -2 in it"),
        (np.zeros((4, 100), dtype=np.int64), r"int64 \[4, 100\]; one row of integers is needed"),
        (np.zeros(100), r"float64 \[100\]; one row of integers"),
        (np.zeros(100, dtype=np.int64), "too few tokens: 5 held out, a sequence needs 33"),
        (np.array([{}, []], dtype=object), "not a file of tokens"),
    ],
)
def test_what_is_no_file_of_tokens_is_one_line(tokens: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, tokens, allow_pickle=True)
    with pytest.raises(UserError, match=message):
        load_tokens(path, vocab=200, seq_len=32)
    with pytest.raises(UserError, match="cannot be read"):
        load_tokens(tmp_path / "nothing.npy", vocab=200, seq_len=32)
    (tmp_path / "empty.bin").write_bytes(b"")
    with pytest.raises(UserError, match="not a file of tokens"):
        load_tokens(tmp_path / "empty.bin", vocab=200, seq_len=32)


def test_files_that_are_nearly_tokens_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    path.write_bytes(b"")
    with pytest.raises(UserError, match="not a file of tokens"):
        load_tokens(path, vocab=9, seq_len=2)
    np.save(path, np.zeros(0, dtype=np.int64))
    with pytest.raises(UserError, match="too few tokens"):
        load_tokens(path, vocab=9, seq_len=2)
    np.save(path, np.zeros(100, dtype=">i4"))
    with pytest.raises(UserError, match="another machine's order"):
        load_tokens(path, vocab=9, seq_len=2)
    np.savez(tmp_path / "several.npz", np.zeros(100, dtype=np.int64))
    (tmp_path / "several.npz").rename(path)
    with pytest.raises(UserError, match="several arrays"):
        load_tokens(path, vocab=9, seq_len=2)
