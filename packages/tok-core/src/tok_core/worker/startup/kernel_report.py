"""Report which kernels a model uses on this machine, their times, and the lower bound on a decode step's time.

The commands `tok kernels`, `tok bench kernels` and `tok bench steps` call this in their own process, without an engine:
tok_server may not import tok_kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tok_core.config import EngineConfig, RankCoordinates
from tok_core.errors import EngineError, InvalidField
from tok_core.model_config import read_config, resolve
from tok_core.models import weight_reads
from tok_core.parallel import ShardPlan
from tok_core.quantization import read_quantization
from tok_core.worker.startup.resolve import attention_shape, choose_cache_dtype, choose_device, choose_dtype
from tok_core.worker.state import kv_bytes_per_token
from tok_kernels import AttentionShape, choose
from tok_kernels.attention.interface import PHASES, Phase
from tok_kernels.measure import ExpertShape, KernelTime, ModelShape, measure_bandwidth, measure_kernels

if TYPE_CHECKING:
    from tok_kernels.calibration import Measurement  # loads Triton

__all__ = [
    "KernelTime",
    "KernelsMeasured",
    "PhaseReport",
    "StepFloor",
    "floor_at",
    "report_attention",
    "step_floor",
    "time_kernels",
]


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """Kernel chosen for each phase of attention, with the measurements behind the choice.

    shape      attention shape of rank 0 of `tp` ranks
    fastest    chosen kernel of each phase
    cached     whether the results were read from `directory`, instead of measured now
    measured   all measurements
    rejected   reasons why kernels were no candidates or failed, by kernel
    launches   tuned launch configurations, one line each
    """

    device: str
    tp: int
    shape: AttentionShape
    fastest: Mapping[Phase, str]
    cached: bool = True
    directory: Path | None = None
    measured: tuple[Measurement, ...] = ()
    rejected: Mapping[str, str] = field(default_factory=dict)
    launches: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KernelsMeasured:
    """Limits of the device, and times of a model's kernels on the shard of rank 0 of `tp` ranks.

    bandwidth  TB/s of a copy, reads and writes added
    rate       TFLOP/s of GEMMs in the model's dtype
    fp8_rate   TFLOP/s of float8 GEMMs; 0: the device has none
    kernels    kernels with their times, each measured when the iterator reaches it
    """

    device: str
    backend: str
    tp: int
    bandwidth: float
    rate: float
    fp8_rate: float
    kernels: Iterator[KernelTime]


@dataclass(frozen=True, slots=True)
class StepFloor:
    """Lower bound on the time of a decode step: the bytes that rank 0 of each stage reads, at the bandwidth of a copy.

    bandwidth          bytes per second, reads and writes added
    weight_bytes       weights that every step reads
    expert_bytes       weights of all experts
    activation_ratio   share of the experts that a token chooses
    kv_position_bytes  keys and values of a cached position, all layers together
    """

    bandwidth: float
    weight_bytes: int
    expert_bytes: int
    activation_ratio: float
    kv_position_bytes: int

    def milliseconds(self, rows: int, positions: int) -> float:
        """Return the lower bound for `rows` decode rows of `positions` positions each, if experts are chosen evenly."""
        chosen_expert_bytes = self.expert_bytes * (1 - (1 - self.activation_ratio) ** rows)
        read_bytes = self.weight_bytes + chosen_expert_bytes + rows * positions * self.kv_position_bytes
        return read_bytes / self.bandwidth * 1e3


def step_floor(config: EngineConfig) -> StepFloor | None:
    """Return the lower bound on decode steps on this machine; None without a CUDA device.

    Raises InvalidField and ModelError, as `floor_at` does.
    """
    device = choose_device(config, 0, RankCoordinates())
    if device.type != "cuda":
        return None
    bandwidth = measure_bandwidth(device)
    torch.cuda.empty_cache()  # the engine runs in other processes
    return floor_at(bandwidth, config)


def floor_at(bandwidth: float, config: EngineConfig) -> StepFloor:
    """Return the lower bound on decode steps on devices of this bandwidth. Raises InvalidField, ModelError."""
    path = resolve(config.model, config.data_dir, config.revision)
    model = read_config(path, config.ignore_config_keys or ())
    quantization = read_quantization(path, config.quantization)
    dtype = choose_dtype(config.dtype, choose_device(config, 0, RankCoordinates()))
    cache_dtype = choose_cache_dtype(config.kv_cache_dtype, dtype, quantization)
    weight_bytes = expert_bytes = kv_position_bytes = 0
    for worker in config.rank_coordinates()[:: config.tp]:
        stage_weights, stage_experts = weight_reads(model, dtype, worker, quantization)
        weight_bytes, expert_bytes = weight_bytes + stage_weights, expert_bytes + stage_experts
        kv_position_bytes += kv_bytes_per_token(ShardPlan.of(model, worker).local(model), cache_dtype)
    activation_ratio = 0.0 if model.moe is None else model.moe.experts_per_token / model.moe.experts
    return StepFloor(bandwidth, weight_bytes, expert_bytes, activation_ratio, kv_position_bytes)


def report_attention(config: EngineConfig, sizes: Mapping[str, int], *, remeasure: bool) -> PhaseReport:
    """Return the kernels for each attention phase of `config.model`, on rank 0's shard if `config.tp` is above 1.

    The choice stored by an earlier calibration is returned. Without one, or with `remeasure`, calibration runs now and
    stores its choice. `sizes` replace the model's sizes, by the names of AttentionShape. Raises InvalidField,
    ModelError, or EngineError if no kernel computes a phase.
    """
    device, model = shard_shape(config, sizes)
    shape = model.attention
    if device.type != "cuda" or config.backend == "reference":
        if config.backend not in ("auto", "reference"):
            raise InvalidField("backend", config.backend, f"auto or reference on {device.type}")
        return PhaseReport(_device_name(device), config.tp, shape, dict.fromkeys(PHASES, "reference"))
    from tok_kernels.calibration import cache_directory, calibrate, list_candidates, stored_choice

    candidates, rejected = list_candidates(shape, device, config.backend)
    stored = None if remeasure else stored_choice(shape, device, candidates)
    try:
        choice = stored or calibrate(shape, device, candidates, remeasure=True)
    except ValueError as error:
        raise EngineError("; ".join([str(error), *rejected.values()])) from None
    return PhaseReport(
        device=_device_name(device),
        tp=config.tp,
        shape=shape,
        fastest=choice.fastest,
        cached=stored is not None,
        directory=cache_directory(),
        measured=choice.measured,
        rejected={**rejected, **choice.rejected},
        launches=tuple(f"{kernel.name}: {launch}" for kernel, launch in choice.launches.items()),
    )


def time_kernels(config: EngineConfig) -> KernelsMeasured:
    """Time the kernels of `config.model`, on rank 0's shard if `config.tp` is above 1, beside their lower bounds.

    Only one device is used, whatever `tp` is. Raises InvalidField unless on a CUDA device, ModelError, and EngineError
    if no kernel computes the model's attention.
    """
    device, model = shard_shape(config, {})
    if device.type != "cuda":
        raise InvalidField("device", config.device, "cuda (kernels are measured on a CUDA device)")
    try:
        backend = choose(device, config.backend, model.attention)
    except ValueError as error:
        raise EngineError(str(error)) from None
    machine, kernels = measure_kernels(backend, model, device)
    return KernelsMeasured(
        device=_device_name(device),
        backend=backend.name,
        tp=config.tp,
        bandwidth=machine.bandwidth / 1e12,
        rate=machine.rate / 1e12,
        fp8_rate=machine.fp8_rate / 1e12,
        kernels=kernels,
    )


def shard_shape(config: EngineConfig, sizes: Mapping[str, int]) -> tuple[torch.device, ModelShape]:
    """Return the device to measure, and the sizes of rank 0's shard of `config.model`.

    `sizes` replace the model's own: heads, kv_heads, head_dim, layers.

    Raises InvalidField, which names `tp` if the model cannot be sharded in this way, and ModelError.
    """
    device = choose_device(config, 0, RankCoordinates())  # only one rank is measured
    dtype = choose_dtype(config.dtype, device)
    path = resolve(config.model, config.data_dir, config.revision)
    model = read_config(path, config.ignore_config_keys or ())
    for name, value in sizes.items():
        if value < 1:
            raise InvalidField(name, value, "integers from 1")
    if sizes:  # only attention is measured: other sizes must not rule out a `tp`
        model = replace(model, intermediate_size=config.tp, vocab_size=config.tp)
    model = replace(
        model,
        num_heads=sizes.get("heads", model.num_heads),
        num_kv_heads=sizes.get("kv_heads", model.num_kv_heads),
        head_dim=sizes.get("head_dim", model.head_dim),
        num_layers=sizes.get("layers", model.num_layers),
    )
    if model.num_heads % model.num_kv_heads:
        raise InvalidField("heads", model.num_heads, f"multiples of {model.num_kv_heads}, the key/value heads")
    shard_plan = ShardPlan.of(
        model, RankCoordinates(ranks=config.tp, ep=config.ep, redundant_experts=config.redundant_experts)
    )
    local = shard_plan.local(model)
    cache_dtype = choose_cache_dtype(config.kv_cache_dtype, dtype, read_quantization(path))
    attention = attention_shape(local, config.page_size, dtype, cache_dtype)
    experts = None
    if model.moe is not None:
        slots, columns = shard_plan.expert_slots, shard_plan.expert_columns.count
        experts = ExpertShape(slots.size, model.moe.experts_per_token, columns, slots.count)
    vocabulary = shard_plan.vocabulary.count
    return device, ModelShape(attention, local.hidden_size, local.intermediate_size, vocabulary, experts)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
