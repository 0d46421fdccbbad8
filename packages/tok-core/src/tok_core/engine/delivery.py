"""Sort a replica's report by request. Legend: U requests and N tokens of a report."""

from __future__ import annotations

from collections.abc import Mapping, Set
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tok_core.engine.finished_texts import detokenise_finished
from tok_core.engine.requests import StreamedTokens
from tok_core.engine.token_store import TokenStore
from tok_core.messages import Finished, Int64, Progress
from tok_core.text import Tokenizer


class Delivery(NamedTuple):
    """Contents of a report, by request.

    counted   rids, and the number of tokens of each, int64 [U]
    begun     rids with a sample whose first token is in the report
    streamed  tokens of the requests that are notified of each token
    ends      by rid, the samples that end, by index
    """

    counted: tuple[list[int], Int64]
    begun: list[int]
    streamed: StreamedTokens
    ends: dict[int, dict[int, Finished]]

    def rids(self) -> list[int]:
        """Return the requests that have tokens or ends to be notified of."""
        return [*self.streamed.bounds, *(rid for rid in self.ends if rid not in self.streamed.bounds)]


def group_by_request(
    progress: Progress, token_store: TokenStore, each_token: Set[int], tokenizer: Tokenizer | None
) -> Delivery:
    """Sort a report by request, and store its tokens. `each_token`: requests that are notified of each token."""
    rids, which = _grouped(progress.rid)
    begun, first = [], 0
    for rows in progress.rounds or [len(which)]:
        part = slice(first, first := first + rows)
        begun += token_store.append(rids, which[part], progress.sample[part], progress.token[part])
    ends: dict[int, dict[int, Finished]] = {}
    for end in progress.finished:
        ends.setdefault(end.rid, {})[end.sample] = end
    counted = rids, np.bincount(which, minlength=len(rids))
    streamed = _streamed_tokens(progress, rids, which, each_token) if each_token else NOTHING
    if progress.finished:
        streamed = streamed._replace(whole=detokenise_finished(progress.finished, token_store, tokenizer))
    return Delivery(counted, begun, streamed, ends)


def _grouped(rid: Int64) -> tuple[list[int], Int64]:
    """Return the distinct rids in order, and for each row the index of its rid among them.

    Same as `np.unique` with `return_inverse`, but faster for few rows.
    """
    order = rid.argsort(kind="stable")
    ordered = rid[order]
    differs = np.ones(len(rid), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=differs[1:])
    which = np.empty(len(rid), np.int64)
    which[order] = differs.cumsum() - 1
    return ordered[differs].tolist(), which


def _streamed_tokens(progress: Progress, rids: list[int], which: Int64, each_token: Set[int]) -> StreamedTokens:
    wanted = np.array([rid in each_token for rid in rids], np.bool_)
    rows = np.flatnonzero(wanted[which])
    rows = rows[np.argsort(which[rows], kind="stable")]
    stops = np.searchsorted(which[rows], np.flatnonzero(wanted), side="right").tolist()
    streamed = (rid for rid, one in zip(rids, wanted.tolist(), strict=True) if one)
    return StreamedTokens(
        progress.sample[rows].tolist(),
        progress.token[rows].tolist(),
        rows.tolist(),
        dict(zip(streamed, pairwise([0, *stops]), strict=True)),
    )


NOTHING = StreamedTokens([], [], [], {})
NO_ENDS: Mapping[int, Finished] = {}
