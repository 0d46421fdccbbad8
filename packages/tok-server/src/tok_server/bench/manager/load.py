"""Workloads of `tok bench manager`: endless requests sampled from each workload's distributions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from statistics import NormalDist

import msgspec
import numpy as np
from numpy.typing import NDArray

from tok_core import SamplingParams
from tok_core.messages import EngineInfo, Submit
from tok_server.bench.manager.simulation import LengthSampler, endless_lengths

VOCABULARY, END, PAGE = 32_768, 32_767, 16
PROMPT, SHARED_PROMPT = 512, 704
MAX_SAMPLE_TOKENS = 1024  # limit on the tokens of a sample
MEAN_TOKENS = 128.0
CHURN_PROMPT, MAX_CHURN_TOKENS = 32, 8
HALF_PROMPT_TOKENS, SHARED_PREFIXES = 500, 64

Rng = np.random.Generator
Prompt = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Load:
    """A workload for `sequences` sequences.

    requests        endless; the first requests fill all slots, the others follow as sequences end
    output_lengths  how many tokens a sample generates
    own_tokens      upper bound of the KV tokens of one sequence, without prefixes shared with others
    shared_tokens   KV tokens of all shared prefixes together
    prompt_tokens   tokens computed for a sequence before its first output token, on average
    fill_steps      steps planned for filling all slots
    warm_up         steps between filling and the first measurement
    replaced_share  share of the sequences that is cancelled and replaced before every step
    """

    sequences: int
    requests: Iterator[Submit]
    output_lengths: LengthSampler
    own_tokens: int
    prompt_tokens: float
    shared_tokens: int = 0
    fill_steps: int = 32
    warm_up: int = 32
    replaced_share: float = 0.0

    @property
    def info(self) -> EngineInfo:
        """Return the EngineInfo of a worker with enough pages for all sequences.

        Its steps are large enough to start all sequences in `fill_steps`.
        """
        pages = -(-self.own_tokens // PAGE) + 2
        return EngineInfo(
            vocab_size=VOCABULARY,
            eos_token_ids=(END,),
            max_model_len=2048,
            num_pages=int((self.sequences * pages + -(-self.shared_tokens // PAGE)) * 1.05) + 64,
            page_size=PAGE,
            max_running=self.sequences,
            max_step_tokens=self.sequences + 1024 + int(self.sequences * self.prompt_tokens / self.fill_steps),
            device="none",
            dtype="none",
            backend="simulated",
        )


def vocabulary() -> list[bytes]:
    """Return the bytes of made-up tokens, as many and as long as a tokenizer's; the end id has none."""
    rng = np.random.default_rng(1)
    single = [bytes([byte]) for byte in range(256)]
    sizes = rng.integers(2, 8, VOCABULARY - 1 - len(single)).tolist()
    letters = rng.integers(97, 123, sum(sizes), np.uint8).tobytes()
    ends = np.cumsum(sizes).tolist()
    words = [
        (b" " if position % 2 else b"") + letters[end - size : end]
        for position, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    return [*single, *words, b""]


def decode(sequences: int, stop: tuple[str, ...]) -> Load:
    """Return a load of 512 prompt tokens and 256 output tokens, measured between the last start and the first end."""
    requests = _endless(lambda rng: _ids(rng, PROMPT), SamplingParams(max_tokens=256, ignore_eos=True, stop=stop))
    return Load(sequences, requests, endless_lengths, PROMPT + 256, PROMPT, warm_up=16)


def monkeys(sequences: int, stop: tuple[str, ...]) -> Load:
    """Return a load of many samples per prompt with geometric lengths; 64 to 256 prompts are shared at any time."""
    prompts = shared_prompts(sequences)
    samples = _samples(sequences, prompts)
    return Load(
        sequences,
        _sampled(sequences, samples, stop),
        _geometric_lengths,
        int(2.5 * MEAN_TOKENS),
        SHARED_PROMPT / samples + 1,
        shared_tokens=2 * prompts * SHARED_PROMPT,
        fill_steps=8,
        warm_up=160,
    )


def sharegpt(sequences: int, stop: tuple[str, ...]) -> Load:
    """Return a load of one sample per prompt, with log-normal prompt and output lengths.

    Samples end at an end id, so that the manager does not know their length in advance.
    """

    def prompt(rng: Rng) -> Prompt:
        return _ids(rng, int(_log_normal_lengths(rng.random(1), median=130.0, minimum=4)[0]))

    requests = _endless(prompt, SamplingParams(max_tokens=MAX_SAMPLE_TOKENS, stop=stop))
    return Load(sequences, requests, _chat_lengths, 900, 210, fill_steps=64, warm_up=192)


def churn(sequences: int, stop: tuple[str, ...]) -> Load:
    """Return a load of one sample per prompt, of 1 to 8 tokens, whose length the manager does not know in advance."""
    requests = _endless(lambda rng: _ids(rng, CHURN_PROMPT), SamplingParams(max_tokens=MAX_SAMPLE_TOKENS, stop=stop))
    return Load(sequences, requests, _churn_lengths, 20 * CHURN_PROMPT, CHURN_PROMPT, fill_steps=4, warm_up=48)


def regroup(sequences: int, stop: tuple[str, ...]) -> Load:
    """Return a load of endless samples of 256 prompts; 1 % of the samples are replaced before every step."""
    rng = np.random.default_rng(2)
    prompts = [_ids(rng, SHARED_PROMPT) for _ in range(min(256, sequences))]
    requests = _endless(
        lambda rng: prompts[rng.integers(len(prompts))], SamplingParams(max_tokens=MAX_SAMPLE_TOKENS, stop=stop)
    )
    shared = SHARED_PROMPT * len(prompts)
    return Load(
        sequences, requests, endless_lengths, MAX_SAMPLE_TOKENS + 64, 32, shared_tokens=shared, replaced_share=0.01
    )


def admission(sequences: int, stop: tuple[str, ...]) -> Load:
    """Return a load of 1,000-token prompts, all submitted at once.

    The first half of each prompt is one of 64 shared prefixes.
    """
    rng = np.random.default_rng(3)
    heads = [_ids(rng, HALF_PROMPT_TOKENS) for _ in range(SHARED_PREFIXES)]

    def prompt(rng: Rng) -> Prompt:
        return np.concatenate((heads[rng.integers(SHARED_PREFIXES)], _ids(rng, HALF_PROMPT_TOKENS)))

    requests = _endless(prompt, SamplingParams(max_tokens=MAX_SAMPLE_TOKENS, stop=stop))
    return Load(
        sequences,
        requests,
        endless_lengths,
        2 * MAX_SAMPLE_TOKENS,
        2 * HALF_PROMPT_TOKENS,
        shared_tokens=HALF_PROMPT_TOKENS * SHARED_PREFIXES,
        fill_steps=1,
    )


LOADS: dict[str, Callable[[int, tuple[str, ...]], Load]] = {
    one.__name__: one for one in (decode, monkeys, sharegpt, churn, regroup, admission)
}


def shared_prompts(sequences: int) -> int:
    """Return how many prompts the sequences of `monkeys` share."""
    return min(max(sequences // 32, 64), 256)


def _samples(sequences: int, prompts: int) -> int:
    """Return the number of samples per request with which `prompts` requests run at once.

    If sample lengths are memoryless, the last of n samples ends after the mean times H(n) = 1 + 1/2 + … + 1/n. A
    request starts whenever n samples have ended. By Little's law, sequences · H(n) / n requests run at any time.
    """
    harmonic, n = 1.0, 1
    while sequences * harmonic / n > prompts:
        n += 1
        harmonic += 1 / n
    return n


def _sampled(sequences: int, samples: int, stop: tuple[str, ...]) -> Iterator[Submit]:
    """Yield endless requests; the first ones reproduce the steady state.

    A sample of a first request is included if it would still run at its request's age, so older requests have fewer
    samples.
    """
    rng = np.random.default_rng(0)
    remaining, rid = sequences, 0
    while True:
        alive = math.exp(-rid * samples / sequences) if remaining else 1.0
        n = int(rng.binomial(samples, alive))
        if remaining:
            n = min(n, remaining) if alive > 1e-3 else remaining
            remaining -= n
        if n:
            params = SamplingParams(n=n, max_tokens=MAX_SAMPLE_TOKENS, stop=stop, seed=rid)
            yield Submit(rid, _ids(rng, SHARED_PROMPT), params)
        rid += 1


def _endless(prompt: Callable[[Rng], Prompt], params: SamplingParams) -> Iterator[Submit]:
    rng = np.random.default_rng(0)
    return (Submit(rid, prompt(rng), msgspec.structs.replace(params, seed=rid)) for rid in count())


def _ids(rng: Rng, length: int) -> Prompt:
    return rng.integers(0, END, length, np.int32)


def _churn_lengths(u: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return lengths distributed uniformly from 1 to MAX_CHURN_TOKENS."""
    return 1 + (u * MAX_CHURN_TOKENS).astype(np.int64)


def _geometric_lengths(u: NDArray[np.float64]) -> NDArray[np.int64]:
    output_lengths: NDArray[np.int64] = 1 + np.floor(np.log1p(-u) / math.log1p(-1 / MEAN_TOKENS)).astype(np.int64)
    return output_lengths


def _chat_lengths(u: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return lengths like those of chat answers."""
    return _log_normal_lengths(u, median=120.0, minimum=1)


def _log_normal_lengths(u: NDArray[np.float64], median: float, minimum: int) -> NDArray[np.int64]:
    """Return integers from `minimum` to MAX_SAMPLE_TOKENS, log-normal with σ = 1, at the quantiles `u`, [n]."""
    return np.clip(median * np.exp(np.interp(u, _SHARES, _SCORES)), minimum, MAX_SAMPLE_TOKENS).astype(np.int64)


_SHARES = ((np.arange(1024) + 0.5) / 1024).tolist()
_SCORES = [NormalDist().inv_cdf(share) for share in _SHARES]
