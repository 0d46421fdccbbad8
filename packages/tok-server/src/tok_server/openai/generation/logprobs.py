"""Log-probabilities in OpenAI's two forms: lists beside each other for completions, objects for chats.

A token is shown as its text. Where it is no complete UTF-8 its bytes are written out: as "bytes:\\xe2\\x82"
in completions, as "\\xe2\\x82" in chats (whose objects have the bytes as numbers too).
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
from tok_core.text import Tokenizer

DECODER = codecs.getincrementaldecoder("utf-8")
LOWEST = -9999.0  # stands for −inf, which JSON cannot say


def finite(logprob: float) -> float:
    """The log-probability, or `LOWEST` where JSON cannot say it."""
    return logprob if logprob > LOWEST else LOWEST


class TokenTexts:
    """Tokens as they are shown; without a tokenizer by their number."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer

    def piece(self, token: int) -> bytes:
        """Bytes of the token."""
        return self.tokenizer.piece(token) if self.tokenizer else f"token_id:{token}".encode()

    def shown(self, token: int) -> bytes:
        """Bytes that the token adds to the text: none for special ones."""
        return self.tokenizer.pieces_of([token], True)[0] if self.tokenizer else b""

    def text(self, token: int, prefix: str) -> str:
        """The token's text, or `prefix` and its bytes written out."""
        piece = self.piece(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in piece)


class Offsets:
    """Where in a sample's text each token begins, in characters; within a character, where that one does."""

    def __init__(self) -> None:
        self._decoder = DECODER("replace")
        self._length = 0

    def next(self, shown: bytes) -> int:
        """The offset of a token that adds the bytes `shown`."""
        begun = self._decoder.getstate()[0]
        # Bytes of a character that the token does not go on with are shown as one U+FFFD before it.
        broken = bool(begun and shown) and not _goes_on(begun + shown[:1])
        offset = self._length + broken
        self._length += len(self._decoder.decode(shown))
        return offset

    def copy(self) -> Offsets:
        """Another one at the same place."""
        found = Offsets()
        found._decoder.setstate(self._decoder.getstate())
        found._length = self._length
        return found


def _goes_on(head: bytes) -> bool:
    """Whether UTF-8 may begin with `head`."""
    try:
        codecs.utf_8_decode(head, "strict", False)
    except UnicodeDecodeError:
        return False
    return True


def completion_logprobs(entries: Sequence[TokenLogprob], texts: TokenTexts, offsets: Offsets) -> CompletionLogprobs:
    """Of one choice, or of what it gained."""
    return CompletionLogprobs(
        tokens=[texts.text(entry.token_id, "bytes:") for entry in entries],
        token_logprobs=[finite(entry.logprob) for entry in entries],
        top_logprobs=[_top(entry, texts) for entry in entries],
        text_offset=[offsets.next(texts.shown(entry.token_id)) for entry in entries],
    )


def _top(entry: TokenLogprob, texts: TokenTexts) -> dict[str, float]:
    """The most likely tokens and the drawn one. Where two have the same text, the likelier one stays."""
    found: dict[str, float] = {}
    for token, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        found.setdefault(texts.text(token, "bytes:"), finite(logprob))
    return found


def chat_logprobs(entries: Sequence[TokenLogprob], texts: TokenTexts) -> ChatLogprobs:
    """Of one choice, or of what it gained."""
    return ChatLogprobs(content=[_chat_token(entry, texts) for entry in entries])


def _chat_token(entry: TokenLogprob, texts: TokenTexts) -> ChatTokenLogprob:
    return ChatTokenLogprob(
        token=texts.text(entry.token_id, ""),
        logprob=finite(entry.logprob),
        bytes=list(texts.piece(entry.token_id)),
        top_logprobs=[
            TopLogprob(token=texts.text(token, ""), logprob=finite(logprob), bytes=list(texts.piece(token)))
            for token, logprob in entry.top
        ],
    )


def prompt_logprobs(entries: Sequence[TokenLogprob | None], texts: TokenTexts, most: int) -> PromptLogprobs:
    """By place: the prompt's own token, and the `most` likeliest ones."""
    return [None if entry is None else _ranked(entry, texts, most) for entry in entries]


def _ranked(entry: TokenLogprob, texts: TokenTexts, most: int) -> dict[int, PromptLogprob]:
    found: dict[int, PromptLogprob] = {}
    for rank, (token, logprob) in enumerate(entry.top, 1):
        if rank <= most or token == entry.token_id:
            found[token] = PromptLogprob(logprob=finite(logprob), rank=rank, decoded_token=texts.text(token, "bytes:"))
    if entry.token_id not in found:
        own = PromptLogprob(logprob=finite(entry.logprob), decoded_token=texts.text(entry.token_id, "bytes:"))
        found[entry.token_id] = own
    return found
