"""Job: one HTTP request understood, ready for the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from tok_core import InvalidField, SamplingParams
from tok_server.errors import ApiError, invalid


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request understood, ready for the engine.

    id                the answer's id; the engine's request ids begin with it
    prompts           token ids of each prompt
    include_usage     a stream ends with a chunk that carries the usage
    return_token_ids  choices carry their token ids
    ignored           paths of fields that nobody defines
    default_length    params.max_tokens is this server's default, which gives way to the model's length
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
    default_length: bool = False
    names: Mapping[str, str] = field(default_factory=dict)

    def params_of(self, prompt: list[int], max_model_len: int) -> SamplingParams:
        """The parameters for one of the prompts. Errors: InvalidField("min_tokens") if there is no room for so many."""
        room = max_model_len - len(prompt)
        most = self.params.max_tokens
        if not self.default_length or most is None or not 1 <= room < most:
            return self.params
        return msgspec.structs.replace(self.params, max_tokens=room)

    def refused(self, error: InvalidField, prompt: int) -> ApiError:
        """The engine's refusal of prompt number `prompt`, in the words of this endpoint."""
        name = self.names.get(error.field, error.field)
        if error.field == "prompt" and name == "prompt" and len(self.prompts) > 1:
            name = f"prompt[{prompt}]"
        return renamed(error, name)


def renamed(error: InvalidField, name: str) -> ApiError:
    """The error as 400 about the field `name`."""
    return invalid(name, str(InvalidField(name, error.value, error.allowed)))
