"""Messages between engine, manager and worker, and their encoding: msgpack with arrays as raw bytes.

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
    """A new request, or the samples of it that one replica computes.

    rid           the engine's number of the request, or of this part of it
    params        sampling parameters; `seed` is set
    first_sample  index of the first of the `params.n` samples; another replica may compute other samples
    pooling       how to pool the prompt's embedding, for embedding requests; `params.max_tokens` is 0 then
    tenant        an opaque name of the caller; "" if unknown
    salt          16 bytes, or none; requests with different salts share no pages of the prefix cache
    """

    rid: int
    prompt: np.ndarray
    params: SamplingParams
    first_sample: int = 0
    pooling: Pooling | None = None
    tenant: str = ""
    salt: bytes = b""


class Cancel(msgspec.Struct, tag=True):
    """Cancels the request `rid`; ignored if the request has ended."""

    rid: int


class NewSlots(msgspec.Struct):
    """Slots assigned to new sequences: every array has one entry per slot, except `bias_*`.

    length             positions already in the cache
    last_token         input of the first decode row, before the slot has sampled a token: a sample that forks from a
                       prompt computed earlier feeds the prompt's last token
    eos_from_position  the first sampled position at which a model's end id ends the sample
    sampling           columns of sampling parameters, as `tok_core.sampling_params.DEVICE_COLUMNS` lists them
    bias_*             ragged, with a slot's entries side by side: `bias_value[i]` is added to the logit of
                       `bias_token[i]` at sampled positions below `bias_until[i]`, for slot `bias_slot[i]`
    """

    slot: np.ndarray
    length: np.ndarray
    last_token: np.ndarray
    eos_from_position: np.ndarray
    prompt_len: np.ndarray
    sample: np.ndarray
    sampling: dict[str, np.ndarray]
    bias_slot: np.ndarray
    bias_token: np.ndarray
    bias_value: np.ndarray
    bias_until: np.ndarray


MAX_CASCADE_LEVELS = 3
"""Cascade levels of a step: enough for a system prompt, few-shot examples, and a question sampled many times."""


class GroupLevel(msgspec.Struct):
    """Disjoint prefix groups of decode rows, at one cascade level: int32 `[G]`.

    Group `g` has the rows `start[g]` to `start[g] + count[g] - 1`. They share the positions `[kv_start[g], kv_end[g])`,
    which are whole pages, listed in the page table of `slot[g]`.
    """

    start: np.ndarray
    count: np.ndarray
    slot: np.ndarray
    kv_start: np.ndarray
    kv_end: np.ndarray


class SharedPages(msgspec.Struct):
    """Sets the first k page table entries of each slot in `slot`, int32 `[n]`, to `page`, int32 `[k]`."""

    slot: np.ndarray
    page: np.ndarray


class RequestedPromptOutputs(msgspec.Struct):
    """Prompt log-probabilities and embeddings to compute in a step.

    Legend: C chunks scored, Q their rows scored, E chunks pooled.

    The first `scored_count[c]` rows of prefill chunk `scored[c]` are scored. Each row q yields the log-probability of
    the next prompt token `scored_token[q]`, and the `top_logprobs` most likely tokens. The last `pooled_count[e]`
    hidden states of chunk `pooled[e]` are summed after the final norm.
    """

    scored: np.ndarray
    scored_count: np.ndarray
    scored_token: np.ndarray
    top_logprobs: int
    pooled: np.ndarray
    pooled_count: np.ndarray


class PromptValues(msgspec.Struct):
    """Values of a step's `RequestedPromptOutputs`.

    logprob      float32 `[Q]`
    top_token    int32 `[Q, top_logprobs]`
    top_logprob  float32 `[Q, top_logprobs]`
    pooled       float32 `[E, hidden size]`, sums of hidden states
    """

    logprob: np.ndarray
    top_token: np.ndarray
    top_logprob: np.ndarray
    pooled: np.ndarray


class StepInput(msgspec.Struct):
    """One forward pass: the changes since the last step, then the tokens to compute. The worker proceeds in this order:

    1. In a pipeline, except for its last stage: make the tokens sampled by steps up to `sampled_upto` the last tokens
       of their slots. Drop tokens of slots that have since been given to another sequence. The last stage, and a worker
       with all layers, have recorded them when they sampled them.
    2. Set the `new` slots. Write page table entries: those of `shared`, in order, then
       `(page_slot, page_index) = page_id`.
    3. Copy pages `copy_src` to `copy_dst`, with the contents that earlier steps left. No page is a target twice.
    4. Compute. A decode row feeds its slot's last token at position `length`; prefill chunks feed `prefill_token`
       (concatenated) from positions `prefill_start` on. `levels[0]` has the prefix groups that begin at position 0. A
       group of `levels[k + 1]` lies within a group of `levels[k]`, and its positions begin where those end.
    5. Sample. For each of the R rows, the logits of sequence `sample_row` of the step yield the next token of slot
       `sample_slot`. Several slots may sample from one sequence: that is a fork.

    filter_row   which of the R rows have top-k, top-p or min-p filters
    penalty_row  which of the R rows have penalties
    bias_row     which of the R rows have logit biases in effect
    mask_row     which of the R rows have a grammar mask
    mask_of      the row of `mask` for each entry of `mask_row`
    mask         `[m, ⌈V/32⌉]` bitmasks: token t is allowed if bit t mod 32 of word t div 32 is set
    top_row      which of the R rows need top log-probabilities, of up to `top_logprobs` tokens
    all_greedy   whether all R rows sample at temperature 0
    max_kv       tokens of the longest sequence after the step
    prompts      requested log-probabilities and embeddings of prompts; None: none in this step
    """

    step: int
    sampled_upto: int
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
    """The sampled tokens of one step, in the order of its R rows.

    `token` is int32 and `logprob` float32, `[R]`; `top_token` and `top_logprob` are the same of `[R, top_logprobs]`. A
    row whose sequence had ended before the step may return any token.

    launch_seconds  time of the worker's CPU to enqueue the step
    device_seconds  time from the step's first operation on the device to its last

    With several pipeline stages, both are those of the last stage, without its wait for the previous stage's output.
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
    """Properties that a worker determines at its start: sizes of model and cache, and the value of every `auto`.

    sampling_defaults                          fields of SamplingParams that the model's generation_config.json sets.
                                               The server applies them to requests that leave a field out; the engine
                                               takes complete SamplingParams and applies none
    max_all_reduce_tokens, min_overlap_tokens  thresholds of `TensorParallel`; None without tensor parallelism, and
                                               `min_overlap_tokens` is None if no step overlaps GEMMs with collectives
    short_prompt                               longer prompts than this (tokens) have another rotary embedding than
                                               shorter ones, and share no cached pages with them; None: all prompts have
                                               the same
    rope_depends_on_length                     long prompts of different lengths do not share pages, either
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
    max_all_reduce_tokens: int | None = None
    min_overlap_tokens: int | None = None
    short_prompt: int | None = None
    rope_depends_on_length: bool = False

    @property
    def kv_cache_tokens(self) -> int:
        """Return the number of positions in the KV cache."""
        return self.num_pages * self.page_size


class Failed(msgspec.Struct, tag=True):
    """A process cannot start or go on. `arguments` are those of the exception class `kind`."""

    kind: str
    arguments: tuple[str | int | float, ...]


class Beat(msgspec.Struct, tag=True, frozen=True):
    """Heartbeat of a replica's process, with the number of its main loop's turns; see `tok_core.runtime.heartbeat`."""

    role: str
    turns: int


class Silence(msgspec.Struct, tag=True, frozen=True):
    """Processes of a replica send no heartbeat: `detail` names them. An empty `detail`: all send heartbeats again."""

    detail: str


class Finished(msgspec.Struct, array_like=True, gc=False):  # never part of a reference cycle
    """A sample has ended after the tokens reported so far.

    tokens  number of its tokens
    stop    the stop id or stop string that ended it; None for a model's own end id, and for other reasons
    cut     for a stop string: bytes of the sample's tokens, special ones included, that precede the string
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
    top_token: np.ndarray
    top_logprob: np.ndarray


class Embedded(msgspec.Struct):
    """The pooled embedding of a prompt, float32 `[hidden size]`; not normalised."""

    rid: int
    vector: np.ndarray


class Stats(msgspec.Struct):
    """Counters since the start, and gauges, of one manager. An idle manager reports current values.

    skipped_tokens                  those of `output_tokens` that a grammar determined, so that no step sampled them
    discarded_tokens                tokens computed for sequences that had ended
    schedule_seconds                time of the manager's CPU to build steps
    output_seconds                  time of the manager's CPU to process returned tokens
    launch_seconds, device_seconds  as in StepOutput, summed
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
    """A manager's report of everything since its last one: N tokens in columns, and rarer events as lists.

    Columns: `rid` int64, `sample` and `token` int32, `logprob` float32, `top_token` and `top_logprob` `[N, K]`.

    rounds    number of rows of each round; empty: one round. A pair of `rid` and `sample` occurs at most once in a
              round, and a sample's tokens of successive rounds follow one another
    scores    prompt log-probabilities, no later than the first token of their request
    embedded  embeddings, no later than the end of their request
    cached    `[(rid, prompt tokens found in the cache), …]` for requests whose first sample was admitted
    failed    `[(rid, reason), …]`; nothing more follows for these requests
    refused   `[(rid, what is allowed), …]`, the same for requests whose grammar exceeds a limit
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
        """Return whether the report contains nothing but `stats`."""
        ends = self.finished or self.failed or self.refused
        return not (len(self.rid) or ends or self.scores or self.embedded or self.cached)

    def news(self) -> list[Scores | Embedded]:
        """Return the prompt log-probabilities and embeddings."""
        return [*self.scores, *self.embedded]


class ProcessLaunch(msgspec.Struct):
    """Launch parameters of a child process: its role, log settings, and the addresses of its sockets.

    json_log         log as JSON objects rather than as text
    replica          index of the process's replica
    place            coordinates of a worker; None for the manager
    steps            addresses at which the workers receive steps, in order of their numbers
    workers_on_host  maximum number of workers on the host of a worker, of all replicas and including itself
    rendezvous       path of the file through which the workers meet, or their address if they are on several hosts
    device           index of a worker's GPU among those it sees; None: derived from `replica` and `place`
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
    workers_on_host: int
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
    """Encode one message, or a sequence of messages."""
    return msgspec.msgpack.encode(message, enc_hook=_enc)


# msgspec (0.22) caches type information on each Struct class and publishes it half-built: a second thread that reads it
# at that moment crashes the process.
_MAKING = Lock()


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder of one message type or a union of tagged ones; decoded arrays are read-only."""
    with _MAKING:
        return msgspec.msgpack.Decoder(kind, dec_hook=_dec)


def array(values: object, dtype: type = np.int32) -> np.ndarray:
    """Return a sequence as a one-dimensional array of `dtype`."""
    return np.asarray(values, dtype=dtype)


EMPTY: Int32 = np.empty(0, np.int32)
