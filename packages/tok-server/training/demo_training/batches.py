"""Training batches: documents made and tokenised by several processes, packed back to back into rows.

Axes: B rows, S positions of a row.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from demo_training.dialogue import document

IGNORED = -100
"""Label of a position without loss."""

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Packed rows. Positions count within a document, documents within a row; number 0 is padding."""

    tokens_BS: Int32
    labels_BS: Int32
    positions_BS: Int32
    documents_BS: Int32


def batches(tokenizer: Path, rows: int, width: int, count: int, seed: int, processes: int) -> Iterator[TrainingBatch]:
    """`count` batches of [rows, width], the same for the same seed whatever `processes` is."""
    # The tokenizer's own threads would only compete with these processes.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tasks = ((rows, width, f"{seed}-{index}") for index in range(count))
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, _load, (str(tokenizer),)) as pool:
        yield from pool.imap(_make, tasks, chunksize=1)


_tokenizer: list[Tokenizer] = []  # of this process, set once by the pool


def _load(file: str) -> None:
    _tokenizer[:] = [Tokenizer.from_file(file)]


def _make(task: tuple[int, int, str]) -> TrainingBatch:
    rows, width, seed = task
    return pack(_tokenizer[0], rows, width, Random(seed))


def pack(tokenizer: Tokenizer, rows: int, width: int, random: Random) -> TrainingBatch:
    """One batch: each row filled with whole documents until the next one would not fit."""
    tokens, positions, documents = np.zeros((3, rows, width), np.int32)
    labels = np.full((rows, width), IGNORED, np.int32)
    stream = _encoded(tokenizer, random)
    ids, start = next(stream)
    for row in range(rows):
        at = 0
        while at + len(ids) <= width:
            end = at + len(ids)
            tokens[row, at:end] = ids
            positions[row, at:end] = np.arange(len(ids))
            documents[row, at:end] = documents[row, at - 1] + 1 if at else 1
            # A label stands where its token is predicted: one position before it.
            labels[row, at + start - 1 : end - 1] = ids[start:]
            at = end
            ids, start = next(stream)
    return TrainingBatch(tokens, labels, positions, documents)


def _encoded(tokenizer: Tokenizer, random: Random, chunk: int = 256) -> Iterator[tuple[list[int], int]]:
    """Ids of each document, and from which on they are learned (never the first: nothing predicts it)."""
    while True:
        documents = [document(random) for _ in range(chunk)]
        texts = [text for one in documents for text in (one.prompt, one.target)]
        ids = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
        for one, prompt, target in zip(documents, ids[::2], ids[1::2], strict=True):
            yield prompt + target, 1 if one.whole else len(prompt)
