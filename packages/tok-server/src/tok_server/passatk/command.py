"""`tok pass-at-k`: its flags, and its output."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tok_core import EngineConfig, InvalidField, ModelError
from tok_server.demo import HELD_OUT_FILE
from tok_server.flags import add_engine_flags, model_and_name
from tok_server.passatk.answers import DEFAULT_PATTERN, EvalTask, FinalAnswerPattern, read_tasks

if TYPE_CHECKING:
    from tok_core import Engine
    from tok_server.passatk.run import Prompter, Report

ENGINE_FLAGS = ("device", "dtype", "quantization", "kv_cache_dtype")
PLAIN_TEMPLATE = "Question: {question}\nAnswer:"
"""Prompt for models without a chat template."""


EXAMPLES = """examples:
  tok pass-at-k --samples 20 --limit 10
  tok pass-at-k problems.jsonl --model ./my-model --samples 1000 --out results
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tok pass-at-k`."""
    parser.description = "Sample many answers per problem and estimate pass@k (solved by at least one of k samples)."
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add(
        "problems",
        nargs="?",
        type=Path,
        metavar="PROBLEMS.jsonl",
        help='file with one {"question", "answer"} per line, as in GSM8K (default: the demo model\'s held-out set)',
    )
    add("--samples", type=int, default=100, metavar="N", help="samples per problem (default: %(default)s)")
    add("--model", metavar="MODEL", help="a directory or a Hugging Face hub id (default: the demo model)")
    add("--temperature", type=float, default=0.8, metavar="T", help="sampling temperature (default: %(default)s)")
    add("--max-tokens", type=int, default=512, metavar="N", help="maximum tokens per answer (default: %(default)s)")
    add("--limit", type=int, metavar="N", help="use only the first N problems")
    add("--seed", type=int, default=0, metavar="N", help="seed of the samples (default: %(default)s)")
    add(
        "--answer-pattern",
        default=DEFAULT_PATTERN,
        metavar="REGEX",
        help="regular expression that finds the answer; the last match counts (default: %(default)s)",
    )
    add(
        "--prompt-template",
        metavar="TEXT",
        help="prompt that contains {question} (default: the chat template, or 'Question: ... Answer:')",
    )
    add(
        "--out",
        type=Path,
        default=Path("pass-at-k"),
        metavar="DIR",
        help="directory for answers.jsonl and coverage.png, which are overwritten (default: %(default)s)",
    )
    add_engine_flags(parser, ENGINE_FLAGS)


def main(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code. Errors: those of the engine."""
    _check(args)
    try:
        pattern = FinalAnswerPattern(args.answer_pattern)
        tasks = read_tasks(args.problems or HELD_OUT_FILE, pattern, args.limit)
    except OSError as error:
        print(f"tok pass-at-k: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"tok pass-at-k: error: {error}", file=sys.stderr)
        return 2
    try:
        return _run(args, tasks, pattern)
    except InvalidField as error:
        raise error.renamed("samples") if error.field == "n" else error from None


def _check(args: argparse.Namespace) -> None:
    if args.samples < 1:
        raise InvalidField("samples", args.samples, "integers from 1")
    if args.limit is not None and args.limit < 1:
        raise InvalidField("limit", args.limit, "integers from 1")
    if args.seed < 0:
        raise InvalidField("seed", args.seed, "integers from 0")
    if args.prompt_template is not None and "{question}" not in args.prompt_template:
        raise InvalidField("prompt_template", args.prompt_template, "texts that contain {question}")


def _run(args: argparse.Namespace, tasks: list[EvalTask], pattern: FinalAnswerPattern) -> int:
    # Imported here, so that --help loads neither the engine nor matplotlib.
    from tok_core import Engine
    from tok_server.passatk.run import ANSWERS, PLOT, pass_at_k

    model, name = model_and_name(args.model)
    source = args.problems.name if args.problems else "the held-out set"
    title = f"{name}: {len(tasks)} problems of {source}, {args.samples} samples each, temperature {args.temperature:g}"
    options = {name: getattr(args, name) for name in ENGINE_FLAGS}
    with Engine(EngineConfig(model=model, generation_config="none", **options)) as engine:
        report = pass_at_k(
            engine, tasks, args.samples, args.temperature, args.max_tokens, args.seed, args.out,
            pattern=pattern, prompter=make_prompter(engine, args.prompt_template), title=title,
        )  # fmt: skip
    print(title)
    print_report(report)
    print(f"answers: {args.out / ANSWERS}\nplot:    {args.out / PLOT}")
    return 0


def make_prompter(engine: Engine, template: str | None) -> Prompter:
    """Return a function from question to prompt: by `template`, else the model's chat template, else the plain form.

    Raises ModelError for a model without a tokenizer.
    """
    tokenizer, chat = engine.tokenizer, engine.chat_template
    if tokenizer is None:
        raise ModelError("the model has no usable tokenizer, which problems need")
    if template is not None or chat is None:
        text = template or PLAIN_TEMPLATE
        return lambda question: text.replace("{question}", question)
    return lambda question: tokenizer.encode(
        chat.render([{"role": "user", "content": question}]), add_special_tokens=False
    )


def print_report(report: Report) -> None:
    """Print throughput and the coverage table."""
    answers = report.samples * len(report.right)
    seconds = max(report.seconds, 1e-9)
    print(
        f"{answers:,} answers, {report.tokens:,} tokens in {seconds:.1f} s: "
        f"{report.tokens / seconds:,.0f} tokens/s, {answers / seconds:,.1f} answers/s"
    )
    print("    k   pass@k   95% confidence")
    for row in report.coverage:
        print(f"{row.k:5}   {row.mean:6.1%}   {row.low:.1%} to {row.high:.1%}")
