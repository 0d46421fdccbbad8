"""Validate all lines of a file before the first of them runs, and report errors by line number.

Bodies are not examined: an invalid body is answered with its error, and the other lines continue.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tok_client.types import BatchError
from tok_server.batch.storage.lines import InputChanged, InputLine, LineRequest, parse_line, read_lines
from tok_server.wire import BadJson

MAX_ERRORS = 100  # errors reported for one file
MAX_CUSTOM_ID_CHARS = 512  # characters of a custom_id
MAX_LINES = 50_000_000  # blank ones too; digests of all ids are held in memory


class ValidationResult(NamedTuple):
    """Result of a validation.

    lines   number of lines that are not blank
    digest  digest of their bytes
    errors  the first `MAX_ERRORS` errors; empty: the file is valid
    """

    lines: int
    digest: str
    errors: list[BatchError]


def validate(
    path: Path, urls: Collection[str], max_line_bytes: int, stopped: Callable[[], bool] = lambda: False
) -> ValidationResult:
    """Check that each line is a request to one of `urls`, of at most `max_line_bytes` bytes, with a unique custom_id.

    A file of more than `MAX_LINES` lines is an error, and not read further. Memory: 16 bytes per line.
    Errors: Stopped, OSError.
    """
    seen, digest, errors, lines = _Ids(), blake2b(digest_size=16), list[BatchError](), 0
    for line in read_lines(path, max_line_bytes, stopped):
        if line.number > MAX_LINES:
            message = f"The file has more than {MAX_LINES} lines."
            return ValidationResult(lines, digest.hexdigest(), [_error(line, "too_many_lines", message, None)])
        lines += 1
        digest.update(b"\n" + (line.data or b""))
        error, custom_id = _check(line, urls, max_line_bytes)
        seen.add(custom_id, line.number)
        if error is not None and len(errors) < MAX_ERRORS:
            errors.append(error)
    if not lines:
        errors.append(BatchError(code="empty_file", message="The file has no requests."))
    errors += [_duplicate(number) for number in seen.repeated()]
    errors.sort(key=lambda error: error.line or 0)
    return ValidationResult(lines, digest.hexdigest(), errors[:MAX_ERRORS])


def check_digest(path: Path, digest: str, stopped: Callable[[], bool] = lambda: False) -> None:
    """Raise InputChanged if the lines are not those that `validate` read. Errors: Stopped, OSError."""
    digester = blake2b(digest_size=16)
    for line in read_lines(path, stopped=stopped):
        digester.update(b"\n" + (line.data or b""))
    if digester.hexdigest() != digest:
        raise InputChanged(f"the lines of {path.name} are not those that were validated")


def _check(line: InputLine, urls: Collection[str], max_line_bytes: int) -> tuple[BatchError | None, str | None]:
    """Return the line's error, if any, and the custom_id to compare with others."""
    if line.data is None:
        return _error(line, "line_too_long", f"The line has more than {max_line_bytes} bytes.", None), None
    try:
        request = parse_line(line.data)
    except BadJson as error:
        code = "invalid_request" if error.param else "invalid_json_line"
        return _error(line, code, f"The line is not a valid request: {error}.", error.param), None
    return _check_request(line, request, urls), request.custom_id


def _check_request(line: InputLine, request: LineRequest, urls: Collection[str]) -> BatchError | None:
    if not 1 <= len(request.custom_id) <= MAX_CUSTOM_ID_CHARS:
        message = f"custom_id has {len(request.custom_id)} characters; allowed: 1 to {MAX_CUSTOM_ID_CHARS}."
        return _error(line, "invalid_custom_id", message, "custom_id")
    if request.method != "POST":
        return _error(line, "invalid_method", f"method is {request.method[:80]!r}; allowed: 'POST'.", "method")
    if request.url not in urls:
        allowed = ", ".join(map(repr, sorted(urls)))
        return _error(line, "invalid_url", f"url is {request.url[:80]!r}; allowed: {allowed}.", "url")
    if not bytes(request.body).startswith(b"{"):
        return _error(line, "invalid_body", "body is not a JSON object.", "body")
    return None


def _error(line: InputLine, code: str, message: str, param: str | None) -> BatchError:
    return BatchError(code=code, message=message, line=line.number, param=param)


def _duplicate(number: int) -> BatchError:
    message = "custom_id is the custom_id of an earlier line; allowed: unique values."
    return BatchError(code="duplicate_custom_id", message=message, line=number, param="custom_id")


class _Ids:
    """Custom ids of the lines so far: a digest of 12 bytes of each, and its line's number."""

    def __init__(self) -> None:
        self._digests = bytearray()
        self._numbers = array("I")

    def add(self, custom_id: str | None, number: int) -> None:
        """Add the id of a line; None: the line has none."""
        if custom_id is not None:
            self._digests += blake2b(custom_id.encode(), digest_size=12).digest()
            self._numbers.append(number)

    def repeated(self) -> Iterator[int]:
        """Yield the numbers of lines whose id an earlier line has, the first `MAX_ERRORS`."""
        if not self._numbers:
            return
        digests = np.frombuffer(self._digests, "S12")
        # NumPy ignores trailing zero bytes of such strings: compared as integers, all bytes count.
        words = digests.view(np.uint32).reshape(-1, 3)
        order = np.lexsort(words.T[::-1])
        same = (words[order[1:]] == words[order[:-1]]).all(axis=1)
        numbers = np.frombuffer(self._numbers, np.uintc)[order[1:][same]]
        yield from np.sort(numbers)[:MAX_ERRORS].tolist()
