"""All that crosses a process boundary, and how it is written: msgpack with arrays as raw bytes.

    engine ─Submit, Cancel─► manager ─StepInput─► worker ─StepOutput─► manager ─Progress─► engine

Arrays of a StepInput are int32 unless said otherwise. Legend: B sequences of the step (decode rows first, then prefill
chunks), R rows that sample, G prefix groups of a level, N tokens reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tok_core.config import EngineConfig
from tok_core.mesh import RankCoordinates, Rendezvous
from tok_core.outputs import FinishReason, Pooling
from tok_core.sampling_params import SamplingParams

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]


class Submit(msgspec.Struct, tag=True):
    """A new request. `rid` is the engine's number for it; `params.seed` is set.

    first_sample: of `params.n`; others of the same request may be with another replica. `pooling`: an embedding of the
    prompt is wanted, made so; `params.max_tokens` is 0 then. `tenant`: an opaque name of the caller; "" if unknown.
    `salt`: 16 bytes, or none; requests with different ones share nothing in the prefix cache.
    """

    rid: int
    prompt: np.ndarray
    params: SamplingParams
    first_sample: int = 0
    pooling: Pooling | None = None
    tenant: str = ""
    salt: bytes = b""


class Cancel(msgspec.Struct, tag=True):
    """The request `rid` is not wanted any more; one already ended is ignored."""

    rid: int


class NewSlots(msgspec.Struct):
    """Slots given to new sequences: one entry of every array a slot.

    `length`: positions already in the cache. `last_token`: what a decode row feeds before the slot has drawn any (a
    sample that forks from a prompt computed earlier feeds the prompt's last token). `ends_from`: drawn positions from
    which a model's end id ends the sample. `seed` int64; the floats are float32. `bias_*` are ragged, a slot's
    entries together: the logit of `bias_token[i]` gains `bias_value[i]` at drawn positions below `bias_until[i]`.
    """

    slot: np.ndarray
    length: np.ndarray
    last_token: np.ndarray
    ends_from: np.ndarray
    prompt_len: np.ndarray
    seed: np.ndarray
    sample: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    presence: np.ndarray
    frequency: np.ndarray
    repetition: np.ndarray
    bias_slot: np.ndarray
    bias_token: np.ndarray
    bias_value: np.ndarray
    bias_until: np.ndarray


MAX_CASCADE_LEVELS = 3
"""Of groups in a step: for a system prompt, examples, and a question that is sampled many times."""


class GroupLevel(msgspec.Struct):
    """Prefix groups of decode rows, no row being in two: int32 `[G]`.

    Group `g` is `count[g]` rows from `start[g]` on, sharing the positions `[kv_start[g], kv_end[g])`, whole pages, as
    found through the page table of `slot[g]`.
    """

    start: np.ndarray
    count: np.ndarray
    slot: np.ndarray
    kv_start: np.ndarray
    kv_end: np.ndarray


class SharedPages(msgspec.Struct):
    """The page table of each of `slot`, int32 `[n]`, begins with the pages `page`, int32 `[k]`."""

    slot: np.ndarray
    page: np.ndarray


class RequestedPromptOutputs(msgspec.Struct):
    """What is asked of the prompts that a step computes. Legend: C chunks scored, Q their rows scored, E chunks pooled.

    The first `scored_count[c]` rows of chunk `scored[c]` are scored: row by row, the log-probability of
    `scored_token[q]` after it, and the `top_logprobs` most likely tokens there. The last `pooled_count[e]` hidden
    states of chunk `pooled[e]`, normed, are added up.
    """

    scored: np.ndarray
    scored_count: np.ndarray
    scored_token: np.ndarray
    top_logprobs: int
    pooled: np.ndarray
    pooled_count: np.ndarray


class PromptValues(msgspec.Struct):
    """Values of a step's `RequestedPromptOutputs`.

    Log-probabilities float32 `[Q]`; top tokens int32, theirs float32 `[Q, top_logprobs]`; hidden sums float32 `[E, N]`.
    """

    logprob: np.ndarray
    top_token: np.ndarray
    top_logprob: np.ndarray
    pooled: np.ndarray


class StepInput(msgspec.Struct):
    """One forward: what changed since the last, then which tokens are computed. Carried out in this order:

    1. The draws of the steps up to `draws_upto` become the last tokens of their slots, where they are not yet; those of
       a slot that has since been given to another sequence are dropped.
    2. `new` slots are set; page table entries are written: those of `shared`, in order, then
       `(page_slot, page_index) = page_id`.
    3. Pages `copy_src` are copied to `copy_dst`, as the steps before left them; no page is copied to twice.
    4. Decode rows feed their slot's last token at its length; prefill chunks feed `prefill_token` (concatenated) from
       `prefill_start` on. The first of `levels` has the groups that begin at position 0; a group of each further one
       lies within a group of the level before, and goes on where that ends.
    5. For each of the R rows the logits after sequence `sample_row` of the step draw the next token of slot
       `sample_slot` (several slots may draw from one row: that is a fork).

    `filter_row`, `penalty_row`, `bias_row`, `mask_row`, `top_row`: which of the R rows ask for these, the last for up
    to `top_logprobs`. `mask_of`: which of `mask`, `[m, ⌈V/32⌉]`, has the tokens that each of `mask_row` may draw, token
    t where bit t mod 32 of word t div 32 is set.
    `max_kv`: longest sequence after it.
    """

    step: int
    draws_upto: int
    new: NewSlots | None
    page_slot: np.ndarray
    page_index: np.ndarray
    page_id: np.ndarray
    decode_slot: np.ndarray
    levels: list[GroupLevel]
    prefill_slot: np.ndarray
    prefill_start: np.ndarray
    prefill_count: np.ndarray
    prefill_token: np.ndarray
    copy_src: np.ndarray
    copy_dst: np.ndarray
    sample_row: np.ndarray
    sample_slot: np.ndarray
    filter_row: np.ndarray
    penalty_row: np.ndarray
    bias_row: np.ndarray
    top_logprobs: int
    all_greedy: bool
    max_kv: int
    prompts: RequestedPromptOutputs | None = None
    shared: list[SharedPages] = msgspec.field(default_factory=list)
    mask_row: np.ndarray = msgspec.field(default_factory=lambda: EMPTY)
    mask_of: np.ndarray = msgspec.field(default_factory=lambda: EMPTY)
    mask: np.ndarray = msgspec.field(default_factory=lambda: EMPTY.reshape(0, 0))
    top_row: np.ndarray = msgspec.field(default_factory=lambda: EMPTY)


class StepOutput(msgspec.Struct, tag=True):
    """The tokens of one step, in the order of its R rows: int32, float32, and `[R, top_logprobs]` of each.

    A row whose sequence had ended before the step may return any token. `launch_seconds`: of the worker's CPU, to
    enqueue the step; `device_seconds`: from the step's first operation on the device to its last. With several stages
    both are the last one's own, without its wait for the stream of the one before.
    """

    step: int
    token: np.ndarray
    logprob: np.ndarray
    top_token: np.ndarray
    top_logprob: np.ndarray
    launch_seconds: float
    device_seconds: float
    prompts: PromptValues | None = None


class EngineInfo(msgspec.Struct, tag=True, frozen=True):
    """What a worker found out at its start: the model's and the cache's sizes and every `auto` resolved.

    `sampling_defaults`: fields of SamplingParams that the model's makers set, for requests that leave them out. An
    engine is told whole SamplingParams and applies none by itself; the server does. `few_tokens`, `async_tokens`:
    those of the `TensorParallel`; None without one, and `async_tokens` where no step overlaps. Prompts of more than
    `short_prompt` tokens are rotated otherwise than those of fewer, and where `lengths_apart` says so, otherwise than
    those of any other length: they share no cached page with them.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    num_pages: int
    page_size: int
    max_running: int
    max_step_tokens: int
    device: str
    dtype: str
    backend: str
    model_id: str = ""
    hidden_size: int = 0
    sampling_defaults: dict[str, int | float] = {}
    few_tokens: int | None = None
    async_tokens: int | None = None
    short_prompt: int | None = None
    lengths_apart: bool = False

    @property
    def kv_cache_tokens(self) -> int:
        """Positions the KV cache holds."""
        return self.num_pages * self.page_size


class Failed(msgspec.Struct, tag=True):
    """A process cannot start or go on. `arguments` are those of the exception class `kind`."""

    kind: str
    arguments: tuple[str | int | float, ...]


class Beat(msgspec.Struct, tag=True, frozen=True):
    """A process of a replica is alive, and its main loop has turned so often; see `tok_core.runtime.heartbeat`."""

    role: str
    turns: int


class Silence(msgspec.Struct, tag=True, frozen=True):
    """Processes of a replica show no sign of life, `detail` says which; empty: all do again."""

    detail: str


class Finished(msgspec.Struct, array_like=True, gc=False):  # no part of a cycle
    """A sample has ended after the tokens reported so far.

    `tokens`: how many tokens it has. `cut`: with a stop string, the bytes of its pieces before the string begins.
    """

    rid: int
    sample: int
    reason: FinishReason
    tokens: int
    stop: int | str | None = None
    cut: int | None = None


class Scores(msgspec.Struct):
    """Log-probabilities of the tokens of a prompt from position `first` on, as in PromptValues."""

    rid: int
    first: int
    logprob: np.ndarray
    top_token: np.ndarray
    top_logprob: np.ndarray


class Embedded(msgspec.Struct):
    """The embedding of a prompt as it was pooled, float32 `[N]`; not normalised."""

    rid: int
    vector: np.ndarray


class Stats(msgspec.Struct):
    """Counters since the start, and gauges, of one manager.

    `skipped_tokens`: of `output_tokens`, those that a grammar left no choice about, and that nobody drew.
    `discarded_tokens`: computed for sequences that had ended. `deferred_*`: steps made without work that can wait,
    because the worker was about to run dry, by the kinds of `manager.deferral.BOUNDS`; of `statistics`, reports that
    repeated the last Stats. Fields of the report of an idle manager are never behind.

    Seconds: `schedule_seconds` of the manager's CPU, to make steps; `output_seconds` of the manager's CPU, to take in
    what came back; `launch_seconds` and `device_seconds` as in StepOutput.
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
    preemptions: int = 0
    deferred_admission: int = 0
    deferred_forecast: int = 0
    deferred_regrouping: int = 0
    deferred_cache: int = 0
    deferred_statistics: int = 0
    pages_total: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    steps: int = 0
    steps_in_flight: int = 0
    group_rows: int = 0
    schedule_seconds: float = 0.0
    launch_seconds: float = 0.0
    device_seconds: float = 0.0
    output_seconds: float = 0.0


class Progress(msgspec.Struct, tag=True):
    """What happened since the last report: N tokens in columns, and the rare events as lists.

    `rid` int64, `sample` and `token` int32, `logprob` float32, `top_token` and `top_logprob` `[N, K]`. Each pair of
    `rid` and `sample` occurs at most once in a round, of which there is one unless `rounds` says how many rows each
    has: a sample's tokens stand in the order in which they follow one another. `scores` come no later than the first
    token of their request, `embedded` no later than its end. `cached` is `[(rid, prompt tokens found in the cache), …]`
    for requests whose first sample was admitted; `failed` is `[(rid, why), …]` for requests of which there is nothing
    more to come; `refused` is `[(rid, what is allowed), …]` for those of them whose grammar takes too much.
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
    cached: list[tuple[int, int]]
    stats: Stats
    failed: list[tuple[int, str]] = []
    rounds: list[int] = []
    refused: list[tuple[int, str]] = []

    @property
    def figures_only(self) -> bool:
        """Whether `stats` are all that it tells."""
        ends = self.finished or self.failed or self.refused
        return not (len(self.rid) or ends or self.scores or self.embedded or self.cached)

    def news(self) -> list[Scores | Embedded]:
        """What it tells of prompts."""
        return [*self.scores, *self.embedded]


class ProcessLaunch(msgspec.Struct):
    """What a child process is told: its role, the level of its log, and the addresses it talks through.

    json_log    it logs as JSON objects, else as text
    replica     of which it is part
    place       a worker's; None for the manager
    steps       the addresses of all workers, in order
    on_host     workers that a worker's host may have, itself among them, whatever replica they are of
    rendezvous  the file through which the workers meet, or where they do on several hosts
    device      a worker's, among the GPUs it sees; None: by replica and place
    """

    role: str
    log_level: int
    json_log: bool
    config: EngineConfig
    replica: int
    place: RankCoordinates | None
    requests: str
    reports: str
    steps: list[str]
    outputs: str
    on_host: int
    rendezvous: str | Rendezvous
    device: int | None = None


ToManager = Submit | Cancel
ToEngine = Progress | EngineInfo | Failed | Silence
FromProcess = Progress | EngineInfo | Failed | Beat
FromWorker = StepOutput | EngineInfo


def _enc(value: object) -> object:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, np.ascontiguousarray(value).data)
    raise TypeError(f"cannot send {type(value).__name__}")


def _dec(kind: type, value: Any) -> object:
    if kind is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(data, dtype=dtype).reshape(shape)
    raise TypeError(f"cannot receive {kind.__name__}")


def encode(message: msgspec.Struct | Sequence[msgspec.Struct]) -> bytes:
    """The message, or several, as bytes."""
    return msgspec.msgpack.encode(message, enc_hook=_enc)


# What msgspec (0.22) finds out about a Struct it keeps with the class, half-made at first: another thread that meets it
# then crashes the process.
_MAKING = Lock()


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder of one message type or a union of tagged ones; arrays come back read-only."""
    with _MAKING:
        return msgspec.msgpack.Decoder(kind, dec_hook=_dec)


def array(values: object, dtype: type = np.int32) -> np.ndarray:
    """A one-dimensional array of `dtype`, whatever `values` is a sequence of."""
    return np.asarray(values, dtype=dtype)


EMPTY: Int32 = np.empty(0, np.int32)
