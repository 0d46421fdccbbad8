"""Embeddings: texts, and the vectors that represent them."""

from __future__ import annotations

import sys
from array import array
from binascii import a2b_base64
from typing import Literal

from tok_client.types.base import UNSET, Maybe, Wire
from tok_client.types.prompts import Prompts, check_prompts, one_by_one


class EmbeddingRequest(Wire, frozen=True, kw_only=True):
    """Body of `POST /embeddings`.

    input            text, a list of texts, the token ids of one text, or a list of such lists; no mixture
    encoding_format  encoding of the vectors; absent: "float"
    dimensions       numbers in each vector, at most the model's hidden size; absent: the hidden size

    Beyond OpenAI's reference:

    pooling     hidden state that makes the vector: the last token's, as usual for decoders, or the mean of all; absent:
                "last"
    cache_salt  requests with different values share nothing in the prefix cache

    ValueError (when decoding: msgspec.ValidationError): `input` mixes kinds, or is empty.
    """

    input: Prompts
    model: Maybe[str] = UNSET
    encoding_format: Maybe[Literal["float", "base64"]] = UNSET
    dimensions: Maybe[int] = UNSET
    user: Maybe[str] = UNSET
    pooling: Maybe[Literal["last", "mean"]] = UNSET
    cache_salt: Maybe[str] = UNSET

    def __post_init__(self) -> None:
        check_prompts("input", self.input)

    def inputs(self) -> list[str | list[int]]:
        """Return the inputs one by one: each a text, or the ids of its tokens."""
        return one_by_one(self.input)


class Embedding(Wire, frozen=True, kw_only=True):
    """The unit vector of input number `index`: a list of numbers, or little-endian 32-bit floats in base64."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str

    def vector(self) -> list[float]:
        """Return the numbers, decoding base64 if needed. ValueError: the text is not 32-bit floats in base64."""
        if not isinstance(self.embedding, str):
            return self.embedding
        numbers = array("f")
        numbers.frombytes(a2b_base64(self.embedding, strict_mode=True))
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers.tolist()


class EmbeddingUsage(Wire, frozen=True, kw_only=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Wire, frozen=True, kw_only=True):
    """Response of `POST /embeddings`; `data` in the order of the inputs."""

    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
