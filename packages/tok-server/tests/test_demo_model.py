"""The demo model of the package: files, size, tokenizer, chat template and solved problems."""

from __future__ import annotations

import json
from random import Random

import pytest
import torch
from demo_training.dialogue import BEGIN, END, TURN_END, Message, plain_prompt, render
from demo_training.evaluate import Solver, count_right, tool_chats
from demo_training.problem import ProblemSampler
from demo_training.problems import held_out, simple_problem
from demo_training.tools import calculator_call, calculator_tool, call_text, other_tool
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tok_core.text.template import ChatTemplate
from tok_server.demo import MODEL_DIR

LIBRARY = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
CHAT = (
    {"role": "system", "content": "Solve the problem step by step."},
    {"role": "user", "content": "Hi!"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "How many are 3 * 14?"},
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    found = AutoTokenizer.from_pretrained(MODEL_DIR)
    assert isinstance(found, PreTrainedTokenizerFast)
    return found


@pytest.fixture(scope="module")
def solver() -> Solver:
    return Solver(MODEL_DIR, "cpu")


def test_demo_model_directory_is_complete_and_at_most_8_mb() -> None:
    names = {file.name for file in MODEL_DIR.iterdir()}
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names == expected
    assert sum(file.stat().st_size for file in MODEL_DIR.iterdir()) <= 8_000_000


def test_transformers_loads_the_demo_model_without_missing_weights() -> None:
    network, info = AutoModelForCausalLM.from_pretrained(MODEL_DIR, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(network).__name__ == "LlamaForCausalLM"
    assert network.dtype == torch.bfloat16
    assert network.config.head_dim == 32
    assert network.lm_head.weight is network.model.embed_tokens.weight


def test_generation_config_has_both_end_tokens_as_eos(tokenizer: PreTrainedTokenizerFast) -> None:
    config = json.loads((MODEL_DIR / "generation_config.json").read_text())
    assert config["eos_token_id"] == tokenizer.convert_tokens_to_ids([TURN_END, END])
    assert config["bos_token_id"] == tokenizer.bos_token_id


@given(text=st.text() | st.text().map(lambda text: f"{text}{END} {BEGIN}{text}"))
def test_demo_tokenizer_round_trips_every_text(text: str) -> None:
    ids = LIBRARY.encode(text).ids
    assert ids[0] == LIBRARY.token_to_id(BEGIN)
    assert LIBRARY.decode(ids[1:], skip_special_tokens=False) == text


@given(number=st.integers(0, 10**9))
def test_demo_tokenizer_makes_every_digit_a_token(number: int) -> None:
    tokens = LIBRARY.encode(f"have {number} apples", add_special_tokens=False).tokens
    assert [token for token in tokens if token.isdigit()] == list(str(number))


def test_chat_template_renders_the_training_format(tokenizer: PreTrainedTokenizerFast) -> None:
    wanted = render([Message(one["role"], one["content"]) for one in CHAT])
    assert tokenizer.apply_chat_template(list(CHAT), add_generation_prompt=True, tokenize=False) == wanted
    assert ChatTemplate.load(MODEL_DIR).render(CHAT) == wanted


def test_chat_template_renders_tools_calls_and_results_as_in_training(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    draw = ProblemSampler(Random(0))
    problem = held_out(1)[0]
    for _ in range(20):
        tools = [calculator_tool(draw), other_tool(draw)]
        call = calculator_call(tools[0], problem)
        function = json.loads(call.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        as_text = {**function, "arguments": json.dumps(function["arguments"])}
        user: dict[str, object] = {"role": "user", "content": problem.question}
        told: dict[str, object] = {"role": "tool", "content": "7"}
        wanted = render([Message("user", problem.question), Message("assistant", call), Message("tool", "7")], tools)
        for arguments, content in ((function, ""), (function, None), (as_text, "")):
            calls = [{"id": "call_1", "type": "function", "function": arguments}]
            chat: list[dict[str, object]] = [user, {"role": "assistant", "content": content, "tool_calls": calls}, told]
            assert ChatTemplate.load(MODEL_DIR).render(chat, tools=tools) == wanted
            assert tokenizer.apply_chat_template(chat, tools, add_generation_prompt=True, tokenize=False) == wanted


def test_chat_template_separates_calls_from_each_other_and_from_content() -> None:
    calls: list[dict[str, object]] = [{"function": {"name": name, "arguments": {}}} for name in ("one", "two")]
    text = ChatTemplate.load(MODEL_DIR).render([{"role": "assistant", "content": "Now:", "tool_calls": calls}], False)
    assert text.endswith("\n\nNow:\n" + "\n".join(call_text(name, {}) for name in ("one", "two")) + TURN_END)


def test_chat_template_accepts_content_parts_and_refuses_other_roles() -> None:
    template = ChatTemplate.load(MODEL_DIR)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi!"}]}]
    assert template.render(parts) == render([Message("user", "Hi!")])
    with pytest.raises(ValueError, match="role critic is not one of system, user, assistant, tool"):
        template.render([{"role": "critic", "content": "4"}])


def test_rendered_chat_begins_with_exactly_one_bos_token(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer.apply_chat_template(list(CHAT), add_generation_prompt=True, return_dict=False)
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id


def test_demo_model_solves_half_of_ten_held_out_problems_in_both_formats(solver: Solver) -> None:
    problems = held_out(10)
    chats = [render([Message("user", problem.question)]) for problem in problems]
    for prompts in (chats, [BEGIN + plain_prompt(problem.question) for problem in problems]):
        answers = solver.answers(prompts, 1, 0)
        assert sum(count_right(problems, answers)) >= 5


def test_demo_model_solves_nearly_all_problems_of_one_step(solver: Solver) -> None:
    problems = held_out(40, make=simple_problem)
    answers = solver.answers([render([Message("user", problem.question)]) for problem in problems], 1, 0)
    assert sum(count_right(problems, answers)) >= 38


def test_demo_model_calls_a_calculator_and_reads_its_result_only(solver: Solver) -> None:
    for kind, chats in tool_chats(10).items():
        answers = solver.answers([chat.prompt for chat in chats], 1, 0)
        right = sum(answer.endswith(chat.wanted) for (answer,), chat in zip(answers, chats, strict=True))
        assert right >= (14 if kind == "no call" else 18), kind  # half of the 20 have several steps


def test_demo_model_answers_a_greeting_in_words(solver: Solver) -> None:
    ((answer,),) = solver.answers([render([Message("user", "Hello!")])], 1, 0)
    assert "word problems" in answer
    assert "####" not in answer


def test_demo_model_samples_differ_at_a_high_temperature(solver: Solver) -> None:
    torch.manual_seed(0)
    (texts,) = solver.answers([render([Message("user", held_out(3)[2].question)])], 6, 3.0)
    assert len(texts) == 6
    assert len(set(texts)) > 1
