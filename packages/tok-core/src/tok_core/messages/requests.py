"""Messages between engine and manager: requests, and reports on them. Legend: N tokens reported."""

from __future__ import annotations

import msgspec
import numpy as np

from tok_core.messages.commands import EngineCommand
from tok_core.outputs import FinishReason, Pooling
from tok_core.sampling_params import SamplingParams


class Submit(msgspec.Struct, tag=True):
    """A new request, or the samples of it that one replica computes.

    rid           the engine's number of the request, or of this part of it
    params        sampling parameters; `seed` is set
    first_sample  index of the first of the `params.n` samples; another replica may compute other samples
    pooling       how to pool the prompt's embedding, for embedding requests; `params.max_tokens` is 0 then
    tenant        opaque name of the caller; "" if unknown
    salt          16 bytes, or b""; requests with different salts share no pages of the prefix cache
    banned        token sequences of `params.bad_words`, none of which may be generated
    """

    rid: int
    prompt: np.ndarray
    params: SamplingParams
    first_sample: int = 0
    pooling: Pooling | None = None
    tenant: str = ""
    salt: bytes = b""
    banned: tuple[tuple[int, ...], ...] = ()


class Cancel(msgspec.Struct, tag=True):
    """Cancels the request `rid`; ignored if the request has ended."""

    rid: int


ToManager = Submit | Cancel | EngineCommand


class Finished(msgspec.Struct, array_like=True, gc=False):  # never part of a reference cycle
    """A sample has ended after the tokens reported so far.

    tokens  number of its tokens
    stop    the stop id or stop string that ended it; None for a model's own end id, and for other reasons
    cut     for a stop string: bytes of the sample's tokens, special ones included, up to the end of the text
    """

    rid: int
    sample: int
    reason: FinishReason
    tokens: int
    stop: int | str | None = None
    cut: int | None = None


class Scores(msgspec.Struct):
    """Log-probabilities of the tokens of a prompt from position `first` on; columns as in PromptValues."""

    rid: int
    first: int
    logprob: np.ndarray
    rank: np.ndarray
    top_token: np.ndarray
    top_logprob: np.ndarray


class Embedded(msgspec.Struct):
    """The pooled embedding of a prompt, float32 `[hidden size]`; not normalised."""

    rid: int
    vector: np.ndarray


class Stats(msgspec.Struct):
    """Counters since the start, and gauges, of one manager. An idle manager reports current values.

    skipped_tokens                  output tokens that a grammar determined, so that no step sampled them
    discarded_tokens                tokens computed for sequences that had ended
    draft_steps                     steps that verified drafted tokens
    drafted_tokens                  drafted tokens
    accepted_tokens                 drafted tokens that were accepted; each saves its sample one step
    model_drafted_tokens            drafted tokens that a draft model drafted
    model_accepted_tokens           those of them that were accepted
    schedule_seconds                CPU time of the manager to build steps
    output_seconds                  CPU time of the manager to process returned tokens
    launch_seconds, device_seconds  sums of StepOutput's
    missing_graphs                  CUDA graphs that were not captured yet at the last step
    expert_mean_tokens              mean tokens per expert, summed over all layers of the steps that counted them
    expert_max_tokens               tokens of the busiest expert of a layer, all its copies together, summed likewise
    expert_rank_max_tokens          mean tokens per expert of the busiest rank of a layer, summed likewise
    """

    requests_running: int = 0
    requests_waiting: int = 0
    sequences_running: int = 0
    requests_finished: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    skipped_tokens: int = 0
    discarded_tokens: int = 0
    draft_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    model_drafted_tokens: int = 0
    model_accepted_tokens: int = 0
    preemptions: int = 0
    pages_total: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    steps: int = 0
    steps_in_flight: int = 0
    group_rows: int = 0
    missing_graphs: int = 0
    schedule_seconds: float = 0.0
    launch_seconds: float = 0.0
    device_seconds: float = 0.0
    output_seconds: float = 0.0
    expert_mean_tokens: float = 0.0
    expert_max_tokens: float = 0.0
    expert_rank_max_tokens: float = 0.0


class Progress(msgspec.Struct, tag=True):
    """A manager's report of everything since its last report: N tokens in columns, and rarer events as lists.

    Columns: `rid` int64, `sample` and `token` int32, `logprob` float32, `top_token` and `top_logprob` `[N, K]`.

    scores    prompt log-probabilities, no later than the first token of their request
    embedded  embeddings, no later than the end of their request
    rounds    number of rows of each round, N in all. A pair of `rid` and `sample` occurs at most once in a round, and a
              sample's tokens of successive rounds follow one another
    started   `[(rid, cached prompt tokens, seconds since then), …]` for requests whose first sample got a slot
    failed    `[(rid, reason), …]`; nothing more follows for these requests
    refused   `[(rid, allowed values), …]`, the same for requests whose grammar exceeds a limit
    """

    rid: np.ndarray
    sample: np.ndarray
    token: np.ndarray
    logprob: np.ndarray
    top_token: np.ndarray
    top_logprob: np.ndarray
    finished: list[Finished]
    scores: list[Scores]
    embedded: list[Embedded]
    rounds: list[int]
    started: list[tuple[int, int, float]]
    stats: Stats
    failed: list[tuple[int, str]] = []
    refused: list[tuple[int, str]] = []

    @property
    def has_only_stats(self) -> bool:
        """Return whether the report contains nothing but `stats`."""
        ends = self.finished or self.failed or self.refused
        return not (len(self.rid) or ends or self.scores or self.embedded or self.started)

    def prompt_outputs(self) -> list[Scores | Embedded]:
        """Return the prompt log-probabilities and embeddings."""
        return [*self.scores, *self.embedded]
