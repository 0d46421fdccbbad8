"""Begin and end streams of chunks, for completions and chats alike."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tok_client.types import StopWhenResult, Usage
from tok_server.openai.generation.answers import DONE, event
from tok_server.openai.generation.job import GenerationJob
from tok_server.wire import ApiError


class ChunkSerializer(ABC):
    """Base of the forms that stream chunks. `_plain`: chunks report only text, no log-probabilities, ids or usage."""

    max_logprobs: int | None = None

    def __init__(self, job: GenerationJob) -> None:
        self._job = job
        self._plain = job.params.logprobs is None and not (job.return_token_ids or job.continuous_usage)

    def encode_opening(self) -> bytes:
        """Return no events: choices begin with their first token."""
        return b""

    def encode_closing(self, token_usage: Usage, stop_when: StopWhenResult | None) -> bytes:
        """Encode the chunk without choices, if there is usage or a result to carry, and the end mark [DONE]."""
        reported_usage = token_usage if self._job.include_usage else None
        empty = reported_usage is None and stop_when is None
        return DONE if empty else self.encode_last_chunk(reported_usage, stop_when) + DONE

    def encode_failure(self, failure: ApiError) -> bytes:
        """Encode the error as an event in place of a chunk."""
        return event(failure.body())

    @abstractmethod
    def encode_last_chunk(self, token_usage: Usage | None, stop_when: StopWhenResult | None) -> bytes:
        """Encode the event of the chunk without choices."""
