"""What a run trains on and is judged by: windows of a text, or a model's own synthetic batches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from hzplan.checkpoint.position import START, Position
from hzplan.errors import UserError
from hzplan.formats.plan import Plan
from hzplan.models.workload import Workload
from hzplan.training.data import TOKEN_FILES, Corpus, heldout_windows, load_corpus, load_tokens, sample

BYTES = 256
"""The vocabulary that a text needs: its tokens are bytes."""


class Batches(Protocol):
    """Micro-batches that depend on nothing but what they are asked for by."""

    def train(self, step: int, index: int, rank: int) -> object:
        """The micro-batch of an accumulation index on a rank."""

    def heldout(self, count: int, rank: int, world: int) -> Sequence[object]:
        """``count`` micro-batches of a rank, from what training never sees."""


@dataclass(frozen=True, eq=False)
class TextBatches:
    """Windows of a corpus.

    ``since``: where the run has got to when these micro-batches begin; steps before it may have been of
    another size.
    """

    corpus: Corpus
    micro_batch: int
    seq_len: int
    seed: int
    world: int
    accumulation: int
    since: Position = START

    def train(self, step: int, index: int, rank: int) -> Tensor:
        """Random windows of the training part: the same ones in a step, however many ranks share them."""
        of_step = self.accumulation * self.world * self.micro_batch
        first = self.since.samples + (step - self.since.step) * of_step
        return sample(
            self.corpus.train,
            first=first + (index * self.world + rank) * self.micro_batch,
            count=self.micro_batch,
            seq_len=self.seq_len,
            seed=self.seed,
        )

    def heldout(self, count: int, rank: int, world: int) -> Sequence[Tensor]:
        """This rank's share of windows that are spread evenly over the whole held-out part."""
        windows = heldout_windows(self.corpus.heldout, self.seq_len, count * world * self.micro_batch)
        return list(windows[rank::world].split(self.micro_batch))


@dataclass(frozen=True)
class SyntheticBatches:
    """A workload's own batches, from generators seeded by place."""

    workload: Workload
    micro_batch: int
    seed: int

    def train(self, step: int, index: int, rank: int) -> object:
        """A batch of the workload's."""
        return self._batch("train", step, index, rank)

    def heldout(self, count: int, rank: int, world: int) -> Sequence[object]:
        """More batches, from seeds that training does not use."""
        return [self._batch("heldout", number, rank) for number in range(count)]

    def _batch(self, *place: object) -> object:
        digest = hashlib.blake2b(f"{self.seed} {place}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big", signed=True))
        return self.workload.batch(self.micro_batch, generator)


def reads_bytes(workload: Workload) -> bool:
    """Whether a text can replace the workload's own batches: token windows, with room for every byte."""
    return workload.vocab is not None and workload.vocab >= BYTES and reads_tokens(workload)


def reads_tokens(workload: Workload) -> bool:
    """Whether a batch of the workload's is windows of tokens."""
    batch = workload.batch(1, torch.Generator().manual_seed(0))
    return (
        isinstance(batch, Tensor)
        and batch.dtype == torch.int64
        and tuple(batch.shape) == (1, workload.seq_len + 1)
    )


def batches(
    workload: Workload, corpus: Corpus | None, plan: Plan, *, seed: int, since: Position = START
) -> Batches:
    """Batches of a corpus, or synthetic ones without it, as a plan shares them out."""
    batch = plan.batch
    if corpus is None:
        return SyntheticBatches(workload, batch.micro_batch, seed)
    return TextBatches(
        corpus, batch.micro_batch, workload.seq_len, seed, plan.mesh.world, batch.accumulation, since
    )


def corpus_of(data: Path | None, workload: Workload) -> Corpus | None:
    """What a model is trained on: a file of tokens, text as bytes, by default Python's own; None where it
    reads neither. UserError for a file that it does not read."""
    if data is not None and data.suffix in TOKEN_FILES:
        if workload.vocab is None or not reads_tokens(workload):
            raise UserError(
                f"--data {data}: {workload.name} does not read windows of tokens; leave --data out"
            )
        return load_tokens(data, vocab=workload.vocab, seq_len=workload.seq_len)
    if reads_bytes(workload):
        return load_corpus(data, seq_len=workload.seq_len)
    if data is not None:
        raise UserError(
            f"--data {data}: {workload.name} does not read bytes (its vocabulary is "
            f"{workload.vocab or 'not known'}, 256 are needed); leave --data out"
        )
    return None
