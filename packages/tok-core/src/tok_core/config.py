"""Settings of an engine, checked when constructed, and coordinates of the workers that its `pp` and `tp` ask for."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Literal, get_args

import msgspec

from tok_core.errors import InvalidField

Device = Literal["auto", "cuda", "cpu"]
DType = Literal["auto", "bfloat16", "float16", "float32"]
KVCacheDType = Literal["auto", "fp8", "fp8_e4m3", "fp8_unscaled", "int8", "unquantized"]
LoadFormat = Literal["auto", "dummy"]
Quantization = Literal["auto", "fp8", "int8", "compressed-tensors", "fbgemm_fp8", "awq", "gptq"]
GenerationConfig = Literal["auto", "none"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
Speculate = Literal["off", "auto"] | int
AdmissionName = Literal["forecast", "watermark"]
BackendName = Literal["auto", "reference", "triton", "flashinfer"]

EOS_TEMPERATURE = 0.6
TRACE_WARM_UP = 10
TRACE_STEPS = 20
MAX_STEPS_AHEAD = 16  # maximum number of steps queued at the worker, including those that it computes
MAX_DRAFT_TOKENS = 16  # limit of `speculate`, and of auto
MAX_DRAFTING = 1024  # sequences up to which a step drafts
EXPERT_REBALANCE_STEPS = 3000  # as the step_interval of vLLM's EPLB
MAX_MOE_SKEW = 4.0  # limit of `moe_skew`
MAX_PARALLEL_DEGREE = 64  # limit of each of dp, tp and pp
_HOST_AND_PORT = re.compile(r"[^\s:/]+:\d{1,5}")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an engine, fixed at its start. Checked when constructed (`InvalidField`).

    model                a local directory in Hugging Face's layout, or a hub id
    revision             branch, tag or commit of a hub id; None: its main branch
    tokenizer            directory or hub id with another tokenizer for the same vocabulary, and its chat template;
                         None: those of `model`
    chat_template        file with a chat template in Jinja, or its text; None: that of `tokenizer` or `model`
    data_dir             directory for fetched models; None: the hub library's own cache
    cache_dir            directory for compiled kernels and measured choices of kernels, on a GPU. It has a part for
                         each kind of GPU and each version of driver and packages, and may be copied to other hosts.
                         None: Triton, FlashInfer and tok each use their own directory in the user's home
    device               auto: the GPU if there is one, else the CPU
    dtype                dtype of weights and activations; auto: bfloat16 on a GPU, float32 on a CPU
    backend              kernels to compute with. auto: plain torch (reference) on a CPU; on a GPU the faster of Triton
                         and FlashInfer for each phase of attention, measured once
    load_format          dummy: random weights, for measuring speed without a checkpoint
    quantization         auto: load the checkpoint as it is; fp8, int8: round the linear layers of a dense checkpoint
                         to float8 or int8 while loading, with a scale for each row, the LM head excepted. A quantised
                         checkpoint keeps its format, and no other may be named
    generation_config    auto: read `EngineInfo.sampling_defaults` from the model's generation_config.json; none:
                         leave them empty
    logprobs_mode        raw_logprobs: `logprobs` are those of the model's own distribution, before temperature,
                         penalties, biases and filters; processed_logprobs: after them, those of the distribution that
                         tokens are sampled from
    ignore_config_keys   unknown keys of the model's config.json to ignore. Other unknown keys are refused, since they
                         may change what the model computes; None: ignore none
    kv_cache_dtype       dtype of cached keys and values. fp8 and fp8_e4m3: one byte a number, with a scale for each
                         layer and head: the checkpoint's, or as measured at the start. fp8_unscaled: without scales,
                         clamped to ±448. int8: one byte a number, with a scale for each token, layer and head, also on
                         GPUs without float8; Triton computes the attention. The loss of accuracy is measured at the
                         start and logged. unquantized: as dtype. auto: fp8 if the checkpoint has scales
                         (kv_cache_scheme), else unquantized
    page_size            tokens in a page of the KV cache, a power of two
    kv_cache_tokens      positions in the KV cache; None: as many as fit in memory
    gpu_memory_fraction  share of the GPU's memory for weights, cache and activations together
    max_running          maximum number of samples running at once; None: 8192 on a GPU, 256 on a CPU
    max_step_tokens      maximum number of tokens in one forward pass; None: 8192 on a GPU, 1024 on a CPU
    max_model_len        maximum number of tokens of prompt and output together; None: what model and cache allow
    dp, tp, pp           number of replicas; tensor-parallel ranks and pipeline stages of each. An engine takes
                         dp × tp × pp devices
    ep                   the experts of a mixture are spread over the tensor-parallel ranks of a replica (expert
                         parallelism). Otherwise each rank holds some columns of every expert
    redundant_experts    with ep: copies of experts in every layer, held by other ranks, which share the tokens of the
                         experts with most. At first of any experts, then of those measured to have most tokens
    expert_rebalance_steps  steps after which the placement of copies is reconsidered; 0: never
    ray                  Ray cluster that places the replicas, with this host as a node: auto, or the HOST:PORT of its
                         head; None: all replicas run on this host
    async_tp_threshold   tokens of a step from which GEMMs overlap with their collectives (async TP), on GPUs; 0:
                         never; None: as measured at the start
    cuda_graphs          capture decode steps as CUDA graphs, on a GPU; off: launch every kernel of every step
    batch_invariant      compute the same bits for a request whatever runs beside it, and however its tokens are cut
                         into steps, on CPUs and Hopper GPUs
    enable_sleep_mode    allow `Engine.sleep`: weights and KV cache live in memory that can be given back. On Linux only
    prefix_groups        read prefixes shared by running sequences once a step (cascade attention)
    admission            which waiting samples start: forecast admits by predicted page use over time; watermark while
                         the pages needed now leave 1 % of the cache free
    run_ahead            steps queued at the worker before their tokens return; None: two, or more if steps are short
    speculate            tokens to draft for a sample in a step, by prompts and samples of the same salt. The
                         step verifies the drafts, so that samples stay as they are without them. auto: as many as
                         measured step times make worth it; a number: at most so many, by assumed step times; off: none
    draft                directory or hub id of a small model with the same tokens, or of an EAGLE-3 head for the model,
                         which drafts for samples that the texts so far do not predict; only together with `speculate`,
                         and not in a pipeline. None: no model drafts
    step_timeout         seconds without a returned step, or without a turn of a process's main loop, after which the
                         replica counts as hung: it is killed and restarted
    start_timeout        seconds without progress (no tensor loaded, no kernel measured, no graph captured, by any
                         process of a replica) after which a start is given up
    max_restarts         restarts of a replica allowed within `restart_window` seconds
    seed                 seed of dummy weights
    eos_probability      with dummy weights: probability that a token is an end id; None: as probable as any id
    markov_probability   with dummy weights: probability that a token is followed by its successor, so that the model
                         speaks a Markov language that drafts can predict; None: none
    eos_temperature      the temperature at which `eos_probability` and `markov_probability` hold
    moe_skew             with dummy weights of a mixture of experts: exponent of the Zipf law by which tokens choose
                         experts. The r-th most popular of a layer computes a share of tokens proportional to
                         `r ** -moe_skew`, all of them at most; 0: all experts are equally popular
    trace                file for a trace of the worker's steps in Chrome's format; None: no trace. Only the first
                         replica is traced: its worker that returns tokens writes this file, the others write files
                         beside it (`trace_files`)
    trace_from           first step traced, counted from 1; the profiler warms up during the steps before it
    trace_steps          number of steps traced
    """

    model: str
    revision: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    data_dir: str | None = None
    cache_dir: str | None = None
    device: Device = "auto"
    dtype: DType = "auto"
    backend: BackendName = "auto"
    load_format: LoadFormat = "auto"
    quantization: Quantization = "auto"
    generation_config: GenerationConfig = "auto"
    logprobs_mode: LogprobsMode = "raw_logprobs"
    ignore_config_keys: tuple[str, ...] | None = None
    kv_cache_dtype: KVCacheDType = "auto"
    page_size: int = 16
    kv_cache_tokens: int | None = None
    gpu_memory_fraction: float = 0.9
    max_running: int | None = None
    max_step_tokens: int | None = None
    max_model_len: int | None = None
    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: bool = False
    redundant_experts: int = 0
    expert_rebalance_steps: int = EXPERT_REBALANCE_STEPS
    ray: str | None = None
    async_tp_threshold: int | None = None
    cuda_graphs: bool = True
    batch_invariant: bool = False
    enable_sleep_mode: bool = False
    prefix_groups: bool = True
    admission: AdmissionName = "forecast"
    run_ahead: int | None = None
    speculate: Speculate = "off"
    draft: str | None = None
    step_timeout: float = 600.0
    start_timeout: float = 600.0
    max_restarts: int = 3
    restart_window: float = 300.0
    seed: int = 0
    eos_probability: float | None = None
    markov_probability: float | None = None
    eos_temperature: float = EOS_TEMPERATURE
    moe_skew: float = 0.0
    trace: str | None = None
    trace_from: int = TRACE_WARM_UP + 1
    trace_steps: int = TRACE_STEPS

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            as_text = ", as text" * (not isinstance(self.model, str))
            raise InvalidField("model", self.model, f"a directory or a hub id{as_text}")
        for field in ("revision", "tokenizer", "chat_template", "draft"):
            value = getattr(self, field)
            if value is not None and not (isinstance(value, str) and value):
                raise InvalidField(field, value, "a text of at least one character")
        _choice("device", self.device, get_args(Device))
        _choice("dtype", self.dtype, get_args(DType))
        _choice("kv_cache_dtype", self.kv_cache_dtype, get_args(KVCacheDType))
        _choice("backend", self.backend, get_args(BackendName))
        _choice("load_format", self.load_format, get_args(LoadFormat))
        _choice("quantization", self.quantization, get_args(Quantization))
        _choice("admission", self.admission, get_args(AdmissionName))
        _choice("generation_config", self.generation_config, get_args(GenerationConfig))
        _choice("logprobs_mode", self.logprobs_mode, get_args(LogprobsMode))
        keys = self.ignore_config_keys
        if keys is not None and not (isinstance(keys, tuple) and all(isinstance(key, str) and key for key in keys)):
            raise InvalidField("ignore_config_keys", keys, "a tuple of keys of config.json")
        _at_least("page_size", self.page_size, 1)
        if self.page_size & (self.page_size - 1) or self.page_size > 1024:
            raise InvalidField("page_size", self.page_size, "powers of two from 1 to 1024")
        for field in ("kv_cache_tokens", "max_running", "max_step_tokens", "max_model_len"):
            if getattr(self, field) is not None:
                _at_least(field, getattr(self, field), 1)
        if self.kv_cache_tokens is not None and self.kv_cache_tokens < self.page_size:
            raise InvalidField("kv_cache_tokens", self.kv_cache_tokens, f"at least page_size ({self.page_size})")
        if not _is_number(self.gpu_memory_fraction) or not 0 < self.gpu_memory_fraction <= 1:
            raise InvalidField("gpu_memory_fraction", self.gpu_memory_fraction, "above 0, at most 1")
        for field in ("data_dir", "cache_dir"):
            if not isinstance(getattr(self, field), str | None):
                raise InvalidField(field, getattr(self, field), "a directory, as text")
        if self.cache_dir == "":
            raise InvalidField("cache_dir", self.cache_dir, "a directory")
        for field in ("ep", "cuda_graphs", "batch_invariant", "enable_sleep_mode", "prefix_groups"):
            if not isinstance(getattr(self, field), bool):
                raise InvalidField(field, getattr(self, field), "true or false")
        for field in ("dp", "tp", "pp"):
            _between(field, getattr(self, field), 1, MAX_PARALLEL_DEGREE)
        if self.ep and self.tp == 1:
            raise InvalidField("ep", True, "only if tp is above 1")
        self._check_redundant_experts()
        self._check_ray()
        self._check_invariance()
        if self.async_tp_threshold is not None:
            _at_least("async_tp_threshold", self.async_tp_threshold, 0)
            if self.tp == 1:
                raise InvalidField("async_tp_threshold", self.async_tp_threshold, "only if tp is above 1")
        if self.run_ahead is not None:
            _between("run_ahead", self.run_ahead, 1, MAX_STEPS_AHEAD)
        self._check_speculate()
        _at_least("max_restarts", self.max_restarts, 0)
        _at_least("seed", self.seed, 0)
        if self.seed and self.load_format != "dummy":
            raise InvalidField("seed", self.seed, "only if load_format is dummy (each request has its own seed)")
        for field in ("restart_window", "step_timeout", "start_timeout"):
            value = getattr(self, field)
            if not _is_number(value) or not value > 0:
                raise InvalidField(field, value, "seconds above 0")
        self._check_eos()
        if not _is_number(self.moe_skew) or not 0 <= self.moe_skew <= MAX_MOE_SKEW:
            raise InvalidField("moe_skew", self.moe_skew, f"numbers from 0 to {MAX_MOE_SKEW:g}")
        if self.moe_skew and self.load_format != "dummy":
            raise InvalidField("moe_skew", self.moe_skew, "0 unless load_format is dummy")
        self._check_trace()

    def rank_coordinates(self) -> list[RankCoordinates]:
        """Return the coordinates of all workers of a replica, in order of `number`."""
        return list(all_coordinates(self.pp, self.tp, ep=self.ep, redundant_experts=self.redundant_experts))

    def _check_redundant_experts(self) -> None:
        _at_least("redundant_experts", self.redundant_experts, 0)
        _at_least("expert_rebalance_steps", self.expert_rebalance_steps, 0)
        if self.redundant_experts and not self.ep:
            raise InvalidField("redundant_experts", self.redundant_experts, "0 unless ep is true")
        if self.redundant_experts and self.batch_invariant:
            allowed = "0 with batch_invariant, since the ranks that compute a token depend on its place in a step"
            raise InvalidField("redundant_experts", self.redundant_experts, allowed)
        if not self.redundant_experts and self.expert_rebalance_steps != EXPERT_REBALANCE_STEPS:
            allowed = "only together with redundant_experts"
            raise InvalidField("expert_rebalance_steps", self.expert_rebalance_steps, allowed)

    def _check_ray(self) -> None:
        if self.ray is None:
            return
        if not isinstance(self.ray, str) or not (self.ray == "auto" or _HOST_AND_PORT.fullmatch(self.ray)):
            raise InvalidField("ray", self.ray, "auto, or HOST:PORT of a cluster's head")
        if self.trace is not None:
            raise InvalidField("trace", self.trace, "only without ray, whose hosts have files of their own")

    def _check_invariance(self) -> None:
        if not self.batch_invariant:
            return
        if self.backend == "flashinfer":
            raise InvalidField("backend", self.backend, "auto, triton or reference with batch_invariant")
        if self.async_tp_threshold:
            raise InvalidField("async_tp_threshold", self.async_tp_threshold, "0 with batch_invariant")

    def _check_speculate(self) -> None:
        if self.speculate == "off":
            if self.draft is not None:
                raise InvalidField("draft", self.draft, "only together with speculate (auto, or a number of tokens)")
            return
        if self.speculate != "auto" and (
            type(self.speculate) is not int or not 1 <= self.speculate <= MAX_DRAFT_TOKENS
        ):
            raise InvalidField("speculate", self.speculate, f"off, auto, or integers from 1 to {MAX_DRAFT_TOKENS}")
        if self.draft is not None and self.pp > 1:
            raise InvalidField("draft", self.draft, "only if pp is 1")

    @property
    def max_draft_tokens(self) -> int:
        """Return the maximum number of tokens that a step drafts for a sequence; 0 without speculation."""
        if self.speculate == "off":
            return 0
        return MAX_DRAFT_TOKENS if self.speculate == "auto" else self.speculate

    def _check_eos(self) -> None:
        temperature = self.eos_temperature
        if not _is_number(temperature) or not 0 < temperature < math.inf:
            raise InvalidField("eos_temperature", temperature, "finite numbers above 0")
        given = {name: getattr(self, name) for name in ("eos_probability", "markov_probability")}
        for name, probability in given.items():
            if probability is None:
                continue
            if self.load_format != "dummy":
                raise InvalidField(name, probability, "only if load_format is dummy")
            if not _is_number(probability) or not 0 < probability < 1:
                raise InvalidField(name, probability, "above 0, below 1")
        if all(probability is None for probability in given.values()) and temperature != EOS_TEMPERATURE:
            raise InvalidField("eos_temperature", temperature, "only together with eos_probability")
        if sum(filter(None, given.values())) >= 1:
            raise InvalidField("markov_probability", self.markov_probability, "below 1 together with eos_probability")

    def _check_trace(self) -> None:
        if not isinstance(self.trace, str | None) or self.trace == "":
            raise InvalidField("trace", self.trace, "a file")
        _at_least("trace_from", self.trace_from, TRACE_WARM_UP + 1)
        _at_least("trace_steps", self.trace_steps, 1)
        for field, unset in (("trace_from", TRACE_WARM_UP + 1), ("trace_steps", TRACE_STEPS)):
            if self.trace is None and getattr(self, field) != unset:
                raise InvalidField(field, getattr(self, field), "only together with trace")


class RankCoordinates(msgspec.Struct, frozen=True):
    """Pipeline stage and tensor-parallel rank of one worker among the `stages` × `ranks` of a replica.

    Workers are numbered stage by stage: `number = stage × ranks + rank`. Worker `number` of replica `i` takes device
    `i × stages × ranks + number`. The ranks of a stage communicate most and so get neighbouring devices.
    `ep`: the experts of a mixture are spread over the ranks, instead of the columns of each, and each layer has
    `redundant_experts` copies of some.
    """

    stage: int = 0
    stages: int = 1
    rank: int = 0
    ranks: int = 1
    ep: bool = False
    redundant_experts: int = 0

    @property
    def number(self) -> int:
        """Return the index of the worker within its replica."""
        return self.stage * self.ranks + self.rank

    @property
    def workers(self) -> int:
        """Return the number of workers of the replica."""
        return self.stages * self.ranks

    @property
    def first(self) -> bool:
        """Return whether the worker belongs to the stage that embeds tokens."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Return whether the worker belongs to the stage that samples tokens."""
        return self.stage == self.stages - 1

    @property
    def returns(self) -> bool:
        """Return whether this is the one worker that sends a step's tokens to the manager."""
        return self.last and self.rank == 0


def all_coordinates(pp: int, tp: int, *, ep: bool = False, redundant_experts: int = 0) -> Iterator[RankCoordinates]:
    """Yield the coordinates of all workers of a replica, in order of `number`."""
    for stage in range(pp):
        for rank in range(tp):
            yield RankCoordinates(stage, pp, rank, tp, ep, redundant_experts)


def _choice(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidField(field, value, ", ".join(allowed))


def _at_least(field: str, value: object, low: int) -> None:
    if type(value) is not int or not low <= value < 1 << 63:
        raise InvalidField(field, value, f"integers from {low}")


def _between(field: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise InvalidField(field, value, f"integers from {low} to {high}")


def _is_number(value: object) -> bool:
    return type(value) in (int, float)
