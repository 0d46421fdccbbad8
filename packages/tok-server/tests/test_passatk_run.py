"""pass@k over real problems with the real engine: answers file, plot, table and flags."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from demo_training.dialogue import Message, render

from support.engines import cpu_engine
from support.tiny_models import make_model
from tok_core import Engine, InvalidField, ModelError
from tok_server.demo import HELD_OUT_FILE, MODEL_DIR
from tok_server.passatk.answers import FinalAnswerPattern, read_tasks
from tok_server.passatk.command import add_arguments, main, make_prompter, print_report
from tok_server.passatk.estimator import Coverage, coverage
from tok_server.passatk.plot import plot_coverage
from tok_server.passatk.run import Report, pass_at_k, table_ks

pytestmark = pytest.mark.usefixtures("forked_children")

SAMPLES, PROBLEMS, TEMPERATURE = 5, 4, 1.8  # so high that some answers are wrong, and samples differ between seeds


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with cpu_engine(MODEL_DIR) as engine:
        yield engine


def run(engine: Engine, out: Path, seed: int = 0) -> Report:
    pattern = FinalAnswerPattern()
    tasks = read_tasks(HELD_OUT_FILE, pattern, PROBLEMS)
    prompter = make_prompter(engine, None)
    return pass_at_k(
        engine, tasks, SAMPLES, TEMPERATURE, 200, seed, out, pattern=pattern, prompter=prompter, progress=False
    )


@pytest.fixture(scope="module")
def first_run(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    out = tmp_path_factory.mktemp("first") / "made" / "by-the-run"
    return run(engine, out), out


def entries(out: Path) -> list[dict[str, Any]]:
    lines = (out / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted((json.loads(line) for line in lines), key=lambda one: (one["problem"], one["sample"]))


def test_every_sample_of_every_problem_is_written_once(first_run: tuple[Report, Path]) -> None:
    found = [(one["problem"], one["sample"]) for one in entries(first_run[1])]
    assert found == [(problem, sample) for problem in range(PROBLEMS) for sample in range(SAMPLES)]


def test_pass_at_k_report_agrees_with_the_answers_file(first_run: tuple[Report, Path]) -> None:
    report, out = first_run
    written = entries(out)
    assert report.tokens == sum(one["tokens"] for one in written)
    for problem in range(PROBLEMS):
        mine = [one for one in written if one["problem"] == problem]
        assert report.right[problem] == sum(one["right"] for one in mine)
        assert all(one["right"] == one["text"].endswith(f"#### {one['answer']}") for one in mine)
    assert report.coverage == [coverage([SAMPLES] * PROBLEMS, report.right, k) for k in (1, 2, 5)]
    assert 0 < sum(report.right) < SAMPLES * PROBLEMS


def test_pass_at_k_answers_are_deterministic_per_seed(
    engine: Engine, first_run: tuple[Report, Path], tmp_path: Path
) -> None:
    run(engine, tmp_path / "same")
    run(engine, tmp_path / "other", seed=1000)
    assert entries(tmp_path / "same") == entries(first_run[1])
    assert entries(tmp_path / "other") != entries(first_run[1])


def test_prompter_uses_the_chat_template_or_the_prompt_template(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    assert make_prompter(engine, None)("Why {x}?") == tokenizer.encode(
        render([Message("user", "Why {x}?")]), add_special_tokens=False
    )
    assert make_prompter(engine, "Q {question} {A}")("Why?") == "Q Why? {A}"


def test_coverage_plot_is_a_png_of_the_documented_size(first_run: tuple[Report, Path], tmp_path: Path) -> None:
    assert (first_run[1] / "coverage.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    rows = [Coverage(k, 1 - 0.5 / k, 1 - 0.6 / k, 1 - 0.4 / k) for k in (1, 2, 10)]
    for some in (rows, rows[:1]):
        plot_coverage(some, "title", tmp_path / "plot.png", [1, 10])
        header = (tmp_path / "plot.png").read_bytes()[:24]
        assert header.startswith(b"\x89PNG\r\n\x1a\n")
        assert (int.from_bytes(header[16:20]), int.from_bytes(header[20:24])) == (1050, 675)


def test_coverage_plot_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rows is empty"):
        plot_coverage([], "title", tmp_path / "plot.png")


def test_pass_at_k_table_shows_rates_and_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(Report(10, [5, 10], 4000, 2.0, [Coverage(1, 0.75, 0.5, 1.0)]))
    assert capsys.readouterr().out.splitlines() == [
        "20 answers, 4,000 tokens in 2.0 s: 2,000 tokens/s, 10.0 answers/s",
        "    k   pass@k   95% confidence",
        "    1    75.0%   50.0% to 100.0%",
    ]


def test_ks_up_to_ends_at_the_number_of_samples() -> None:
    assert table_ks(1) == [1]
    assert table_ks(7) == [1, 2, 5, 7]
    assert table_ks(100) == [1, 2, 5, 10, 20, 50, 100]
    assert table_ks(1000)[-2:] == [100, 1000]


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(given)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (("--samples", "0"), "samples"),
        (("--limit", "0"), "limit"),
        (("--seed", "-1"), "seed"),
        (("--prompt-template", "no place"), "prompt_template"),
    ],
)
def test_pass_at_k_refuses_invalid_flag_values(given: tuple[str, ...], field: str) -> None:
    with pytest.raises(InvalidField) as raised:
        main(options(*given))
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("missing.jsonl",), "missing.jsonl: No such file or directory"),
        (("--answer-pattern", "("), "--answer-pattern is '('; allowed: regular expressions"),
    ],
)
def test_pass_at_k_exits_with_code_2_for_a_bad_file_or_pattern(
    given: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options(*given)) == 2
    assert capsys.readouterr().err.startswith(f"tok pass-at-k: error: {message}")


def test_pass_at_k_names_its_own_flag_for_too_many_samples(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="samples is 99999; allowed: integers from 1 to 16384"):
        main(options("--samples", "99999", "--limit", "1", "--device", "cpu", "--out", str(tmp_path)))


def test_pass_at_k_names_the_tokenizer_that_a_model_lacks(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path / "model")
    (path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="the model has no usable tokenizer, which problems need"):
        main(options("--model", str(path), "--limit", "1", "--device", "cpu", "--out", str(tmp_path)))


def test_pass_at_k_command_samples_a_users_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"question": "Tom has 20 books and gets 4 more. How many?", "answer": "24"}\n')
    given = ("--samples", "2", "--max-tokens", "8", "--device", "cpu", "--out", str(tmp_path / "out"))
    assert main(options(str(file), *given)) == 0
    out = capsys.readouterr().out
    assert "1 problems of mine.jsonl, 2 samples each" in out
    assert "2 answers, " in out
    assert len(entries(tmp_path / "out")) == 2
    with pytest.raises(InvalidField, match="quantization is 'awq'; allowed: auto, fp8, int8"):
        main(options(str(file), *given, "--quantization", "awq"))
