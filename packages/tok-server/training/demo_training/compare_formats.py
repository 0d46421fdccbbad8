"""Compare weight and cache formats of a model: pass@k of each, and its divergence from the model as it is stored.

Run `python -m demo_training.compare_formats`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tok_core import Engine, EngineConfig, SamplingParams
from tok_core.models.weights import quantize_checkpoint
from tok_server.demo import HELD_OUT_FILE, MODEL_DIR
from tok_server.passatk.answers import FinalAnswerPattern, read_tasks
from tok_server.passatk.command import make_prompter
from tok_server.passatk.estimator import Coverage, Float64
from tok_server.passatk.run import pass_at_k

INT4 = "int4-g64"
FORMATS: dict[str, dict[str, Any]] = {
    "as stored": {},
    "fp8": {"quantization": "fp8"},
    "int8": {"quantization": "int8"},
    INT4: {},
    "fp8 KV cache": {"kv_cache_dtype": "fp8"},
    "fp8 KV cache without scales": {"kv_cache_dtype": "fp8_unscaled"},
    "int8 KV cache": {"kv_cache_dtype": "int8"},
}
MAX_TOKENS = 200  # of an answer
SCORED = 8  # answers of each problem from which the divergence is estimated


@dataclass(frozen=True, slots=True)
class Comparison:
    """Results of one format.

    divergence  mean Kullback–Leibler divergence of the stored model's next token from this format's, in nats a token
    error       standard error of `divergence`, over problems
    """

    name: str
    coverage: list[Coverage]
    divergence: float
    error: float


def compare(
    model: Path, problems: int, samples: int, temperature: float, seed: int, **options: Any
) -> Iterator[Comparison]:
    """Yield the results of each of `FORMATS`; `options` are fields of EngineConfig.

    The divergence is estimated from answers that the stored model samples at temperature 1: with p and q the
    probabilities of a sampled token, q/p − 1 − log(q/p) has the divergence as its mean, and is never negative.
    """
    pattern = FinalAnswerPattern()
    tasks = read_tasks(HELD_OUT_FILE, pattern, problems)
    texts, starts, stored = list[list[int]](), list[int](), list[Float64]()
    with TemporaryDirectory() as directory:
        rounded = Path(directory) / INT4
        for _ in quantize_checkpoint(model, rounded, INT4):
            pass
        for name, changes in FORMATS.items():
            path = rounded if name == INT4 else model
            config = EngineConfig(model=str(path), generation_config="none", **options, **changes)
            with Engine(config, in_process=True) as engine:
                prompter = make_prompter(engine, None)
                report = pass_at_k(
                    engine, tasks, samples, temperature, MAX_TOKENS, seed, Path(directory) / "answers",
                    pattern=pattern, prompter=prompter, progress=False,
                )  # fmt: skip
                if not texts:
                    params = [SamplingParams(n=SCORED, max_tokens=MAX_TOKENS, seed=seed + n) for n in range(problems)]
                    outputs = engine.generate([prompter(task.question) for task in tasks], params)
                    starts = [len(output.prompt_token_ids) for output in outputs for _ in output.outputs]
                    texts = [output.prompt_token_ids + one.token_ids for output in outputs for one in output.outputs]
                found = logprobs(engine, texts, starts)
            stored = stored or found
            yield Comparison(name, report.coverage, *_divergence(stored, found))


def logprobs(engine: Engine, texts: list[list[int]], starts: list[int]) -> list[Float64]:
    """Return the log-probabilities of each text's tokens from its start on."""
    outputs = engine.generate(texts, SamplingParams(max_tokens=0, prompt_logprobs=0))
    found = [output.prompt_logprobs or [] for output in outputs]
    return [
        np.array([one.logprob for one in entries[start:] if one]) for entries, start in zip(found, starts, strict=True)
    ]


def _divergence(stored: list[Float64], found: list[Float64]) -> tuple[float, float]:
    """Return the mean divergence a token, and its standard error over problems, of SCORED texts each."""
    each = [np.expm1(q - p) - (q - p) for p, q in zip(stored, found, strict=True)]
    sums, tokens = (
        np.array(values).reshape(-1, SCORED).sum(1)
        for values in ([one.sum() for one in each], [len(one) for one in each])
    )
    mean = sums.sum() / tokens.sum()
    return float(mean), float((sums - mean * tokens).std() * len(sums) ** 0.5 / tokens.sum())


def main() -> None:
    """Print a table of the formats, in Markdown."""
    parser = argparse.ArgumentParser(description="Compare weight and cache formats of a model.")
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="directory (default: the embedded model)")
    parser.add_argument("--problems", type=int, default=200, help="held-out problems (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=100, help="of each problem (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="of the samples (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="as in tok serve (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="as in tok serve (default: %(default)s)")
    given = vars(parser.parse_args())
    for number, row in enumerate(compare(**given)):
        last = row.coverage[-1]
        if not number:
            print(f"| format | pass@1 | pass@{last.k} | KL, nats a token |\n|---|---|---|---|")
        cells = [f"{one.mean:.1%} ({one.low:.1%} to {one.high:.1%})" for one in (row.coverage[0], last)]
        print(f"| {row.name} | {' | '.join(cells)} | {row.divergence:.2g} ± {1.96 * row.error:.1g} |", flush=True)


if __name__ == "__main__":
    main()
