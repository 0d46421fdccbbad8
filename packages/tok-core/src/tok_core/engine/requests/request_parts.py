"""Split requests into parts, each with the samples that one replica computes, and number them for managers.

A manager knows a part by `rid | index << 40`: the number of the request, and the index of the part. The index is
needed since one replica may have two parts of a request, after another replica died.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from tok_core.messages import Int32, Progress, Submit
from tok_core.outputs import Pooling
from tok_core.sampling_params import SamplingParams

BITS = 40  # bits for the number of a request
OWN = (1 << BITS) - 1


class RequestPart(NamedTuple):
    """Samples of a request that one replica computes. `again`: they were dispatched again after a replica died."""

    replica: int
    samples: range
    again: bool = False


def number(rid: int, index: int) -> int:
    """Return the manager's number of part `index` of a request."""
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
    """Return the message that submits a part to its manager."""
    if len(part.samples) != params.n:
        params = msgspec.structs.replace(params, n=len(part.samples))
    return Submit(number(rid, index), tokens, params, part.samples.start, pooling, tenant, salt)


def of_requests(progress: Progress) -> Progress:
    """Return a manager's report with the numbers of parts replaced by those of their requests."""
    for end in progress.finished:
        end.rid &= OWN
    for output in progress.prompt_outputs():
        output.rid &= OWN
    failed = [(rid & OWN, reason) for rid, reason in progress.failed]
    refused = [(rid & OWN, allowed) for rid, allowed in progress.refused]
    cached = [(rid, tokens) for rid, tokens in progress.cached if rid <= OWN]  # only the count of part 0
    rids = progress.rid & np.int64(OWN)
    return msgspec.structs.replace(progress, rid=rids, cached=cached, failed=failed, refused=refused)
