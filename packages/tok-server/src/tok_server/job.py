"""Job: one HTTP request understood, ready for the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tok_core import InvalidField, SamplingParams
from tok_server.errors import ApiError, invalid


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request understood, ready for the engine.

    id                the answer's id; the engine's request ids begin with it
    prompts           token ids of each prompt
    include_usage     a stream ends with a chunk that carries the usage
    return_token_ids  choices carry their token ids
    ignored           fields that nobody defines
    names             the engine's name of a field -> what this endpoint calls it
    """

    id: str
    created: int
    model: str
    prompts: list[list[int]]
    params: SamplingParams
    stream: bool
    include_usage: bool
    return_token_ids: bool
    ignored: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)

    def refused(self, error: InvalidField, prompt: int) -> ApiError:
        """The engine's refusal of prompt number `prompt`, in the words of this endpoint."""
        name = self.names.get(error.field, error.field)
        if error.field == "prompt" and name == "prompt" and len(self.prompts) > 1:
            name = f"prompt[{prompt}]"
        return renamed(error, name)


def renamed(error: InvalidField, name: str) -> ApiError:
    """The error as 400 about the field `name`."""
    return invalid(name, str(InvalidField(name, error.value, error.allowed)))
