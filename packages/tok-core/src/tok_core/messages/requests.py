"""Messages from the engine to a manager."""

from __future__ import annotations

import msgspec
import numpy as np

from tok_core.outputs import Pooling
from tok_core.sampling_params import SamplingParams


class Submit(msgspec.Struct, tag=True):
    """A new request, or the samples of it that one replica computes.

    rid           the engine's number of the request, or of this part of it
    params        sampling parameters; `seed` is set
    first_sample  index of the first of the `params.n` samples; another replica may compute other samples
    pooling       how to pool the prompt's embedding, for embedding requests; `params.max_tokens` is 0 then
    tenant        an opaque name of the caller; "" if unknown
    salt          16 bytes, or none; requests with different salts share no pages of the prefix cache
    """

    rid: int
    prompt: np.ndarray
    params: SamplingParams
    first_sample: int = 0
    pooling: Pooling | None = None
    tenant: str = ""
    salt: bytes = b""


class Cancel(msgspec.Struct, tag=True):
    """Cancels the request `rid`; ignored if the request has ended."""

    rid: int
