"""Sample every problem with the engine, check and write every answer, and compute coverage at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from tok_core import Completion, Engine, SamplingParams
from tok_server.passatk.answers import EvalTask, FinalAnswerPattern
from tok_server.passatk.estimator import Coverage, coverage
from tok_server.passatk.plot import plot_coverage

TABLE_KS = (1, 2, 5, 10, 20, 50, 100)
ANSWERS, PLOT = "answers.jsonl", "coverage.png"

Prompter = Callable[[str], str | list[int]]
"""Function from a question to its prompt: text, or token ids if special tokens are placed already."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a run: right answers per problem (in order), tokens generated, seconds, coverage over k."""

    samples: int
    right: list[int]
    tokens: int
    seconds: float
    coverage: list[Coverage]


def pass_at_k(
    engine: Engine,
    problems: Sequence[EvalTask],
    samples: int,
    temperature: float,
    max_tokens: int,
    seed: int,
    out_dir: Path,
    *,
    pattern: FinalAnswerPattern,
    prompter: Prompter,
    title: str = "Coverage",
    progress: bool = True,
) -> Report:
    """Sample every problem; write `answers.jsonl` as answers arrive and `coverage.png` at the end, both into `out_dir`.

    The random numbers of sample i of problem j depend only on `seed` + j and i. Errors: InvalidField before anything
    runs if a prompt cannot be served; EngineError.
    """
    prompts = [prompter(problem.question) for problem in problems]
    params = [
        SamplingParams(n=samples, temperature=temperature, max_tokens=max_tokens, seed=seed + index)
        for index in range(len(problems))
    ]
    right, tokens, began = [0] * len(problems), 0, time.monotonic()
    out_dir.mkdir(parents=True, exist_ok=True)
    with (out_dir / ANSWERS).open("w", encoding="utf-8") as lines:
        for index, output in engine.stream(prompts, params, progress=progress):
            right[index] = _record(lines, index, problems[index], output.outputs, pattern)
            tokens += sum(len(one.token_ids) for one in output.outputs)
    seconds = time.monotonic() - began
    table = table_ks(samples)
    rows = [coverage([samples] * len(right), right, k) for k in _plotted_ks(samples)]
    plot_coverage(rows, title, out_dir / PLOT, table)
    return Report(samples, right, tokens, seconds, [row for row in rows if row.k in table])


def table_ks(samples: int) -> list[int]:
    """Return the k of the coverage table: the steps of the ladder, and the number of samples."""
    return sorted({*(k for k in TABLE_KS if k <= samples), samples})


def _plotted_ks(samples: int) -> list[int]:
    """Return about twelve k per decade and those of the table, for a smooth curve on a logarithmic axis."""
    curve_ks = {round(10 ** (step / 12)) for step in range(12 * len(str(samples)))}
    return sorted({*(k for k in curve_ks if k <= samples), *table_ks(samples)})


def _record(
    lines: TextIO, index: int, problem: EvalTask, completions: Sequence[Completion], pattern: FinalAnswerPattern
) -> int:
    """Write the samples of one problem, one per line. Returns how many are right."""
    count = 0
    for one in completions:
        found = pattern.find(one.text)
        count += found == problem.answer
        entry = {
            "problem": index,
            "sample": one.index,
            "question": problem.question,
            "answer": problem.answer,
            "text": one.text,
            "found": found,
            "right": found == problem.answer,
            "tokens": len(one.token_ids),
            "finish_reason": one.finish_reason,
        }
        lines.write(json.dumps(entry, ensure_ascii=False) + "\n")
    lines.flush()
    return count
