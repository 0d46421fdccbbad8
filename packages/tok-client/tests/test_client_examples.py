"""Tests that run the examples and the README's snippets unchanged against the real server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.batching import completion_line, custom_ids, jsonl, read_jsonl
from support.patience import PATIENCE
from support.scripted_model import CHAT_TEMPLATE, make_scripted_model
from support.serving import NAME, Server, serving

EXAMPLES = Path(__file__).parents[1] / "examples"
README = EXAMPLES.parent / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
# The model first calls the tool, and answers in words once the result is in the messages.
SCRIPTS = {
    "@call": ["<tool_call>", '{"name": "weather", ', '"arguments": {"city": ', '"Paris"}}', "</tool_call>"],
    "@words": ["It is", " sunny", ": 42", "."],
}
TEMPLATE = CHAT_TEMPLATE.replace("{{ script }}", "{{ '@call' if tools and messages[-1].role != 'tool' else '@words' }}")


@pytest.fixture(scope="module")
def scripted_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_scripted_model(tmp_path_factory.mktemp("examples") / "model", SCRIPTS, TEMPLATE)
    with serving(model, data_dir=str(tmp_path_factory.mktemp("data"))) as running:
        yield running


def run(example: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "error", str(EXAMPLES / example), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_map_file_example_answers_prompts_and_resumes(scripted_server: Server, tmp_path: Path) -> None:
    source, target = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    source.write_text("the quick\nfox\n")
    first = run("map_file.py", scripted_server.url, str(source), str(target))
    source.write_text("the quick\nfox\ndogs\n")
    assert run("map_file.py", scripted_server.url, str(source), str(target)).startswith(first)
    assert sorted(json.loads(line)["index"] for line in target.read_text().splitlines()) == [0, 1, 2]


def test_best_of_n_example_finds_and_scores_the_majority(scripted_server: Server) -> None:
    shown = run("best_of_n.py", scripted_server.url, "What is 6 times 7?", "42").splitlines()
    assert re.fullmatch(r"\d+ of 64 samples say 42", shown[0])
    assert shown[1] == "pass@1: 1.000"


def test_tools_example_calls_the_tool_and_answers(scripted_server: Server) -> None:
    called, said = run("tools.py", scripted_server.url, "What is the weather in Paris?").splitlines()
    assert called.startswith("weather {")
    assert said == "It is sunny: 42."


def test_batch_example_sends_and_fetches_a_batch(scripted_server: Server, tmp_path: Path) -> None:
    lines = [completion_line(number) for number in range(3)]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(jsonl(lines))
    assert run("batch.py", scripted_server.url, str(source), str(target)).startswith("completed")
    assert custom_ids(read_jsonl(target.read_bytes())) == custom_ids(lines)


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_readme_snippets_run(
    scripted_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snippet: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requests.jsonl").write_bytes(jsonl(map(completion_line, range(3))))
    (tmp_path / "prompts.txt").write_text("the quick\nfox\n")
    code = snippet.replace("http://127.0.0.1:10210/v1", scripted_server.url).replace("tok-demo", NAME)
    exec(compile(code, str(README), "exec"), {"__name__": "snippet"})


def test_every_example_is_tested_and_named_in_the_readme() -> None:
    readme = README.read_text(encoding="utf-8")
    here = Path(__file__).read_text()
    for example in EXAMPLES.glob("*.py"):
        assert f'"{example.name}"' in here
        assert f"examples/{example.name}" in readme
