"""Answers: the answered lines of one batch, each once, in an SQLite file of their own.

The file is deleted once the batch's output is written. Finished batches therefore cost the database
of all batches nothing. A crash of the machine may lose the last commits (synchronous is NORMAL). Their lines are
answered again: no output file has been written yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

from tok_server.batch.storage.database import DamagedError, open_database, transaction

VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS source (name TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS answers (
    line INTEGER PRIMARY KEY,
    failed INTEGER NOT NULL,
    input_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    reasoning_tokens INTEGER NOT NULL,
    text BLOB NOT NULL
)
"""
INSERT = "INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)"
TOTALS = """SELECT count(*) - coalesce(sum(failed), 0), coalesce(sum(failed), 0), coalesce(sum(input_tokens), 0),
    coalesce(sum(cached_tokens), 0), coalesce(sum(output_tokens), 0), coalesce(sum(reasoning_tokens), 0) FROM answers"""


class SourceMismatch(DamagedError):
    """A file that holds answers to another input."""


class LineAnswer(NamedTuple):
    """A line's answer. `text` is its whole line of the output file, without the line break."""

    line: int
    failed: bool
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    text: bytes


class Totals(NamedTuple):
    """Sums over answers."""

    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def plus(self, answers: Iterable[LineAnswer]) -> Totals:
        """Return the totals with these answers added."""
        sums = list(self)
        for one in answers:
            sums[one.failed] += 1
            for index, tokens in enumerate(one[2:6], 2):
                sums[index] += tokens
        return Totals(*sums)


class Answers:
    """One batch's answers. Only for the thread that opened them.

    source  identifies the input; a file with answers to another input is refused (StoreError)
    charge  called with the number of bytes about to be stored, negative to revoke; may raise OSError
    """

    def __init__(self, path: Path, source: str, charge: Callable[[int], None] = lambda size: None) -> None:
        self._charge = charge
        self._connection = open_database(path, SCHEMA, VERSION, "NORMAL")
        try:
            self._check_source(path, source)
        except BaseException:
            self._connection.close()
            raise

    def _check_source(self, path: Path, source: str) -> None:
        with transaction(self._connection):
            found = self._connection.execute("SELECT name FROM source").fetchone()
            if found is None:
                self._connection.execute("INSERT INTO source VALUES (?)", (source,))
            elif found[0] != source:
                raise SourceMismatch(f"{path}: holds the answers of another batch ({found[0]}, not {source})")

    def add(self, answers: Iterable[LineAnswer]) -> list[LineAnswer]:
        """Store the answers in one transaction. Return the new ones: a line that has an answer keeps it."""
        answers = list(answers)
        size = sum(len(one.text) for one in answers)
        self._charge(size)
        try:
            with transaction(self._connection):
                return [one for one in answers if self._connection.execute(INSERT, one).rowcount]
        except BaseException:
            self._charge(-size)
            raise

    def totals(self) -> Totals:
        """Return the sums over all answers."""
        return Totals(*self._connection.execute(TOTALS).fetchone())

    def answered(self, lines: int) -> bytearray:
        """Return a byte for each of `lines` lines: 1 if the line has an answer."""
        marks = bytearray(lines)
        for (line,) in self._connection.execute("SELECT line FROM answers WHERE line < ?", (lines,)):
            marks[line] = 1
        return marks

    def in_order(self) -> Iterator[LineAnswer]:
        """Yield all answers in the order of lines, a few in memory at a time."""
        rows = self._connection.execute("SELECT * FROM answers ORDER BY line")
        for row in rows:
            yield LineAnswer(row[0], bool(row[1]), *row[2:])

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
