"""Convert log-probabilities to OpenAI's two forms: parallel lists for completions, objects for chats.

A token is shown as its text, or as "token_id:42" if the request asks for that.
A token that is not complete UTF-8 is shown as escaped bytes: "bytes:\\xe2\\x82"
in completions, "\\xe2\\x82" in chats (whose objects also hold the bytes as numbers).
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from tok_client.types import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from tok_core import TokenLogprob
from tok_server.openai.generation.serializer import TokenTexts

DECODER = codecs.getincrementaldecoder("utf-8")
MIN_LOGPROB = -9999.0  # stands for −inf, which JSON cannot represent


def clamp_logprob(logprob: float) -> float:
    """Return the log-probability, but at least `MIN_LOGPROB`: JSON cannot represent −inf."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


class TextOffsets:
    """Offsets of a sample's tokens in its text, in characters. A token inside a character has that character's."""

    def __init__(self) -> None:
        self._decoder = DECODER("replace")
        self._length = 0

    def next(self, visible_bytes: bytes) -> int:
        """Return the offset of the next token, which adds `visible_bytes` to the text."""
        partial = self._decoder.getstate()[0]
        # An incomplete character that the token does not continue becomes one U+FFFD before it.
        interrupted = bool(partial and visible_bytes) and not _is_utf8_prefix(partial + visible_bytes[:1])
        offset = self._length + interrupted
        self._length += len(self._decoder.decode(visible_bytes))
        return offset

    def finish(self) -> None:
        """End the text: a character that is incomplete becomes one U+FFFD, and further tokens begin another one."""
        self._length += len(self._decoder.decode(b"", final=True))

    def copy(self) -> TextOffsets:
        """Return an independent copy at the same position."""
        result = TextOffsets()
        result._decoder.setstate(self._decoder.getstate())
        result._length = self._length
        return result


def _is_utf8_prefix(head: bytes) -> bool:
    """Return whether `head` is a prefix of valid UTF-8."""
    try:
        codecs.utf_8_decode(head, "strict", False)
    except UnicodeDecodeError:
        return False
    return True


def completion_logprobs(
    entries: Sequence[TokenLogprob], texts: TokenTexts, offsets: TextOffsets, shown: Sequence[bytes] | None = None
) -> CompletionLogprobs:
    """Convert the log-probabilities of one choice, or of one delta of it, to the form of completions.

    shown  bytes that each token adds to the text; None: those that it adds after other tokens
    """
    if shown is None:
        shown = [texts.visible_bytes(entry.token_id) for entry in entries]
    return CompletionLogprobs(
        tokens=[texts.name(entry.token_id, "bytes:") for entry in entries],
        token_logprobs=[clamp_logprob(entry.logprob) for entry in entries],
        top_logprobs=[_top(entry, texts) for entry in entries],
        text_offset=[offsets.next(visible) for visible in shown],
    )


def _top(entry: TokenLogprob, texts: TokenTexts) -> dict[str, float]:
    """Return the top-k tokens and the sampled one by text. Of equal texts, its own or the first one stays."""
    result: dict[str, float] = {}
    for token, logprob in entry.top:
        result.setdefault(texts.name(token, "bytes:"), clamp_logprob(logprob))
    result[texts.name(entry.token_id, "bytes:")] = clamp_logprob(entry.logprob)
    return result


def chat_logprobs(entries: Sequence[TokenLogprob], texts: TokenTexts) -> ChatLogprobs:
    """Convert the log-probabilities of one choice, or of one delta of it, to the form of chats."""
    return ChatLogprobs(content=[_chat_token(entry, texts) for entry in entries])


def _chat_token(entry: TokenLogprob, texts: TokenTexts) -> ChatTokenLogprob:
    return ChatTokenLogprob(
        token=texts.name(entry.token_id, ""),
        logprob=clamp_logprob(entry.logprob),
        bytes=list(texts.piece(entry.token_id)),
        top_logprobs=[
            TopLogprob(token=texts.name(token, ""), logprob=clamp_logprob(logprob), bytes=list(texts.piece(token)))
            for token, logprob in entry.top
        ],
    )


def prompt_logprobs(entries: Sequence[TokenLogprob | None], texts: TokenTexts, top_logprobs: int) -> PromptLogprobs:
    """Return, per prompt position, the prompt's own token and the `top_logprobs` most likely ones; or None."""
    return [None if entry is None else _ranked(entry, texts, top_logprobs) for entry in entries]


def _ranked(entry: TokenLogprob, texts: TokenTexts, top_logprobs: int) -> dict[int, PromptLogprob]:
    own = (entry.rank, entry.token_id, entry.logprob)
    top = [(rank, token, logprob) for rank, (token, logprob) in enumerate(entry.top, 1)]
    own = next((one for one in top if one[1] == entry.token_id), own)
    return {  # trainers read the first one as the prompt's own token
        token: PromptLogprob(logprob=clamp_logprob(logprob), rank=rank, decoded_token=texts.text(token, "bytes:"))
        for rank, token, logprob in (own, *top[:top_logprobs])
    }
