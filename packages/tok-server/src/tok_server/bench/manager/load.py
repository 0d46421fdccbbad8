"""What the manager is given to do: requests without end, drawn from a workload's distributions."""

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
from tok_core.simulation import Lives

VOCABULARY, END, PAGE = 32_768, 32_767, 16
PROMPT, SHARED_PROMPT = 512, 704
MAX_SAMPLE_TOKENS = 1024  # tokens of a sample, at most
MEAN = 128.0
CHURN_PROMPT, CHURN_LONGEST = 32, 8
HALF, FAMILIES = 500, 64

Rng = np.random.Generator
Prompt = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Load:
    """A workload for B sequences.

    requests       without end: the first of them fill all slots, the others follow as sequences end
    lives          how long samples run
    own_tokens     that each sequence may come to hold, prefixes shared with others aside
    shared_tokens  that all sequences share
    prompt_tokens  computed for a sequence on average before its first token
    fill_steps     in which all slots are filled
    warm_up        steps after these before anything is measured
    replaced       share of the sequences that is cancelled and replaced before every step
    """

    sequences: int
    requests: Iterator[Submit]
    lives: Lives
    own_tokens: int
    prompt_tokens: float
    shared_tokens: int = 0
    fill_steps: int = 32
    warm_up: int = 32
    replaced: float = 0.0

    @property
    def info(self) -> EngineInfo:
        """A worker with as much memory as the sequences may need, and room for them to start in `fill_steps`."""
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
    """Pieces of made-up words, as many and as long as those of a tokenizer; the end id's is empty."""
    rng = np.random.default_rng(1)
    single = [bytes([byte]) for byte in range(256)]
    sizes = rng.integers(2, 8, VOCABULARY - 1 - len(single)).tolist()
    letters = rng.integers(97, 123, sum(sizes), np.uint8).tobytes()
    ends = np.cumsum(sizes).tolist()
    words = [
        (b" " if place % 2 else b"") + letters[end - size : end]
        for place, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    return [*single, *words, b""]


def decode(sequences: int, stop: tuple[str, ...]) -> Load:
    """512 tokens of prompt and 256 more; what is measured lies between the last start and the first end."""
    requests = _endless(lambda rng: _ids(rng, PROMPT), SamplingParams(max_tokens=256, ignore_eos=True, stop=stop))
    return Load(sequences, requests, _for_ever, PROMPT + 256, PROMPT, warm_up=16)


def monkeys(sequences: int, stop: tuple[str, ...]) -> Load:
    """Many samples of each prompt, of geometric lengths: 64 to 256 prompts are shared at any time."""
    prompts = live_prompts(sequences)
    samples = _samples(sequences, prompts)
    return Load(
        sequences,
        _sampled(sequences, samples, stop),
        _geometric,
        int(2.5 * MEAN),
        SHARED_PROMPT / samples + 1,
        shared_tokens=2 * prompts * SHARED_PROMPT,
        fill_steps=8,
        warm_up=160,
    )


def sharegpt(sequences: int, stop: tuple[str, ...]) -> Load:
    """One sample a prompt, of log-normal lengths both; ends are not known before."""

    def prompt(rng: Rng) -> Prompt:
        return _ids(rng, int(_exp_of_normal(rng.random(1), median=130.0, least=4)[0]))

    requests = _endless(prompt, SamplingParams(max_tokens=MAX_SAMPLE_TOKENS, stop=stop))
    return Load(sequences, requests, _log_normal, 900, 210, fill_steps=64, warm_up=192)


def churn(sequences: int, stop: tuple[str, ...]) -> Load:
    """One sample a prompt of 1 to 8 tokens, their number not known before."""
    requests = _endless(lambda rng: _ids(rng, CHURN_PROMPT), SamplingParams(max_tokens=MAX_SAMPLE_TOKENS, stop=stop))
    return Load(sequences, requests, _short, 20 * CHURN_PROMPT, CHURN_PROMPT, fill_steps=4, warm_up=48)


def regroup(sequences: int, stop: tuple[str, ...]) -> Load:
    """Samples of 256 prompts that never end; 1 % of them are replaced before every step."""
    rng = np.random.default_rng(2)
    prompts = [_ids(rng, SHARED_PROMPT) for _ in range(min(256, sequences))]
    requests = _endless(
        lambda rng: prompts[rng.integers(len(prompts))], SamplingParams(max_tokens=MAX_SAMPLE_TOKENS, stop=stop)
    )
    shared = SHARED_PROMPT * len(prompts)
    return Load(sequences, requests, _for_ever, MAX_SAMPLE_TOKENS + 64, 32, shared_tokens=shared, replaced=0.01)


def admission(sequences: int, stop: tuple[str, ...]) -> Load:
    """Prompts of 1,000 tokens; the first half of each is one of 64 that they share. All are to start at once."""
    rng = np.random.default_rng(3)
    heads = [_ids(rng, HALF) for _ in range(FAMILIES)]

    def prompt(rng: Rng) -> Prompt:
        return np.concatenate((heads[rng.integers(FAMILIES)], _ids(rng, HALF)))

    requests = _endless(prompt, SamplingParams(max_tokens=MAX_SAMPLE_TOKENS, stop=stop))
    return Load(
        sequences, requests, _for_ever, 2 * MAX_SAMPLE_TOKENS, 2 * HALF, shared_tokens=HALF * FAMILIES, fill_steps=1
    )


LOADS: dict[str, Callable[[int, tuple[str, ...]], Load]] = {
    one.__name__: one for one in (decode, monkeys, sharegpt, churn, regroup, admission)
}


def live_prompts(sequences: int) -> int:
    """How many prompts the sequences of `monkeys` share."""
    return min(max(sequences // 32, 64), 256)


def _samples(sequences: int, prompts: int) -> int:
    """Samples a request so that `prompts` requests run at once.

    Of n samples with memoryless ends the last one ends after the mean times H(n) = 1 + 1/2 + … + 1/n, and a request
    starts whenever n samples have ended: sequences · H(n) / n run at any time (Little's law).
    """
    harmonic, n = 1.0, 1
    while sequences * harmonic / n > prompts:
        n += 1
        harmonic += 1 / n
    return n


def _sampled(sequences: int, samples: int, stop: tuple[str, ...]) -> Iterator[Submit]:
    """First the requests as they would be found running: of each, as many samples as have not ended by its age."""
    rng = np.random.default_rng(0)
    left, rid = sequences, 0
    while True:
        alive = math.exp(-rid * samples / sequences) if left else 1.0
        n = int(rng.binomial(samples, alive))
        if left:
            n = min(n, left) if alive > 1e-3 else left
            left -= n
        if n:
            params = SamplingParams(n=n, max_tokens=MAX_SAMPLE_TOKENS, stop=stop, seed=rid)
            yield Submit(rid, _ids(rng, SHARED_PROMPT), params)
        rid += 1


def _endless(prompt: Callable[[Rng], Prompt], params: SamplingParams) -> Iterator[Submit]:
    rng = np.random.default_rng(0)
    return (Submit(rid, prompt(rng), msgspec.structs.replace(params, seed=rid)) for rid in count())


def _ids(rng: Rng, length: int) -> Prompt:
    return rng.integers(0, END, length, np.int32)


def _for_ever(u: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.full(len(u), 1 << 40)


def _short(u: NDArray[np.float64]) -> NDArray[np.int64]:
    """Any number from 1 to CHURN_LONGEST is as likely."""
    return 1 + (u * CHURN_LONGEST).astype(np.int64)


def _geometric(u: NDArray[np.float64]) -> NDArray[np.int64]:
    lives: NDArray[np.int64] = 1 + np.floor(np.log1p(-u) / math.log1p(-1 / MEAN)).astype(np.int64)
    return lives


def _log_normal(u: NDArray[np.float64]) -> NDArray[np.int64]:
    """As long as a chat's answers."""
    return _exp_of_normal(u, median=120.0, least=1)


def _exp_of_normal(u: NDArray[np.float64], median: float, least: int) -> NDArray[np.int64]:
    """Whole numbers from `least` to LONGEST whose logarithms are normal with σ = 1, by their quantiles `u`, [n]."""
    return np.clip(median * np.exp(np.interp(u, _SHARES, _SCORES)), least, MAX_SAMPLE_TOKENS).astype(np.int64)


_SHARES = ((np.arange(1024) + 0.5) / 1024).tolist()
_SCORES = [NormalDist().inv_cdf(share) for share in _SHARES]
