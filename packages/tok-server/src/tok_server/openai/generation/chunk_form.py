"""Begin and end streams of chunks, for completions and chats alike."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tok_client.types import StopWhenResult, Usage
from tok_server.openai.generation.answers import DONE, event
from tok_server.openai.generation.job import Job
from tok_server.wire import ApiError


class ChunkForm(ABC):
    """Base of the forms that stream chunks. `_plain`: chunks report only text, no log-probabilities, ids or usage."""

    most_logprobs: int | None = None

    def __init__(self, job: Job) -> None:
        self._job = job
        self._plain = job.params.logprobs is None and not (job.return_token_ids or job.continuous_usage)

    def opening(self) -> bytes:
        """Return no events: choices begin with their first token."""
        return b""

    def closing(self, used: Usage, stop_when: StopWhenResult | None) -> bytes:
        """Encode the chunk without choices, if there is usage or a result to carry, and the end mark [DONE]."""
        told = used if self._job.include_usage else None
        nothing = told is None and stop_when is None
        return DONE if nothing else self.last_chunk(told, stop_when) + DONE

    def failed(self, failure: ApiError) -> bytes:
        """Encode the error as an event in place of a chunk."""
        return event(failure.body())

    @abstractmethod
    def last_chunk(self, used: Usage | None, stop_when: StopWhenResult | None) -> bytes:
        """Encode the event of the chunk without choices."""
