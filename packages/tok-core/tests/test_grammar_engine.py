"""Guided decoding in a whole engine: answers match their grammar, and other requests keep their tokens.

TOK_GRAMMAR_SCHEMAS: number of schemas to try; 40 by default.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import torch

from support.engines import assert_all_given_back, cpu_engine, manager_of, random_prompts
from support.schemas import random_schema, tokens_of
from support.tiny_models import make_model, reference_logits
from support.tiny_tokenizer import add_merges
from tok_core import AsyncEngine, Engine, EngineConfig, EngineError, InvalidField, RequestOutput, SamplingParams
from tok_core.grammar.compiler import Compiler
from tok_core.sampling_params import Grammar

pytestmark = pytest.mark.usefixtures("forked_children")

SCHEMAS = int(os.environ.get("TOK_GRAMMAR_SCHEMAS", "40"))
VOCAB = 512
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": ["apples", "dogs", "the brown fox"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
}
JSON = Grammar(kind="json_schema", value=json.dumps(PERSON))
LARK = """
// Comments and white space are those of Lark.
start: "(" item ("," item)* ")"
?item: WORD | /[0-9]{1,3}/
WORD: "fox" | "dog"
"""
WORDS = Grammar(kind="regex", value="(apples|baskets|dogs)( (apples|baskets|dogs)){3}")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("guided") / "tiny", max_positions=2048)


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[AsyncEngine]:
    settings: dict[str, Any] = {"kv_cache_tokens": 32_768, "max_running": 32, "dtype": "float32", "device": "cpu"}
    engine = AsyncEngine(EngineConfig(model=str(path), **settings), in_process=True)
    asyncio.run(engine.start())
    yield engine
    assert_all_given_back(manager_of(engine))
    asyncio.run(engine.close())


def params(grammar: Grammar | None, **more: Any) -> SamplingParams:
    return SamplingParams(grammar=grammar, **{"max_tokens": 400, "seed": 1, **more})


async def answer(engine: AsyncEngine, prompt: list[int] | str, asked: SamplingParams) -> RequestOutput:
    return await engine.generate(prompt, asked, stream=False).output()


async def streamed(engine: AsyncEngine, prompt: list[int], asked: SamplingParams) -> tuple[str, str | None]:
    text, reason = "", None
    async for delta in engine.generate(prompt, asked):
        text += delta.text
        reason = delta.finish_reason
    return text, reason


async def test_streamed_and_unstreamed_answers_are_valid_under_their_schema(engine: AsyncEngine) -> None:
    schemas = [random_schema(random.Random(seed)) for seed in range(SCHEMAS)]
    prompts = random_prompts(tuple(range(1, SCHEMAS + 1)))
    asked = [
        params(Grammar(kind="json_schema", value=json.dumps(schema)), seed=seed, max_tokens=1500)
        for seed, schema in enumerate(schemas)
    ]
    whole = asyncio.gather(*(answer(engine, *pair) for pair in zip(prompts, asked, strict=True)))
    parts = asyncio.gather(*(streamed(engine, *pair) for pair in zip(prompts, asked, strict=True)))
    for schema, output, (text, reason) in zip(schemas, await whole, await parts, strict=True):
        (sample,) = output.outputs
        assert (sample.text, sample.finish_reason) == (text, reason)
        assert reason == "stop", text
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    assert engine.stats()["skipped_tokens"] > 0


async def test_guided_samples_are_valid_and_repeat_with_their_seed(engine: AsyncEngine) -> None:
    asked = params(JSON, n=6, temperature=1.3)
    first, again, other = await asyncio.gather(
        *(answer(engine, [5, 6, 7], one) for one in (asked, asked, msgspec.structs.replace(asked, seed=2)))
    )
    texts = [[sample.text for sample in one.outputs] for one in (first, again, other)]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) == 6
    for text in texts[0] + texts[2]:
        jsonschema.validate(json.loads(text), PERSON)
    assert all(sample.finish_reason == "stop" for sample in first.outputs)


async def test_unguided_requests_keep_their_tokens_beside_guided_ones(engine: AsyncEngine) -> None:
    prompts = random_prompts((3, 17, 40, 90), seed=4)
    asked = [params(None, n=3, seed=seed, max_tokens=60, top_p=0.9) for seed in range(4)]
    alone = [await answer(engine, *pair) for pair in zip(prompts, asked, strict=True)]
    guided = [answer(engine, prompt, params(JSON, n=2, seed=9)) for prompt in prompts]
    both = await asyncio.gather(*(answer(engine, *pair) for pair in zip(prompts, asked, strict=True)), *guided)
    for before, after in zip(alone, both[:4], strict=True):
        assert [one.token_ids for one in before.outputs] == [one.token_ids for one in after.outputs]


async def test_guided_tokens_and_logprobs_follow_the_masked_distribution(engine: AsyncEngine, path: Path) -> None:
    """Compare each sampled token with transformers' logits at its position under the matcher's mask."""
    prompt = [11, 12, 13]
    asked = params(WORDS, temperature=0, logprobs=3)
    (sample,) = (await answer(engine, prompt, asked)).outputs
    assert re.fullmatch(WORDS.value, sample.text)
    assert sample.logprobs is not None
    logits = reference_logits(path, [*prompt, *sample.token_ids])
    matcher = (compiled := Compiler.load(str(path), VOCAB, engine.info.eos_token_ids).compile(WORDS)).matcher()
    free = 0
    for at, (token, told) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
        mask = compiled.first.copy().reshape(1, -1)
        mask[:] = 0
        matcher.fill_next_token_bitmask(mask)
        allowed = torch.tensor(tokens_of(mask[0]))
        right = torch.full((VOCAB,), -math.inf)
        right[allowed] = logits[len(prompt) - 1 + at][allowed]
        right = right.log_softmax(-1)
        assert told.token_id == token
        if (told.logprob, len(told.top)) != (0.0, 1):  # the mask allowed several tokens: the top-1 token is sampled
            free += 1
            assert token == int(right.argmax())
            assert told.logprob == pytest.approx(float(right[token]), abs=1e-4)
            assert len(told.top) == min(3, len(allowed))
            for other, logprob in told.top:
                assert logprob == pytest.approx(float(right[other]), abs=1e-4)
        assert all(other in allowed for other, _ in told.top)
        assert matcher.accept_token(token)
    assert free >= 4
    assert matcher.is_terminated()


@pytest.mark.parametrize(
    "more",
    [
        {"top_k": 3, "temperature": 2.0},
        {"top_p": 0.3, "min_p": 0.1},
        {"presence_penalty": 2.0, "repetition_penalty": 3.0, "frequency_penalty": 2.0},
        {"logit_bias": dict.fromkeys(range(0, 256, 2), -100.0), "temperature": 0},
        {"logprobs": 20, "n": 3},
    ],
    ids=str,
)
async def test_grammar_combines_with_filters_penalties_bias_and_logprobs(
    engine: AsyncEngine, more: dict[str, Any]
) -> None:
    output = await answer(engine, [1, 2, 3], params(JSON, **more))
    for sample in output.outputs:
        assert sample.finish_reason == "stop"
        jsonschema.validate(json.loads(sample.text), PERSON)
        assert all(-math.inf < told.logprob <= 0 for told in sample.logprobs or ())
        assert all(logprob > -math.inf for told in sample.logprobs or () for _, logprob in told.top)


async def test_each_grammar_kind_gives_matching_text(engine: AsyncEngine) -> None:
    rules = 'root ::= "(" word ("," word)* ")"\nword ::= "fox" | "dog"\n'
    asked = {
        Grammar(kind="choice", value='["yes", "no", "maybe"]'): r"yes|no|maybe",
        Grammar(kind="regex", value=r"\d{3}-[a-f]+x"): r"\d{3}-[a-f]+x",
        Grammar(kind="ebnf", value=rules): r"\((fox|dog)(,(fox|dog))*\)",
        Grammar(kind="lark", value=LARK): r"\((fox|dog|[0-9]{1,3})(,(fox|dog|[0-9]{1,3}))*\)",
        Grammar(kind="choice", value='["é"]', prefix="<a>", suffix="\n</a>"): "<a>é\n</a>",
    }
    for grammar, pattern in asked.items():
        (sample,) = (await answer(engine, "hello", params(grammar))).outputs
        assert re.fullmatch(pattern, sample.text), sample.text
        assert sample.finish_reason == "stop"
        assert sample.stop_reason is None
        assert sample.token_ids[-1] in engine.info.eos_token_ids
    (sample,) = (await answer(engine, "hello", params(Grammar(kind="json_object"), max_tokens=1900))).outputs
    assert sample.text.startswith("{")
    if sample.finish_reason == "stop":
        assert isinstance(json.loads(sample.text), dict)


SHARED = (["да", "нет"], ["é", "è"], ["正面", "消极"], ["日本語"], ["𝄞a", "𝄞b"], ["日本語", "日本諞"])


@pytest.fixture(scope="module", params=[2, 3, 9], ids="tokens of up to {} bytes".format)
def merging(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine whose tokens are parts of a character of SHARED, or one and more characters."""
    model = make_model("llama", tmp_path_factory.mktemp("merging"))
    add_merges(model, [text for texts in SHARED for text in texts], request.param)
    with cpu_engine(model) as engine:
        yield engine


@pytest.mark.parametrize("texts", SHARED, ids=str)
def test_guided_texts_that_share_part_of_a_character_are_complete(merging: Engine, texts: list[str]) -> None:
    choice = Grammar(kind="choice", value=json.dumps(texts))
    schema = Grammar(kind="json_schema", value=json.dumps({"enum": texts}))
    asked = [params(grammar, temperature=heat, n=n) for grammar in (choice, schema) for heat, n in ((0, 1), (2.0, 6))]
    for one, output in zip(asked, merging.generate([[1, 2, 3]] * len(asked), asked), strict=True):
        for sample in output.outputs:
            assert sample.finish_reason == "stop"
            assert (json.loads(sample.text) if one.grammar == schema else sample.text) in texts


async def test_max_tokens_and_stop_strings_cut_a_guided_answer(engine: AsyncEngine) -> None:
    (cut,) = (await answer(engine, [3], params(JSON, max_tokens=7))).outputs
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 7)
    assert '{"name": '.startswith(cut.text) or cut.text.startswith('{"name": ')
    (stopped,) = (await answer(engine, [3], params(JSON, stop=('"age"',)))).outputs
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", '"age"')
    assert re.fullmatch(r'\{"name": ".{0,6}", ', stopped.text)


async def test_unsupported_grammar_is_refused_at_submission_or_first_read(engine: AsyncEngine) -> None:
    bad = Grammar(kind="json_schema", value='{"type": "object", "propertyNames": {}}')
    with pytest.raises(InvalidField, match="propertyNames"):
        await answer(engine, [1], params(bad))
    with pytest.raises(InvalidField, match="propertyNames"):
        await engine.check_grammar(bad)
    with pytest.raises(InvalidField, match="propertyNames"):
        engine.generate([1], params(bad))  # the verdict is cached
    await engine.check_grammar(JSON)
    assert engine.open_requests == 0


async def test_a_request_may_be_aborted_while_its_grammar_is_checked(engine: AsyncEngine) -> None:
    slow = Grammar(kind="json_schema", value=json.dumps({"properties": {f"p{n}": PERSON for n in range(400)}}))
    stream = engine.generate([1], params(slow))
    stream.abort()
    assert [delta.finish_reason async for delta in stream] == ["abort"]
    await engine.check_grammar(slow)  # other callers can still check the grammar
    assert engine.open_requests == 0


async def test_cancelled_grammar_check_does_not_affect_other_callers(engine: AsyncEngine) -> None:
    slow = Grammar(kind="json_schema", value=json.dumps({"properties": {f"q{n}": PERSON for n in range(40)}}))
    given_up, kept = (asyncio.ensure_future(engine.check_grammar(slow)) for _ in range(2))
    await asyncio.sleep(0)
    assert given_up.cancel()
    await kept
    with pytest.raises(asyncio.CancelledError):
        await given_up
    await engine.check_grammar(slow, most=0)  # the verdict is cached
    with pytest.raises(EngineError, match="0 other grammars"):
        await engine.check_grammar(Grammar(kind="regex", value="unknown"), most=0)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("min_tokens", {"min_tokens": 1}),
        ("ignore_eos", {"ignore_eos": True}),
        ("grammar", {"grammar": "[a-z]"}),
    ],
)
def test_sampling_params_that_conflict_with_a_grammar_are_refused(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidField) as refused:
        SamplingParams(**{"grammar": JSON, **fields})
    assert refused.value.field == field


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "gbnf"},
        {"kind": "regex", "value": 3},
        {"kind": "regex", "value": "x" * 300_000},
        {"kind": "regex", "value": "\ud800"},
        {"kind": "json_object", "value": "{}"},
        {"kind": "regex", "value": "x", "prefix": "y" * 5000},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_grammar_refuses_invalid_kinds_values_and_sizes(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidField, match="grammar"):
        Grammar(**fields)


def test_model_without_a_tokenizer_refuses_grammars(path: Path, tmp_path: Path) -> None:
    for file in path.iterdir():
        if not file.name.startswith("tokenizer"):
            (tmp_path / file.name).symlink_to(file)
    settings: dict[str, Any] = {"kv_cache_tokens": 512, "max_running": 2, "dtype": "float32", "device": "cpu"}
    with (
        Engine(EngineConfig(model=str(tmp_path), **settings), in_process=True) as engine,
        pytest.raises(InvalidField, match="no tokenizer"),
    ):
        engine.generate([[1]], params(JSON))


def test_two_tp_ranks_give_the_guided_answers_of_one(path: Path) -> None:
    """With two ranks, processes of the engine check, compile and mask."""
    settings: dict[str, Any] = {"kv_cache_tokens": 4096, "max_running": 16, "dtype": "float32", "device": "cpu"}
    prompts = random_prompts((2, 30))
    asked = [params(JSON, n=2, temperature=0.8), params(WORDS, temperature=0, logprobs=2)]
    found = []
    for own, ranks in ((True, 1), (False, 2)):
        with Engine(EngineConfig(model=str(path), tp=ranks, **settings), in_process=own) as engine:
            outputs = engine.generate(prompts, asked)
            with pytest.raises(InvalidField, match="not closed"):
                engine.generate([[1]], params(Grammar(kind="regex", value="(a")))
        found.append([sample.token_ids for output in outputs for sample in output.outputs])
    assert found[0] == found[1]
