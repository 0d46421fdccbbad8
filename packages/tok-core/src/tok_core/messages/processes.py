"""Messages about a replica's processes: their launch, their properties, their failures and heartbeats."""

from __future__ import annotations

import msgspec

from tok_core.config import EngineConfig, RankCoordinates
from tok_core.messages.commands import CommandResult, TaskResult, WorkerTask
from tok_core.messages.requests import Progress
from tok_core.messages.steps import StepInput, StepOutput


class EngineInfo(msgspec.Struct, tag=True, frozen=True):
    """Properties that a worker determines at its start: sizes of model and cache, and the value of every `auto`.

    linear_layers                              weight formats of the linear layers
    sampling_defaults                          fields of SamplingParams that the model's generation_config.json sets.
                                               The server applies them to requests that omit a field; the engine takes
                                               complete SamplingParams and applies none
    max_all_reduce_tokens, min_overlap_tokens  thresholds of `TensorParallel`; None without tensor parallelism.
                                               `min_overlap_tokens` is None if no step overlaps GEMMs with collectives
    short_prompt                               maximum tokens of a short prompt. Longer prompts have another rotary
                                               embedding, and share no cached pages with short ones; None: all prompts
                                               have the same
    rope_depends_on_length                     long prompts of different lengths share no pages, either
    tp, pp                                     tensor-parallel ranks and pipeline stages of each replica
    ep, redundant_experts                      as in `EngineConfig`
    draft_slots                                slots beyond `max_running`, which steps lend to drafts
    draft_len                                  positions that the draft model reads at most; 0: there is none
    draft_head                                 the draft model is a head, whose row of position p reads the hidden state
                                               of p and the token of p + 1; else it reads the token of p
    drafts_on_device                           the worker predicts drafted tokens, and accepts them; not in a pipeline
    draft_share                                bytes of weights that a pass of the draft model reads, as a share of the
                                               model's
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
    linear_layers: str = "dense"
    sampling_defaults: dict[str, int | float] = {}
    max_all_reduce_tokens: int | None = None
    min_overlap_tokens: int | None = None
    short_prompt: int | None = None
    rope_depends_on_length: bool = False
    tp: int = 1
    pp: int = 1
    ep: bool = False
    redundant_experts: int = 0
    draft_slots: int = 0
    draft_len: int = 0
    draft_head: bool = False
    draft_share: float = 0.0
    drafts_on_device: bool = False

    @property
    def kv_cache_tokens(self) -> int:
        """Return the number of positions in the KV cache."""
        return self.num_pages * self.page_size


class Failed(msgspec.Struct, tag=True):
    """Failure of a process: the exception class `kind` of `tok_core.errors`, and its `arguments`."""

    kind: str
    arguments: tuple[str | int | float | bool, ...]


class Beat(msgspec.Struct, tag=True, frozen=True):
    """Heartbeat of a replica's process, with the number of its main loop's turns; see `tok_core.runtime.heartbeat`."""

    role: str
    turns: int


class Silence(msgspec.Struct, tag=True, frozen=True):
    """Report of a replica's processes without heartbeats, named in `detail`; "": all send heartbeats again."""

    detail: str


class Rendezvous(msgspec.Struct, frozen=True):
    """Address at which workers on hosts without a common file system meet; worker 0 listens there.

    listener  file descriptor of worker 0's listening socket; None for the others
    """

    host: str
    port: int
    listener: int | None = None


class ProcessLaunch(msgspec.Struct):
    """Launch parameters of a child process: its role, log settings, and the addresses of its sockets.

    json_log         log as JSON objects rather than as text
    replica          index of the process's replica
    coordinates      coordinates of a worker; None for the manager
    steps            addresses at which the workers receive steps, in order of their numbers
    workers_on_host  maximum number of workers on the host of a worker, of all replicas and including itself
    rendezvous       path of the file through which the workers meet, or their address if they are on several hosts
    device           index of a worker's GPU among those it sees; None: derived from `replica` and `coordinates`
    """

    role: str
    log_level: int
    json_log: bool
    config: EngineConfig
    replica: int
    coordinates: RankCoordinates | None
    requests: str
    reports: str
    steps: list[str]
    outputs: str
    workers_on_host: int
    rendezvous: str | Rendezvous
    device: int | None = None


ToEngine = Progress | CommandResult | EngineInfo | Failed | Silence
FromProcess = Progress | CommandResult | EngineInfo | Failed | Beat
ToWorker = StepInput | WorkerTask
FromWorker = StepOutput | EngineInfo | TaskResult
