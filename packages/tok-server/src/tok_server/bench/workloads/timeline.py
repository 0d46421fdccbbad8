"""Turn token counts at given moments into a timeline of equal spans."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from tok_server.bench.workloads.result import Timeline

MAX_SPANS, MIN_SPANS = 120, 4
MIN_SPAN_SECONDS = 0.25  # shortest span, unless the run is shorter than MIN_SPANS spans; holds several steps


def timeline(moments_MC: ArrayLike, seconds: float) -> Timeline:
    """Return a timeline of at most 120 spans from M observations of a run of `seconds`.

    Columns of `moments_MC`: seconds since the start (rising), tokens generated so far, sequences running and, if known,
    busy seconds of the device so far and tokens computed so far.
    """
    at, tokens, running, *known = np.asarray(moments_MC, float).T
    at = np.minimum(at, seconds)  # the last observation is made just after the end
    spans = max(MIN_SPANS, min(MAX_SPANS, int(seconds / MIN_SPAN_SECONDS)))
    edges = np.linspace(0.0, seconds, spans + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    result = Timeline(
        np.round(middles, 3).tolist(),
        np.round(_rates(edges, at, tokens), 1).tolist(),
        np.round(np.interp(middles, at, running), 1).tolist(),
    )
    if not known:
        return result
    worked, computed = (_rates(edges, at, column) for column in known)
    return msgspec.structs.replace(
        result, device_busy=np.clip(worked, 0.0, 1.0).round(4).tolist(), computed_tok_s=computed.round(1).tolist()
    )


def _rates(edges: np.ndarray, at_M: np.ndarray, total_M: np.ndarray) -> np.ndarray:
    """Return the growth per second between the edges.

    A counter jumps at the end of each step, so that a span could contain one step too many or too few. Each jump is
    therefore spread over the time since the previous one. A pause longer than MIN_SPAN_SECONDS stays a pause.
    """
    grew = np.diff(total_M, prepend=-np.inf) > 0
    since = at_M - np.maximum.accumulate(np.where(grew, at_M, 0.0))
    kept = grew | (since > MIN_SPAN_SECONDS)
    kept[-1] = True
    return np.diff(np.interp(edges, at_M[kept], total_M[kept])) / np.diff(edges)


def timeline_of_requests(
    started: ArrayLike, first: ArrayLike, ended: ArrayLike, tokens: ArrayLike, samples: ArrayLike, seconds: float
) -> Timeline:
    """Return the timeline of requests, assuming that a request's tokens came evenly from `first` to `ended`.

    All columns have one entry per request; times are in seconds since the start of the run. A request's samples count
    as running from `started` to `ended`.
    """
    began, first_token, done, count, n = (np.asarray(c, float) for c in (started, first, ended, tokens, samples))
    edges = np.linspace(0.0, seconds, MAX_SPANS + 1)
    length = np.maximum(done - first_token, 1e-9)
    generated = [float((np.clip((edge - first_token) / length, 0.0, 1.0) * count).sum()) for edge in edges]
    open_at = [float(n[(began <= edge) & (edge < done)].sum()) for edge in edges]
    return timeline(np.column_stack((edges, generated, open_at)), seconds)
