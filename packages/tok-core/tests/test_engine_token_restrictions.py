"""`allowed_token_ids` and `bad_words`: tokens equal transformers' with the same logits masked, in every mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from support.engines import cpu_engine, manager_of, random_prompts
from support.tiny_models import make_model, reference_logits
from tok_core import Engine, InvalidField, SamplingParams
from tok_core.sampling_params import Grammar
from tok_core.text import Tokenizer

LETTERS = "JKQVXZ "  # no two of them are merged into one token
NEW = 24
PROMPTS = random_prompts((1, 16, 33))
SMALL: dict[str, Any] = {"max_step_tokens": 21, "max_running": 8, "page_size": 4}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("restrictions") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.load(path)


@pytest.fixture(scope="module")
def letters(tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(tokenizer.encode(letter, add_special_tokens=False)[0] for letter in LETTERS)


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    with cpu_engine(path) as one:
        yield one


@cache
def expected(
    path: Path, prompt: tuple[int, ...], allowed: tuple[int, ...] | None, banned: tuple[tuple[int, ...], ...]
) -> tuple[list[int], list[float]]:
    """Return greedy tokens by transformers, and their log-probabilities over the allowed tokens."""
    tokens: list[int] = []
    logprobs = []
    for _ in range(NEW):
        logits = reference_logits(path, [*prompt, *tokens])[-1]
        if allowed is not None:
            outside = torch.ones(len(logits), dtype=torch.bool)
            outside[list(allowed)] = False
            logits = logits.masked_fill(outside, -np.inf)
        left = logits.clone()
        for *before, last in banned:
            if tokens[len(tokens) - len(before) :] == before and len(before) <= len(tokens):
                left[last] = -np.inf
        token = int(left.argmax())
        tokens.append(token)
        logprobs.append(float(logits.log_softmax(-1)[token]))
    return tokens, logprobs


def sequences(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(tokenizer.encode(text, add_special_tokens=False)) for word in words for text in (word, f" {word}")
    )


def bad_words_of(path: Path, tokenizer: Tokenizer, prompt: list[int], letters: tuple[int, ...]) -> tuple[str, ...]:
    """Return words of one to three letters, each of which the answer without bans to them has."""
    words: list[str] = []
    for size in (3, 2, 2, 1):
        tokens, _ = expected(path, tuple(prompt), letters, sequences(tokenizer, words))
        text = tokenizer.decode(tokens)
        at = next(at for at in range(len(text)) if len(text[at : at + size].strip()) == size and text[at] != " ")
        words.append(text[at : at + size])
    return tuple(words)


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": NEW, "ignore_eos": True, "logprobs": 0, **more})


@pytest.mark.parametrize("options", [{}, SMALL], ids=["large", "small steps and pages"])
def test_greedy_tokens_with_allowed_ids_and_bad_words_equal_transformers(
    path: Path, tokenizer: Tokenizer, letters: tuple[int, ...], options: dict[str, Any]
) -> None:
    params, wanted = [], []
    for prompt in PROMPTS:
        words = bad_words_of(path, tokenizer, prompt, letters)
        for allowed, bad in ((letters, ()), (letters, words), (None, words)):
            params.append(greedy(allowed_token_ids=allowed, bad_words=bad, n=3))
            wanted.append(expected(path, tuple(prompt), allowed, sequences(tokenizer, bad)))
    assert wanted[0] != wanted[1]
    with cpu_engine(path, **options) as engine:
        outputs = engine.generate([prompt for prompt in PROMPTS for _ in range(3)], params)
    for output, (tokens, logprobs) in zip(outputs, wanted, strict=True):
        for sample in output.outputs:
            assert sample.token_ids == tokens
            assert sample.logprobs is not None
            np.testing.assert_allclose([one.logprob for one in sample.logprobs], logprobs, atol=1e-3)


def test_preempted_samples_keep_their_restrictions_and_their_tokens(
    path: Path, tokenizer: Tokenizer, letters: tuple[int, ...]
) -> None:
    words = ("QQ", "JKV", "X", "ZQ", "VZ")
    params = SamplingParams(
        n=6, seed=3, max_tokens=120, ignore_eos=True, allowed_token_ids=letters, bad_words=words, temperature=2.0
    )
    with cpu_engine(path) as engine:
        roomy = engine.generate(PROMPTS, params)
    with cpu_engine(path, kv_cache_tokens=512, max_running=6, page_size=4, admission="watermark") as engine:
        tight = engine.generate(PROMPTS, params)
        assert manager_of(engine).stats().preemptions > 0
    for one, other in zip(roomy, tight, strict=True):
        assert [sample.token_ids for sample in one.outputs] == [sample.token_ids for sample in other.outputs]
    texts = {sample.text for output in roomy for sample in output.outputs}
    assert len(texts) == 18
    for text in texts:
        assert set(text) <= set(LETTERS)
        assert not any(word in text for word in words)
    assert any("JK" in text for text in texts)


def test_prompt_does_not_count_as_the_beginning_of_a_bad_word(engine: Engine, tokenizer: Tokenizer) -> None:
    q, z = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "QZ")
    (output,) = engine.generate([[q]], greedy(logit_bias={z: 100.0}, bad_words=("QZ",), max_tokens=3))
    assert output.outputs[0].token_ids == [z, z, z]


def test_most_likely_tokens_are_allowed_ones(engine: Engine, letters: tuple[int, ...]) -> None:
    (output,) = engine.generate([PROMPTS[0]], greedy(allowed_token_ids=letters[:3], logprobs=5))
    for entry in output.outputs[0].logprobs or ():
        assert sorted(token for token, _ in entry.top) == sorted(letters[:3])
        assert sum(np.exp([logprob for _, logprob in entry.top])) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_grammar_and_restrictions_hold_together(engine: Engine, letters: tuple[int, ...], seed: int) -> None:
    params = SamplingParams(
        n=4,
        seed=seed,
        max_tokens=60,
        temperature=2.0,
        allowed_token_ids=(*letters[:5], *manager_of(engine).scheduler.info.eos_token_ids),
        bad_words=("JK", "Q", "VVV"),
        grammar=Grammar(kind="regex", value="JX(J|K|Q|V|X|Z){20}"),
    )
    (output,) = engine.generate([PROMPTS[1]], params)
    for sample in output.outputs:
        assert sample.finish_reason == "stop"
        assert sample.text[:2] == "JX"
        assert len(sample.text) == 22
        assert set(sample.text) <= {"J", "K", "V", "X"}
        assert not any(word in sample.text for word in ("JK", "VVV"))


def test_sample_ends_where_the_grammar_allows_only_ruled_out_tokens(engine: Engine) -> None:
    choice = Grammar(kind="choice", value='["QZJ"]')
    (output,) = engine.generate([PROMPTS[1]], SamplingParams(grammar=choice, bad_words=("QZ",)))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("Q", "length")
    with pytest.raises(InvalidField, match="grammar"):
        engine.generate([PROMPTS[1]], SamplingParams(grammar=choice, bad_words=("Q",)))


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("allowed_token_ids", {"allowed_token_ids": ()}),
        ("allowed_token_ids", {"allowed_token_ids": (1, -1)}),
        ("allowed_token_ids", {"allowed_token_ids": (True,)}),
        ("allowed_token_ids", {"allowed_token_ids": (512,)}),
        ("bad_words", {"bad_words": ("",)}),
        ("bad_words", {"bad_words": "word"}),
        ("bad_words", {"bad_words": ("Q" * 17,)}),
        ("bad_words", {"bad_words": tuple(map(str, range(129)))}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": -2}),
        ("skip_special_tokens", {"skip_special_tokens": 1}),
    ],
)
def test_invalid_value_is_refused(engine: Engine, field: str, more: dict[str, Any]) -> None:
    with pytest.raises(InvalidField) as caught:
        engine.generate([[1, 2]], SamplingParams(**more))
    assert caught.value.field == field


def test_restrictions_that_leave_no_token_are_refused(engine: Engine, letters: tuple[int, ...]) -> None:
    with pytest.raises(InvalidField, match="allowed_token_ids"):
        engine.generate([[1]], SamplingParams(allowed_token_ids=(letters[0],), bad_words=("JJ",)))
    eos = manager_of(engine).scheduler.info.eos_token_ids
    only_ends = SamplingParams(allowed_token_ids=eos, max_tokens=4)
    assert engine.generate([[1]], only_ends)[0].outputs[0].token_ids[0] in eos
    with pytest.raises(InvalidField, match="allowed_token_ids"):
        engine.generate([[1]], msgspec.structs.replace(only_ends, min_tokens=2))


@pytest.mark.parametrize(("kept", "tokens"), [(5, 5), (200, 40), (-1, 40), (1, 1)])
def test_truncated_prompt_keeps_its_last_tokens(engine: Engine, kept: int, tokens: int) -> None:
    prompt = list(range(40))
    (output,) = engine.generate([prompt], greedy(truncate_prompt_tokens=kept))
    (short,) = engine.generate([prompt[-tokens:]], greedy())
    assert output.prompt_token_ids == prompt[-tokens:]
    assert output.outputs[0].token_ids == short.outputs[0].token_ids


def test_a_truncated_text_keeps_its_begin_token(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode("the quick brown fox")
    (output,) = engine.generate(["the quick brown fox"], greedy(truncate_prompt_tokens=3))
    assert output.prompt_token_ids == [tokenizer.bos_id, *ids[-2:]]


def test_prompt_truncated_to_the_models_length_leaves_room_for_the_output(engine: Engine) -> None:
    (output,) = engine.generate([[7] * 2000], greedy(truncate_prompt_tokens=-1))
    assert len(output.prompt_token_ids) == manager_of(engine).scheduler.info.max_model_len - NEW
    assert len(output.outputs[0].token_ids) == NEW
