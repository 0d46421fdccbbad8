"""Training batches: documents are made and tokenised by several processes, then packed back to back into rows.

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
    """Packed rows.

    `positions_BS` counts within a document. `documents_BS` numbers the documents of a row from 1; 0 is padding.
    """

    tokens_BS: Int32
    labels_BS: Int32
    positions_BS: Int32
    documents_BS: Int32


def batches(tokenizer: Path, rows: int, width: int, count: int, seed: int, processes: int) -> Iterator[TrainingBatch]:
    """Yield `count` batches of [rows, width]. They depend only on the seed, not on `processes`."""
    # The tokenizer's own threads would only compete with these processes.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tasks = ((rows, width, f"{seed}-{index}") for index in range(count))
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, _load, (str(tokenizer),)) as pool:
        yield from pool.imap(_make, tasks, chunksize=1)


_tokenizer: list[Tokenizer] = []  # this process's tokenizer, set once by `_load`


def _load(file: str) -> None:
    _tokenizer[:] = [Tokenizer.from_file(file)]


def _make(task: tuple[int, int, str]) -> TrainingBatch:
    rows, width, seed = task
    return pack(_tokenizer[0], rows, width, Random(seed))


def pack(tokenizer: Tokenizer, rows: int, width: int, random: Random) -> TrainingBatch:
    """Return one batch; each row is filled with whole documents until the next one does not fit.

    Documents that are longer than a row are left out."""
    tokens, positions, documents = np.zeros((3, rows, width), np.int32)
    labels = np.full((rows, width), IGNORED, np.int32)
    stream = ((ids, start) for ids, start in _encoded(tokenizer, random) if len(ids) <= width)
    ids, start = next(stream)
    for row in range(rows):
        at = 0
        while at + len(ids) <= width:
            end = at + len(ids)
            tokens[row, at:end] = ids
            positions[row, at:end] = np.arange(len(ids))
            documents[row, at:end] = documents[row, at - 1] + 1 if at else 1
            # The logits at a position predict the next token, so labels are shifted by one position.
            labels[row, at + start - 1 : end - 1] = ids[start:]
            at = end
            ids, start = next(stream)
    return TrainingBatch(tokens, labels, positions, documents)


def _encoded(tokenizer: Tokenizer, random: Random, chunk: int = 256) -> Iterator[tuple[list[int], int]]:
    """Yield each document's ids and the index of its first id with loss.

    The index is at least 1, because nothing predicts the first id.
    """
    while True:
        documents = [document(random) for _ in range(chunk)]
        texts = [text for one in documents for text in (one.prompt, one.target)]
        ids = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
        for one, prompt, target in zip(documents, ids[::2], ids[1::2], strict=True):
            yield prompt + target, 1 if one.whole else len(prompt)
