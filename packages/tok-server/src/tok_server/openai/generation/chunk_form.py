"""ChunkForm: how streams of chunks begin and end, of completions and chats alike."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tok_client.types import StopWhenResult, Usage
from tok_server.openai.generation.answers import DONE, event
from tok_server.openai.generation.job import Job
from tok_server.wire import ApiError


class ChunkForm(ABC):
    """Of one request. `_plain`: nothing but text is told of a token."""

    most_logprobs: int | None = None

    def __init__(self, job: Job) -> None:
        self._job = job
        self._plain = job.params.logprobs is None and not (job.return_token_ids or job.continuous_usage)

    def opening(self) -> bytes:
        """Nothing: choices begin with their first token."""
        return b""

    def closing(self, used: Usage, stop_when: StopWhenResult | None) -> bytes:
        """The chunk without choices, if there is anything for it to carry, and the mark of the end."""
        told = used if self._job.include_usage else None
        nothing = told is None and stop_when is None
        return DONE if nothing else self.last_chunk(told, stop_when) + DONE

    def failed(self, failure: ApiError) -> bytes:
        """The error in the place of a chunk."""
        return event(failure.body())

    @abstractmethod
    def last_chunk(self, used: Usage | None, stop_when: StopWhenResult | None) -> bytes:
        """The chunk without choices."""
