"""Resolve and check the settings of a worker, before it chooses kernels and loads weights."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from tok_core.config import EngineConfig, RankCoordinates
from tok_core.messages import Rendezvous
from tok_core.model_config import ModelConfig
from tok_core.parallel import ProcessGroups, ShardPlan, join
from tok_core.quantization import QuantizationConfig, read_quantization
from tok_core.worker.startup.cache_directory import CacheDirectory
from tok_core.worker.startup.draft import DraftPlan, check_draft_tensors, read_draft
from tok_core.worker.startup.memory import require_memory
from tok_core.worker.startup.precompile import Precompilation
from tok_core.worker.startup.resolve import (
    StepSizes,
    choose_cache_dtype,
    choose_device,
    choose_dtype,
    require_batch_invariance,
    require_float8_cache,
    require_sleep_support,
    resolve_model_config,
    resolve_step_sizes,
    sampling_defaults,
)


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings that a worker resolves before it chooses kernels and loads weights.

    replica      number of the worker's replica
    path         directory of the model
    model        config of the whole model; `local` is that of this worker's shard
    draft        draft model; None: there is none
    peers        process groups of the worker, with its coordinates and its device
    dtype        dtype of weights and activations
    cache_dtype  dtype of cached keys and values
    """

    config: EngineConfig
    replica: int
    path: Path
    model: ModelConfig
    local: ModelConfig
    draft: DraftPlan | None
    sampling_defaults: dict[str, int | float]
    cache_directory: CacheDirectory
    peers: ProcessGroups
    dtype: torch.dtype
    cache_dtype: torch.dtype
    quantization: QuantizationConfig
    sizes: StepSizes

    @property
    def device(self) -> torch.device:
        return self.peers.device

    @property
    def checks_batch_invariance(self) -> bool:
        """Return whether to check GEMMs for batch invariance: on a GPU, libraries choose kernels by the batch size."""
        return self.config.batch_invariant and self.device.type != "cpu"


def resolve_settings(
    config: EngineConfig,
    replica: int,
    coordinates: RankCoordinates,
    rendezvous: Path | Rendezvous | None,
    gpu: int | None,
    compiler: subprocess.Popen[bytes] | None,
) -> tuple[WorkerSettings, Precompilation]:
    """Read the model's files, choose the device, start to compile kernels, and join the other workers.

    The parameters are those of `set_up`. Raises ModelError and InvalidField.
    """
    path = Path(config.model)
    model = resolve_model_config(config, path)
    draft = read_draft(config, model, coordinates)
    defaults = sampling_defaults(path) if config.generation_config == "auto" else {}
    local = ShardPlan.of(model, coordinates).local(model)
    device = choose_device(config, replica, coordinates, gpu)
    cache_directory = CacheDirectory.of(config, device)
    precompilation = Precompilation(config, device, coordinates.workers, compiler)
    with precompilation:
        peers = join(coordinates, rendezvous, device)
        dtype = choose_dtype(config.dtype, device)
        quantization = read_quantization(path, config.quantization)
        cache_dtype = choose_cache_dtype(config.kv_cache_dtype, dtype, quantization)
        sizes = resolve_step_sizes(config, device.type)
    settings = WorkerSettings(
        config=config,
        replica=replica,
        path=path,
        model=model,
        local=local,
        draft=draft,
        sampling_defaults=defaults,
        cache_directory=cache_directory,
        peers=peers,
        dtype=dtype,
        cache_dtype=cache_dtype,
        quantization=quantization,
        sizes=sizes,
    )
    return settings, precompilation


def check_settings(settings: WorkerSettings, workers_on_host: int) -> None:
    """Refuse settings that this worker's memory or device does not support: see the `require_…` functions.

    Raises EngineError, InvalidField and ModelError. All workers of a replica call this, and wait for each other in it.
    """
    config, device = settings.config, settings.device
    require_memory(config, settings.model, settings.dtype, settings.peers, workers_on_host)
    if settings.draft is not None and config.load_format != "dummy":
        check_draft_tensors(settings.draft, settings.dtype)
    if settings.cache_dtype == torch.float8_e4m3fn and config.backend != "reference":
        require_float8_cache(config.kv_cache_dtype, device)
    if settings.checks_batch_invariance:
        require_batch_invariance(config, settings.quantization, device)
    if config.enable_sleep_mode:
        require_sleep_support(device)
