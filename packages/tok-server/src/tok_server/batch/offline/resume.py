"""Read an existing output file, to find the lines that need no new answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from tok_client.decoders import decoder
from tok_server.batch.execution import ANSWERS_PER_GROUP, LineSource
from tok_server.batch.storage import LineAnswer, StoreError, line_answer, parse_line, read_lines


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Line(msgspec.Struct):
    custom_id: str
    response: _Response | None = None


def successful_answers(output: Path, source: LineSource) -> Iterator[list[LineAnswer]]:
    """Yield the answers of lines that did not fail, in groups. Errors: StoreError if the output is of another input."""
    group: list[LineAnswer] = []
    lines = 0
    with output.open("rb") as answers:
        for line, text in zip(read_lines(source.path), answers, strict=False):
            lines += 1
            answer = _read(text, output, lines)
            if line.data is None or answer.custom_id != parse_line(line.data).custom_id:
                raise StoreError(f"{output}: line {lines} is not an answer to line {line.number} of {source.path}")
            if answer.response is not None and answer.response.status_code == 200:
                group.append(line_answer(line.row, 200, bytes(answer.response.body), text.rstrip(b"\n")))
            if len(group) >= ANSWERS_PER_GROUP:
                yield group
                group = []
        extra_line = answers.readline()
    if lines != source.lines or extra_line:
        raise StoreError(f"{output}: has a different number of lines than {source.path}")
    yield group


def _read(text: bytes, output: Path, number: int) -> _Line:
    try:
        return decoder(_Line).decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"{output}: line {number} is not an answer: {error}") from error
