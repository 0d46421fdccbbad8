"""Parts of a request: the samples that one replica computes, and their number at its manager.

The manager's number holds the request's and the part's: two parts of one request may be with one replica, after the
other had died.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from tok_core.messages import Int32, Progress, Submit
from tok_core.outputs import Pooling
from tok_core.sampling_params import SamplingParams

BITS = 40  # of the number of a request
OWN = (1 << BITS) - 1


class RequestPart(NamedTuple):
    """Samples of a request that are computed by a replica. `again`: another replica died of it, or with it."""

    replica: int
    samples: range
    again: bool = False


def number(rid: int, index: int) -> int:
    """What the manager calls part `index` of a request."""
    return rid | index << BITS


def submit(
    rid: int,
    index: int,
    part: RequestPart,
    tokens: Int32,
    params: SamplingParams,
    pooling: Pooling | None = None,
    tenant: str = "",
    salt: bytes = b"",
) -> Submit:
    """What the manager is told of a part."""
    if len(part.samples) != params.n:
        params = msgspec.structs.replace(params, n=len(part.samples))
    return Submit(number(rid, index), tokens, params, part.samples.start, pooling, tenant, salt)


def of_requests(progress: Progress) -> Progress:
    """A manager's report with the numbers of requests in place of those of parts."""
    for end in progress.finished:
        end.rid &= OWN
    for news in progress.news():
        news.rid &= OWN
    failed = [(rid & OWN, reason) for rid, reason in progress.failed]
    refused = [(rid & OWN, allowed) for rid, allowed in progress.refused]
    cached = [(rid, tokens) for rid, tokens in progress.cached if rid <= OWN]  # as the first part found it
    rids = progress.rid & np.int64(OWN)
    return msgspec.structs.replace(progress, rid=rids, cached=cached, failed=failed, refused=refused)
