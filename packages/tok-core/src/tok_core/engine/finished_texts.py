"""Detokenise all samples that end with a report together, with a few array operations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tok_core.engine.token_store import TokenStore
from tok_core.messages import Finished, Int32
from tok_core.text import Tokenizer


class FinishedTexts(NamedTuple):
    """Tokens and texts of the samples of a request that end with one report, in the report's order.

    A sample that cannot be detokenised has the exception in place of its text.
    """

    token_ids: list[list[int]]
    texts: list[str | Exception]


def detokenise_finished(
    ends: Sequence[Finished], token_store: TokenStore, tokenizer: Tokenizer | None
) -> dict[int, FinishedTexts]:
    """Detokenise the ended samples that are in the token store; return them by rid. Their tokens stay in the store."""
    known, tokens, counts = token_store.read([end.rid for end in ends], [end.sample for end in ends])
    ends = [ends[place] for place in known]
    bounds = [0, *np.cumsum(counts).tolist()]
    values = tokens.tolist()
    ids = [values[first:last] for first, last in pairwise(bounds)]
    texts: list[str | Exception] = [""] * len(ids)
    if tokenizer is not None:
        try:
            texts = _texts(ends, ids, tokens, bounds, tokenizer)
        except Exception:  # one sample is at fault: detokenise each by itself
            texts = [_text_or_error(end, one, tokenizer) for end, one in zip(ends, ids, strict=True)]
    found: dict[int, FinishedTexts] = {}
    for end, one, text in zip(ends, ids, texts, strict=True):
        mine = found.get(end.rid)
        if mine is None:
            mine = found[end.rid] = FinishedTexts([], [])
        mine.token_ids.append(one)
        mine.texts.append(text)
    return found


def _texts(
    ends: Sequence[Finished], ids: list[list[int]], tokens: Int32, bounds: list[int], tokenizer: Tokenizer
) -> list[str | Exception]:
    pieces = tokenizer.shown(tokens)
    return [
        # An end token is never shown, whether or not the tokenizer marks it as special.
        b"".join(pieces[first : last - (end.reason == "stop")]).decode(errors="replace")
        if end.cut is None
        else tokenizer.continuation(np.array(one, np.int32), end.cut)
        for end, one, (first, last) in zip(ends, ids, pairwise(bounds), strict=True)
    ]


def _text_or_error(end: Finished, ids: list[int], tokenizer: Tokenizer) -> str | Exception:
    tokens = np.array(ids, np.int32)
    try:
        (text,) = _texts([end], [ids], tokens, [0, len(ids)], tokenizer)
        return text
    except Exception as error:
        return error
