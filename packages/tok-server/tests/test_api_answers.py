"""Answers of completions and chats: equal whole and streamed, choices in order, tokens counted once, valid JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest

from support.serving import Server
from support.tolerance import near

GREEDY = {"temperature": 0, "ignore_eos": True}
TEXT = "the quick brown fox"
USER = [{"role": "user", "content": "the quick brown fox"}]


def choices(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return list(answer["choices"])


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return [item for one in lists for item in one]


def test_streamed_completion_concatenates_to_the_unstreamed_completion(server: Server) -> None:
    fields = {"prompt": TEXT, "max_tokens": 200, "logprobs": 1, "return_token_ids": True, **GREEDY}
    whole = choices(server.complete(**fields).json())[0]
    chunks = server.complete(**fields, stream=True).chunks()
    parts = [choices(chunk)[0] for chunk in chunks]
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert joined(part["token_ids"] for part in parts) == whole["token_ids"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert near(joined(part["logprobs"][name] for part in parts), whole["logprobs"][name])
    assert len(parts) > 1  # chunks arrive while the request runs, however late the loop is
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_streamed_chat_concatenates_to_the_unstreamed_chat(server: Server) -> None:
    fields = {"messages": USER, "max_tokens": 60, "return_token_ids": True, **GREEDY}
    whole = choices(server.chat(**fields).json())[0]
    chunks = server.chat(**fields, stream=True).chunks()
    first, *parts, last = [choices(chunk)[0] for chunk in chunks]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert last["delta"] == {}
    assert last["finish_reason"] == "length"
    assert all(part["finish_reason"] is None for part in (first, *parts))
    assert "".join(part["delta"]["content"] for part in parts) == whole["message"]["content"]
    assert joined(part["token_ids"] for part in parts) == whole["token_ids"]
    assert whole["message"]["role"] == "assistant"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_include_usage_sends_usage_in_a_last_chunk_without_choices(server: Server) -> None:
    for call, prompt in ((server.complete, {"prompt": TEXT}), (server.chat, {"messages": USER})):
        fields = {**prompt, "max_tokens": 5, "n": 3, **GREEDY}
        whole = call(**fields).json()["usage"]
        *chunks, last = call(**fields, stream=True, stream_options={"include_usage": True}).chunks()
        assert all(chunk["usage"] is None for chunk in chunks)
        assert last["choices"] == []
        used = last["usage"]
        assert isinstance(used, dict)
        assert isinstance(whole, dict)
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert used[name] == whole[name]
        assert used["completion_tokens"] == 15
        assert used["total_tokens"] == used["prompt_tokens"] + 15


def test_usage_counts_prompt_tokens_once_for_any_n(server: Server) -> None:
    prompt = list(range(40, 70))
    used = server.complete(prompt=prompt, n=4, max_tokens=3, ignore_eos=True).json()["usage"]
    assert isinstance(used, dict)
    assert used["prompt_tokens"] == 30
    assert used["completion_tokens"] == 12


def test_usage_reports_cached_prompt_tokens(server: Server) -> None:
    prompt = list(range(100, 200))
    fields = {"prompt": prompt, "max_tokens": 2, **GREEDY}
    server.complete(**fields)
    used: dict[str, Any] = server.complete(**fields).json()["usage"]  # type: ignore[assignment]
    assert used["prompt_tokens_details"]["cached_tokens"] == 96  # whole pages of 16
    *_, last = server.complete(**fields, stream=True, stream_options={"include_usage": True}).chunks()
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 96  # type: ignore[index]


def test_choices_come_in_order_of_prompt_then_sample_not_of_finish(server: Server) -> None:
    # The stop ids are tokens that greedy decoding samples sooner or later, so that prompts end at different times.
    prompts = ["zebra", "apple", "moon", "river"]
    alone = [
        choices(server.complete(prompt=one, max_tokens=24, return_token_ids=True, **GREEDY).json())[0]
        for one in prompts
    ]
    stops = [alone[0]["token_ids"][20], alone[2]["token_ids"][3]]
    fields = {
        "prompt": prompts, "n": 2, "max_tokens": 24, "stop_token_ids": stops, "return_token_ids": True, **GREEDY
    }  # fmt: skip
    found = choices(server.complete(**fields).json())
    assert [choice["index"] for choice in found] == list(range(8))
    for choice in found:
        expected = alone[choice["index"] // 2]["token_ids"]
        assert choice["token_ids"] == expected[: len(choice["token_ids"])]
    streamed: dict[int, list[int]] = {}
    for chunk in server.complete(**fields, stream=True).chunks():
        for part in choices(chunk):
            streamed.setdefault(part["index"], []).extend(part["token_ids"])
    assert streamed == {choice["index"]: choice["token_ids"] for choice in found}


def test_samples_of_a_chat_come_in_order_of_index(server: Server) -> None:
    found = choices(server.chat(messages=USER, n=6, max_tokens=30, seed=5).json())
    assert [choice["index"] for choice in found] == list(range(6))
    assert len({choice["message"]["content"] for choice in found}) > 1
    streamed = [""] * 6
    for chunk in server.chat(messages=USER, n=6, max_tokens=30, seed=5, stream=True).chunks():
        for part in choices(chunk):
            streamed[part["index"]] += part["delta"].get("content", "")
    assert streamed == [choice["message"]["content"] for choice in found]


def test_the_same_seed_gives_the_same_answer(server: Server) -> None:
    texts = {choices(server.complete(prompt=TEXT, max_tokens=20, seed=seed).json())[0]["text"] for seed in (1, 1, 2, 2)}
    assert len(texts) == 2


@pytest.mark.parametrize("top", [0, 3])
def test_completion_logprobs_are_parallel_lists(server: Server, top: int) -> None:
    choice = choices(server.complete(prompt=TEXT, max_tokens=30, logprobs=top, **GREEDY).json())[0]
    found = choice["logprobs"]
    assert {len(found[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {30}
    for token, logprob, likeliest in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert likeliest[token] == logprob <= 0
        assert len(likeliest) <= max(top, 1) + 1
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        if not token.startswith("bytes:") and not token.startswith("<|"):
            assert choice["text"][offset:].startswith(token)


def test_logprobs_are_null_unless_requested(server: Server) -> None:
    assert choices(server.complete(prompt=TEXT, max_tokens=2).json())[0]["logprobs"] is None
    assert choices(server.chat(messages=USER, max_tokens=2).json())[0]["logprobs"] is None


def test_chat_logprobs_have_token_text_and_bytes(server: Server) -> None:
    choice = choices(server.chat(messages=USER, max_tokens=30, logprobs=True, top_logprobs=2, **GREEDY).json())[0]
    found = choice["logprobs"]["content"]
    assert len(found) == 30
    for entry in found:
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]  # greedy sampling takes the most likely token
        try:
            assert bytes(entry["bytes"]).decode() == entry["token"]
        except UnicodeDecodeError:
            assert entry["token"].startswith("\\x")
    chat = server.chat(messages=USER, max_tokens=3, logprobs=True).json()
    assert all(entry["top_logprobs"] == [] for entry in choices(chat)[0]["logprobs"]["content"])


def test_a_logit_bias_of_minus_100_forbids_a_token(server: Server) -> None:
    first = choices(server.complete(prompt=TEXT, max_tokens=1, return_token_ids=True, **GREEDY).json())[0]
    token = first["token_ids"][0]
    fields = {"max_tokens": 1, "logprobs": 20, "logit_bias": {str(token): -100}, **GREEDY}
    answer = server.complete(prompt=TEXT, return_token_ids=True, **fields)
    assert choices(answer.json())[0]["token_ids"] != [token]


def test_stop_string_is_cut_from_whole_and_streamed_text(server: Server) -> None:
    fields = {"prompt": TEXT, "max_tokens": 60, **GREEDY}
    text: str = choices(server.complete(**fields).json())[0]["text"]
    stop = re.findall("[ -~]{3}", text)[-1]
    expected = text[: text.index(stop)]
    for given in (stop, [stop], ["not in there at all", stop]):
        choice = choices(server.complete(**fields, stop=given).json())[0]
        assert choice["text"] == expected
        assert choice["finish_reason"] == "stop"
    chunks = server.complete(**fields, stop=stop, stream=True).chunks()
    assert "".join(choices(chunk)[0]["text"] for chunk in chunks) == expected


def test_max_tokens_default_is_16_for_completions_and_context_for_chats(server: Server) -> None:
    used: dict[str, Any] = server.complete(prompt=TEXT, **GREEDY).json()["usage"]  # type: ignore[assignment]
    assert used["completion_tokens"] == 16
    used = server.chat(messages=USER, **GREEDY).json()["usage"]  # type: ignore[assignment]
    assert used["total_tokens"] == server.engine.info.max_model_len


def test_text_and_its_token_ids_are_the_same_prompt(server: Server) -> None:
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    fields = {"max_tokens": 8, **GREEDY}
    by_text = server.complete(prompt=TEXT, **fields).json()
    by_ids = server.complete(prompt=tokenizer.encode(TEXT), **fields).json()
    assert choices(by_text)[0]["text"] == choices(by_ids)[0]["text"]


def test_parts_of_a_message_are_lines_of_one_text(server: Server) -> None:
    parts = [{"type": "text", "text": TEXT[:9]}, {"type": "text", "text": TEXT[9:]}]
    fields = {"max_tokens": 8, **GREEDY}
    whole = server.chat(messages=[{"role": "user", "content": f"{TEXT[:9]}\n{TEXT[9:]}"}], **fields).json()
    assert choices(server.chat(messages=[{"role": "user", "content": parts}], **fields).json()) == choices(whole)


def test_chat_equals_the_completion_of_its_rendered_template(server: Server) -> None:
    template, tokenizer = server.engine.chat_template, server.engine.tokenizer
    assert template is not None
    assert tokenizer is not None
    messages = [{"role": "system", "content": "be brief"}, *USER]
    ids = tokenizer.encode(template.render(messages), add_special_tokens=False)
    completed = server.complete(prompt=ids, max_tokens=8, **GREEDY).json()
    developer = [{"role": "developer", "content": "be brief"}, *USER]
    for said in (messages, developer):
        answer = server.chat(messages=said, max_tokens=8, **GREEDY).json()
        assert choices(answer)[0]["message"]["content"] == choices(completed)[0]["text"]
        assert answer["usage"]["prompt_tokens"] == len(ids)  # type: ignore[index]


def test_top_k_1_min_p_1_and_tiny_top_p_give_the_greedy_text(server: Server) -> None:
    greedy = choices(server.complete(prompt=TEXT, max_tokens=20, **GREEDY).json())[0]["text"]
    for fields in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
        found = choices(server.complete(prompt=TEXT, max_tokens=20, ignore_eos=True, **fields).json())[0]
        assert found["text"] == greedy, fields


def test_models_endpoint_lists_the_model_and_finds_it_by_name(server: Server) -> None:
    listed: dict[str, Any] = server.call("GET", "/v1/models").json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", server.engine.info.max_model_len)
    assert server.call("GET", "/v1/models/tiny").json() == model
    missing = server.call("GET", "/v1/models/owner/name")
    assert missing.status == 404
    assert missing.error()["code"] == "model_not_found"
