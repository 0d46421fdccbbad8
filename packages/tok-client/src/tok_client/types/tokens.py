"""Tokenisation and detokenisation: not in OpenAI's reference; the types follow vLLM's."""

from __future__ import annotations

from tok_client.types.base import UNSET, JSONObject, Maybe, Wire
from tok_client.types.chat import Message, Tool


class TokenizeRequest(Wire, frozen=True, kw_only=True):
    """Body of `POST /tokenize`: a text, or the messages of a chat, which the model's template renders as a text.

    add_special_tokens  adds BOS and EOS tokens; by default for a `prompt` only, since templates write their own

    ValueError (when decoding: msgspec.ValidationError): not exactly one of `prompt` and `messages`.
    """

    model: Maybe[str] = UNSET
    prompt: Maybe[str] = UNSET
    messages: Maybe[list[Message]] = UNSET
    tools: Maybe[list[Tool]] = UNSET
    add_special_tokens: Maybe[bool] = UNSET
    return_token_strs: Maybe[bool] = UNSET
    add_generation_prompt: Maybe[bool] = UNSET
    continue_final_message: Maybe[bool] = UNSET
    chat_template_kwargs: Maybe[JSONObject] = UNSET

    def __post_init__(self) -> None:
        if isinstance(self.prompt, str) == isinstance(self.messages, list):
            problem = "and messages are both set" if isinstance(self.prompt, str) else "and messages are both missing"
            raise ValueError(f"prompt {problem}; allowed: one of them")
        if self.messages == []:
            raise ValueError("messages is []; allowed: at least one message")


class TokenizeResponse(Wire, frozen=True, kw_only=True):
    """Response of `POST /tokenize`; `token_strs`, if requested, has the text of each token."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Wire, frozen=True, kw_only=True):
    """Body of `POST /detokenize`."""

    model: Maybe[str] = UNSET
    tokens: list[int]


class DetokenizeResponse(Wire, frozen=True, kw_only=True):
    """Response of `POST /detokenize`: the text, including special tokens."""

    prompt: str
