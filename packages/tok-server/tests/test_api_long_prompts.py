"""Prompts near the model's length are served; far longer ones are refused before they are fully tokenized."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from support.serving import Server, serving
from tok_core.text import Tokenizer
from tok_server.openai.generation.prompts import check_prompt_size, max_prompt_bytes
from tok_server.wire.errors import ApiError

MIB = 1 << 20
LENGTH = 1024  # of the tiny model


@pytest.fixture(scope="module")
def long_context_server(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, max_body=64 * MIB) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model)


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths in characters of all texts that go through a tokenizer."""
    counts: list[int] = []
    encode_batch = Tokenizer.encode_batch

    def counting(self: Tokenizer, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        counts.extend(map(len, texts))
        return encode_batch(self, texts, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode_batch", counting)
    return counts


def test_prompt_of_megabytes_is_refused_without_being_tokenized(
    long_context_server: Server, tokenised: list[int]
) -> None:
    text = "a " * (4 * MIB)
    message = {"role": "user", "content": text}
    for path, fields, param in (
        ("completions", {"prompt": text}, "prompt"),
        ("completions", {"prompt": ["one", text]}, "prompt[1]"),
        ("chat/completions", {"messages": [message]}, "messages"),
    ):
        answer = long_context_server.call("POST", f"/v1/{path}", fields)
        assert answer.status == 400
        assert answer.error()["param"] == param
        assert answer.error()["code"] == "context_length_exceeded"
        assert f"maximum context length is {LENGTH} tokens" in str(answer.error()["message"])
    assert sum(tokenised) < 1024


@pytest.mark.parametrize("field", ["max_tokens", "prompt"])
def test_request_beyond_the_context_length_is_refused_with_its_code(long_context_server: Server, field: str) -> None:
    fields = {"prompt": "Hi", "max_tokens": LENGTH} if field == "max_tokens" else {"prompt": [1] * (LENGTH + 1)}
    answer = long_context_server.complete(**fields)
    assert answer.status == 400
    assert {**answer.error(), "message": ""} == {
        "message": "",
        "type": "invalid_request_error",
        "param": field,
        "code": "context_length_exceeded",
    }
    assert f"This model's maximum context length is {LENGTH} tokens" in str(answer.error()["message"])


def test_long_text_of_short_tokens_is_refused_after_tokenizing_a_part(
    tokenizer: Tokenizer, tokenised: list[int]
) -> None:
    length = 100_000  # of a large model: a check of bytes alone would accept the text
    text = "a " * (2 * MIB)
    assert len(text) < max_prompt_bytes(tokenizer, length)
    with pytest.raises(ApiError, match="prompt has 4194304 bytes"):
        check_prompt_size(text, tokenizer, length, "prompt")
    assert sum(tokenised) < len(text) / 4


@pytest.mark.parametrize("text", ["the " * 1000, "the quick brown fox " * 200, "é" * 500, " " * 1000, "a" * 1000])
def test_text_of_exactly_the_allowed_length_is_accepted(tokenizer: Tokenizer, text: str) -> None:
    length = len(tokenizer.encode(text))
    check_prompt_size(text, tokenizer, length, "prompt")


def test_default_max_tokens_is_capped_by_the_models_length(server: Server) -> None:
    def tokens(prompt: object, **fields: object) -> int:
        answer = server.complete(prompt=prompt, temperature=0, ignore_eos=True, **fields)
        assert answer.status == 200, answer.body
        used = answer.json()["usage"]
        assert isinstance(used, dict)
        return int(used["completion_tokens"])

    assert tokens([5] * (LENGTH - 10)) == 10
    assert tokens([5] * (LENGTH - 1)) == 1
    assert tokens([[5] * (LENGTH - 10), [5] * 3]) == 10 + 16
    assert tokens([5] * 3) == 16
    for fields, param in (({"max_tokens": 16}, "max_tokens"), ({"min_tokens": 11}, "min_tokens")):
        answer = server.complete(prompt=[5] * (LENGTH - 10), **fields)
        assert answer.status == 400
        assert answer.error()["param"] == param
    answer = server.complete(prompt=[5] * LENGTH)
    assert answer.error()["param"] == "prompt"
