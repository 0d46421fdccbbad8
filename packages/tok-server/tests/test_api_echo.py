"""Prompt outputs: echo, prompt log-probabilities in the shapes of OpenAI and vLLM, and continuous usage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from support.serving import Server, serving
from support.tiny_models import make_model
from support.tolerance import near

GREEDY = {"temperature": 0, "ignore_eos": True}
TEXT = "the quick brown fox, naïve 日本"
USER = [{"role": "user", "content": TEXT}]
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def whole(server: Server, **fields: Any) -> list[dict[str, Any]]:
    answer = server.complete(**{**GREEDY, **fields})
    assert answer.status == 200, answer.body
    found: Any = answer.json()["choices"]
    return list(found)


def streamed(server: Server, **fields: Any) -> dict[int, dict[str, Any]]:
    """Return the streamed choices by index, with their chunks joined."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in server.complete(**{**GREEDY, **fields}, stream=True).chunks():
        for part in chunk["choices"]:  # type: ignore[attr-defined]
            choice = found.setdefault(part["index"], {"text": "", "logprobs": {name: [] for name in LISTS}})
            choice["text"] += part["text"]
            for name in LISTS if part["logprobs"] else ():
                choice["logprobs"][name] += part["logprobs"][name]
            choice["finish_reason"] = part["finish_reason"]
    return found


def test_an_echoed_choice_begins_with_its_prompt(server: Server) -> None:
    prompts = [TEXT, "one"]
    plain = whole(server, prompt=prompts, n=2, max_tokens=5)
    echoed = whole(server, prompt=prompts, n=2, max_tokens=5, echo=True)
    for one, other in zip(plain, echoed, strict=True):
        assert other["text"] == prompts[one["index"] // 2] + one["text"]
    parts = streamed(server, prompt=prompts, n=2, max_tokens=5, echo=True)
    assert [parts[index]["text"] for index in range(4)] == [choice["text"] for choice in echoed]


def test_an_echo_of_token_ids_is_their_text(server: Server) -> None:
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    (choice,) = whole(server, prompt=tokenizer.encode(TEXT), max_tokens=1, echo=True)
    assert choice["text"].startswith(TEXT)


def test_echo_logprobs_equal_those_of_generating_the_same_tokens(server: Server) -> None:
    (first,) = whole(server, prompt="one", max_tokens=12, logprobs=2, return_token_ids=True)
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode("one") + first["token_ids"]
    (choice,) = whole(server, prompt=prompt, max_tokens=1, logprobs=2, echo=True)
    found = choice["logprobs"]
    size = len(first["token_ids"])
    assert found["tokens"][-size - 1 : -1] == first["logprobs"]["tokens"]
    assert found["token_logprobs"][-size - 1 : -1] == pytest.approx(first["logprobs"]["token_logprobs"], abs=1e-3)
    for one, other in zip(found["top_logprobs"][-size - 1 : -1], first["logprobs"]["top_logprobs"], strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    assert all(len(found[name]) == len(prompt) + 1 for name in LISTS)


def test_text_offsets_of_an_echo_point_into_the_whole_text(server: Server) -> None:
    (choice,) = whole(server, prompt=TEXT, max_tokens=6, logprobs=0, echo=True)
    found = choice["logprobs"]
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert choice["text"][offset:].startswith(token)
    assert found["text_offset"] == sorted(found["text_offset"])
    parts = streamed(server, prompt=TEXT, max_tokens=6, logprobs=0, echo=True)[0]
    assert parts["text"] == choice["text"]
    assert near(parts["logprobs"], found)


def test_a_character_that_an_echoed_prompt_cuts_off_stays_cut(server: Server) -> None:
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    first, second = (tokenizer.pieces.index(bytes([byte])) for byte in "é".encode())
    fields = {"prompt": [*tokenizer.encode("ab"), first], "echo": True, "logprobs": 0, "logit_bias": {str(second): 100}}
    (choice,) = whole(server, **fields, max_tokens=2)
    assert choice["text"] == "ab\ufffd\ufffd\ufffd"
    assert choice["logprobs"]["text_offset"][-3:] == [2, 3, 4]
    assert streamed(server, **fields, max_tokens=2)[0]["logprobs"]["text_offset"] == choice["logprobs"]["text_offset"]


def test_text_offsets_count_no_space_that_the_echo_leaves_out(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "model")
    write_llama2_tokenizer(model / "tokenizer.json")
    with serving(model) as server:
        for prompt in ("ab", " a b"):
            (choice,) = whole(server, prompt=prompt, max_tokens=4, echo=True, logprobs=0, allowed_token_ids=[4, 5])
            text, found = choice["text"], choice["logprobs"]
            assert found["tokens"][:2] == ["<s>", " "]
            assert text == "".join(found["tokens"][2:])
            assert text.startswith(prompt)
            for token, offset in list(zip(found["tokens"], found["text_offset"], strict=True))[2:]:
                assert text[offset:].startswith(token)


def write_llama2_tokenizer(file: Path) -> None:
    """Write a tokenizer that puts a space before each text, and leaves it out when it decodes."""
    tokens = ["<s>", "<|end_of_text|>", "<|eot_id|>", "▁", "a", "b"]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(tokens[:3])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(file))
    config = file.with_name("tokenizer_config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "bos_token": "<s>"}))


@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_echo_with_max_tokens_0_scores_the_prompt_without_generating(server: Server, logprobs: int | None) -> None:
    fields = {"prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": logprobs, "n": 2}
    answer = server.complete(**fields)
    assert answer.status == 200, answer.body
    found: Any = answer.json()
    assert found["usage"]["completion_tokens"] == 0
    for choice in found["choices"]:
        assert choice["text"] == TEXT
        assert choice["finish_reason"] == "length"
        assert (choice["logprobs"] is None) == (logprobs is None)
        if logprobs is not None:
            assert len(choice["logprobs"]["tokens"]) == found["usage"]["prompt_tokens"]
            assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} <= set(range(1, logprobs + 2))
    parts = streamed(server, **fields)
    assert {part["text"] for part in parts.values()} == {TEXT}


def test_prompt_logprobs_have_the_shape_of_vllm(server: Server) -> None:
    (echoed,) = whole(server, prompt=TEXT, max_tokens=1, logprobs=2, echo=True)
    expected = echoed["logprobs"]["token_logprobs"][:-1]
    (choice,) = whole(server, prompt=TEXT, max_tokens=1, prompt_logprobs=2)
    check(server, choice["prompt_logprobs"], expected, 2)
    (both,) = whole(server, prompt=TEXT, max_tokens=1, prompt_logprobs=1, logprobs=3, echo=True)
    check(server, both["prompt_logprobs"], expected, 1)
    assert whole(server, prompt=TEXT, max_tokens=1)[0].keys() == {"index", "text", "logprobs", "finish_reason"}


def check(server: Server, found: list[Any], expected: list[float], most: int) -> None:
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(TEXT)
    assert len(found) == len(ids)
    assert found[0] is None
    for token, logprob, entry in zip(ids[1:], expected[1:], found[1:], strict=True):
        own = entry[str(token)]
        assert own["logprob"] == pytest.approx(logprob, abs=1e-4)
        assert own["decoded_token"].removeprefix("bytes:") in (
            tokenizer.piece(token).decode(errors="ignore"),
            *hexed(tokenizer.piece(token)),
        )
        ranks = [one["rank"] for one in entry.values() if one["rank"] is not None]
        assert ranks == list(range(1, most + 1)) or own["rank"] in ranks
        assert most <= len(entry) <= most + 1


def hexed(piece: bytes) -> list[str]:
    return ["".join(f"\\x{byte:02x}" for byte in piece)]


def test_chat_prompt_logprobs_are_a_field_beside_choices(server: Server) -> None:
    found: Any = server.chat(messages=USER, n=2, max_tokens=1, prompt_logprobs=0).json()
    assert len(found["prompt_logprobs"]) == found["usage"]["prompt_tokens"]
    assert [len(entry) for entry in found["prompt_logprobs"][1:]] == [1] * (len(found["prompt_logprobs"]) - 1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 101}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_invalid_echo_or_prompt_logprobs_gets_400_naming_the_field(server: Server, fields: Any, param: str) -> None:
    answer = server.complete(**{"prompt": TEXT, **fields})
    assert answer.status == 400
    assert answer.error()["param"] == param


@pytest.mark.parametrize("closing", [True, False])
def test_continuous_usage_stats_put_usage_on_every_chunk(server: Server, closing: bool) -> None:
    options = {"continuous_usage_stats": True, "include_usage": closing}
    for call, prompt in ((server.complete, {"prompt": TEXT}), (server.chat, {"messages": USER})):
        chunks: Any = call(**prompt, n=2, max_tokens=4, **GREEDY, stream=True, stream_options=options).chunks()
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 8
        assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1
        assert (chunks[-1]["choices"] == []) is closing
        for chunk in chunks:
            used = chunk["usage"]
            assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]


def test_thousands_of_samples_are_streamed_with_their_indices(server: Server) -> None:
    seen: dict[int, int] = {}
    answer = server.complete(prompt="one", n=2000, max_tokens=2, ignore_eos=True, stream=True, return_token_ids=True)
    for chunk in answer.chunks():
        for part in chunk["choices"]:  # type: ignore[attr-defined]
            seen[part["index"]] = seen.get(part["index"], 0) + len(part["token_ids"])
    assert seen == dict.fromkeys(range(2000), 2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 16_384, "echo": True, "prompt": [7] * 1100}, "n"),
        ({"n": 2000, "echo": True, "logprobs": 20}, "n"),
        ({"n": 2000, "prompt_logprobs": 20}, "n"),
    ],
)
def test_n_times_prompt_outputs_above_the_limit_is_refused(server: Server, fields: dict[str, Any], param: str) -> None:
    answer = server.complete(**{"prompt": [7] * 500, "max_tokens": 1, **fields})
    assert answer.status == 400
    assert answer.error()["param"] == param
    assert "at most 16777216 in all" in str(answer.error()["message"])


def test_prompt_logprobs_are_the_same_in_all_choices_of_a_prompt(server: Server) -> None:
    found = whole(server, prompt=[TEXT, "one"], n=2, max_tokens=1, prompt_logprobs=1)
    told = [choice["prompt_logprobs"] for choice in found]
    assert told[0] == told[1] != told[2] == told[3]
