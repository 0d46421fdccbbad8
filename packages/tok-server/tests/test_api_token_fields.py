"""Fields about tokens that vLLM's clients send: what may be sampled, what the prompt and the text hold, token ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from support.serving import Answer, Server, serving
from tok_core.text import Tokenizer
from tok_server.settings import Formats

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 12}
TEXT = "the quick brown fox"
USER = [{"role": "user", "content": "the quick brown fox"}]
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"


@pytest.fixture(scope="module")
def tokenizer(server: Server) -> Tokenizer:
    assert server.engine.tokenizer is not None
    return server.engine.tokenizer


@pytest.fixture(scope="module")
def letters(tokenizer: Tokenizer) -> list[int]:
    return [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "JQXZ"]


@pytest.fixture(scope="module")
def trusting(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, formats=Formats(trust_request_chat_template=True)) as running:
        yield running


def json_of(answer: Answer) -> Any:
    assert answer.status == 200, answer.body
    return answer.json()


def both(server: Server, **fields: object) -> list[dict[str, Any]]:
    """Return the answers to a completion and to a chat."""
    answers = [server.complete(prompt=TEXT, **fields), server.chat(messages=USER, **fields)]
    assert [one.status for one in answers] == [200, 200], answers[0].body + answers[1].body
    assert not any("x-tok-ignored" in one.headers for one in answers)
    return [json_of(one) for one in answers]


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def refusal(server: Server, **fields: object) -> tuple[object, str]:
    answers = [server.complete(prompt=TEXT, **fields), server.chat(messages=USER, **fields)]
    assert [one.status for one in answers] == [400, 400]
    errors = [one.error() for one in answers]
    assert errors[0]["param"] == errors[1]["param"]
    return errors[0]["param"], str(errors[0]["message"])


def test_only_allowed_tokens_are_sampled(server: Server, letters: list[int]) -> None:
    for answer in both(server, allowed_token_ids=letters, **GREEDY):
        assert set(text_of(answer)) <= set("JQXZ")
        assert len(text_of(answer)) == 12


def test_bad_words_are_not_generated(server: Server, letters: list[int]) -> None:
    for endpoint in range(2):
        words: list[str] = []
        for _ in range(3):  # each answer has a pair of letters that the next one must not have
            text = text_of(both(server, allowed_token_ids=letters, bad_words=words, **GREEDY)[endpoint])
            assert not any(word in text for word in words)
            words.append(text[3:5])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [100_000]}, "allowed_token_ids"),
        ({"allowed_token_ids": ["1"]}, "allowed_token_ids[0]"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": "J"}, "bad_words"),
        ({"bad_words": ["J" * 20]}, "bad_words"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens"),
        ({"prompt_logprobs": 101}, "prompt_logprobs"),
    ],
)
def test_invalid_value_gets_400_by_name(server: Server, fields: dict[str, object], param: str) -> None:
    assert refusal(server, **fields)[0] == param


def test_null_means_the_default(server: Server) -> None:
    names = "allowed_token_ids bad_words include_stop_str_in_output skip_special_tokens add_special_tokens"
    names += " truncate_prompt_tokens return_tokens_as_token_ids"
    plain, null = both(server, **GREEDY), both(server, **GREEDY, **dict.fromkeys(names.split()))
    assert [one["choices"] for one in plain] == [one["choices"] for one in null]


def test_special_tokens_and_stop_strings_are_shown_if_asked(server: Server, tokenizer: Tokenizer) -> None:
    (end,) = tokenizer.encode(END, add_special_tokens=False)
    only = {**GREEDY, "allowed_token_ids": [end], "max_tokens": 2}
    assert [text_of(one) for one in both(server, **only)] == [""] * 2
    assert [text_of(one) for one in both(server, **only, skip_special_tokens=False)] == [END * 2] * 2
    stop = {**only, "skip_special_tokens": False, "stop": "end_of"}
    assert [text_of(one) for one in both(server, **stop)] == ["<|"] * 2
    assert [text_of(one) for one in both(server, **stop, include_stop_str_in_output=True)] == ["<|end_of"] * 2
    fields = {**only, "skip_special_tokens": False, "echo": True, "logprobs": 0}
    (choice,) = json_of(server.complete(prompt=TEXT, **fields))["choices"]
    assert choice["text"] == BEGIN + TEXT + END * 2
    offsets = choice["logprobs"]["text_offset"]
    assert choice["text"][offsets[-1] :] == END


def test_prompt_has_the_special_tokens_that_are_asked_for(server: Server, tokenizer: Tokenizer) -> None:
    assert tokenizer.bos_id is not None

    def prompts(**fields: object) -> list[list[int]]:
        whole, chat = both(server, return_token_ids=True, max_tokens=1, **fields)
        return [whole["choices"][0]["prompt_token_ids"], chat["prompt_token_ids"]]

    begin, plain = tokenizer.bos_id, tokenizer.encode(TEXT, add_special_tokens=False)
    text, chat = prompts()
    assert text == [begin, *plain]
    assert chat[0] == begin
    assert begin not in chat[1:]
    assert prompts(add_special_tokens=False) == [plain, chat]
    assert prompts(add_special_tokens=True) == [text, [begin, *chat]]
    # A prompt that a client has rendered already.
    rendered = tokenizer.decode(chat, skip_special_tokens=False)
    fields = {"add_special_tokens": False, "return_token_ids": True, "max_tokens": 1}
    (choice,) = json_of(server.complete(prompt=rendered, **fields))["choices"]
    assert choice["prompt_token_ids"] == chat


def test_prompt_is_truncated_to_its_last_tokens(server: Server, tokenizer: Tokenizer) -> None:
    full = [one["usage"]["prompt_tokens"] for one in both(server, max_tokens=1)]
    for answer, before in zip(both(server, truncate_prompt_tokens=3, max_tokens=1), full, strict=True):
        assert before > 3
        assert answer["usage"]["prompt_tokens"] == 3
    ids = [token % 300 for token in range(2000)]
    fields = {"truncate_prompt_tokens": -1, "max_tokens": 4, "return_token_ids": True}
    kept = [one["prompt_token_ids"] for one in json_of(server.complete(prompt=[ids, ids[:5]], **fields))["choices"]]
    assert kept == [ids[-(server.engine.info.max_model_len - 4) :], ids[:5]]


@pytest.mark.parametrize("repeats", [1, 3000])
def test_a_truncated_text_keeps_its_begin_token_as_in_transformers(
    server: Server, tiny_model: Path, repeats: int
) -> None:
    library = PreTrainedTokenizerFast.from_pretrained(str(tiny_model), truncation_side="left")
    for kept, add_special_tokens in ((1, True), (2, True), (9, True), (9, False), (700, True)):
        text = "naïve 日本 " * repeats
        fields: dict[str, Any] = {"truncate_prompt_tokens": kept, "add_special_tokens": add_special_tokens}
        messages = [{"role": "user", "content": text}]
        rendered = library.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        whole, chat = (
            library(one, truncation=True, max_length=kept, add_special_tokens=add_special_tokens).input_ids
            for one in (text, rendered)
        )
        fields |= {"max_tokens": 1, "return_token_ids": True}
        assert json_of(server.complete(prompt=text, **fields))["choices"][0]["prompt_token_ids"] == whole
        assert json_of(server.chat(messages=messages, **fields))["prompt_token_ids"] == chat


def test_streams_carry_the_prompts_token_ids_once_per_choice(server: Server, tokenizer: Tokenizer) -> None:
    fields = {**GREEDY, "n": 2, "return_token_ids": True}
    prompts = [[1, 2, 3], [4, 5]]
    for echo in (False, True):
        chunks: list[Any] = server.complete(prompt=prompts, echo=echo, stream=True, **fields).chunks()
        choices = [one for chunk in chunks for one in chunk["choices"] if "prompt_token_ids" in one]
        found = [(one["index"], one["prompt_token_ids"]) for one in choices]
        assert sorted(found) == [(0, [1, 2, 3]), (1, [1, 2, 3]), (2, [4, 5]), (3, [4, 5])]
    whole = json_of(server.chat(messages=USER, **fields))
    chunks = list(server.chat(messages=USER, stream=True, **fields).chunks())
    reported = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
    assert reported == [whole["prompt_token_ids"]] * 2


def test_log_probabilities_name_tokens_by_id_if_asked(server: Server) -> None:
    fields = {**GREEDY, "return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = json_of(server.complete(prompt=TEXT, logprobs=2, **fields))["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(key.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for key in top)
    choice = json_of(server.chat(messages=USER, logprobs=True, top_logprobs=2, **fields))["choices"][0]
    content = choice["logprobs"]["content"]
    assert [one["token"] for one in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(top["token"].startswith("token_id:") for one in content for top in one["top_logprobs"])


def test_prompt_log_probabilities_have_ranks_and_up_to_100_tokens(server: Server) -> None:
    prompt = [3, 200, 7, 90]
    fields = {"prompt": prompt, "n": 2, "logprobs": 0, "return_token_ids": True, **GREEDY}
    few = json_of(server.complete(prompt_logprobs=1, **fields))["choices"]
    many = json_of(server.complete(prompt_logprobs=100, **fields))["choices"]
    for choice, more in zip(few, many, strict=True):
        assert choice["prompt_token_ids"] == prompt
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 12
        assert choice["prompt_logprobs"][0] is None
        for token, one, all_of in zip(
            prompt[1:], choice["prompt_logprobs"][1:], more["prompt_logprobs"][1:], strict=True
        ):
            assert len(all_of) in (100, 101)
            ranks = sorted(entry["rank"] for entry in all_of.values())
            assert ranks[:100] == list(range(1, 101))
            own = one[str(token)]
            assert own["rank"] == all_of[str(token)]["rank"]
            assert all(entry["rank"] == 1 for key, entry in one.items() if key != str(token))
            if len(all_of) == 101:
                assert own["rank"] > 100
    assert any(
        one["rank"] > 1 for choice in few for position in choice["prompt_logprobs"][1:] for one in position.values()
    )


def test_chat_template_of_a_request_is_refused_unless_the_server_trusts_it(server: Server, trusting: Server) -> None:
    template = "{{ bos_token }}{% for message in messages %}<{{ message.content }}>{% endfor %}"
    answer = server.chat(messages=USER, chat_template=template)
    assert answer.status == 400
    assert answer.error()["param"] == "chat_template"
    assert "--trust-request-chat-template" in str(answer.error()["message"])
    assert server.chat(messages=USER, chat_template=None, max_tokens=1).status == 200
    answer = trusting.chat(messages=USER, chat_template=template, max_tokens=1, return_token_ids=True)
    assert answer.status == 200
    assert trusting.engine.tokenizer is not None
    assert trusting.engine.tokenizer.decode(json_of(answer)["prompt_token_ids"], False) == f"{BEGIN}<{TEXT}>"


@pytest.mark.parametrize(
    "template",
    [
        "{% for %}",
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        "{{ raise_exception('no') }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "x" * 70_000,
    ],
    ids=["syntax", "nesting", "exception", "endless", "escape", "size"],
)
def test_bad_chat_template_of_a_request_gets_400(trusting: Server, template: str) -> None:
    answer = trusting.chat(messages=USER, chat_template=template, max_tokens=1)
    assert answer.status == 400, answer.body
    assert answer.error()["param"] in ("chat_template", "messages")
    assert trusting.chat(messages=USER, max_tokens=1).status == 200


def test_tokenize_gives_the_prompt_of_the_same_chat(server: Server, trusting: Server) -> None:
    template = "{% if tools %}tools{% endif %}<{{ messages[0].content }}>"
    tools = [{"type": "function", "function": {"name": "look"}}]
    messages = [{"role": "user", "content": TEXT}]
    fields = {"messages": messages, "tools": tools, "tool_choice": "none", "chat_template": template}
    chat = json_of(trusting.chat(**fields, max_tokens=1, return_token_ids=True))
    assert json_of(trusting.call("POST", "/tokenize", fields))["tokens"] == chat["prompt_token_ids"]
    refused = server.call("POST", "/tokenize", fields)
    assert (refused.status, refused.error()["param"]) == (400, "chat_template")


@pytest.mark.parametrize(("path", "fields"), [("/tokenize", {"prompt": TEXT}), ("/detokenize", {"tokens": [1]})])
def test_tokenize_and_detokenize_name_ignored_fields(server: Server, path: str, fields: dict[str, object]) -> None:
    answer = server.call("POST", path, {**fields, "zeta": 1})
    assert (answer.status, answer.headers["x-tok-ignored"]) == (200, "zeta")
