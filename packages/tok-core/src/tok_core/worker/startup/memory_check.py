"""Refuse a model that does not fit into memory, before any of it is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from msgspec import structs

from tok_core.config import MAX_PARALLEL_DEGREE, EngineConfig, RankCoordinates
from tok_core.errors import EngineError, InvalidField
from tok_core.model_config import ModelConfig
from tok_core.models import model_bytes
from tok_core.parallel import ProcessGroups, ShardPlan
from tok_core.quantization import QuantizationConfig, read_quantization
from tok_core.runtime import available_memory, memory_of_siblings
from tok_core.worker.startup.backend import choose_cache_dtype
from tok_core.worker.startup.draft import read_draft
from tok_core.worker.startup.memory import MIN_CACHE_PAGES, free_device_memory
from tok_core.worker.state import kv_bytes_per_token


class MemoryNeeds(msgspec.Struct, frozen=True):
    """Bytes that a worker needs, or several workers together.

    weights    parameters and tables, those of the draft model included. Loading needs no second copy: checkpoint
               files are mapped, not read into memory
    per_token  one position of the KV cache, that of the draft model included
    cache      smallest KV cache that serves
    """

    weights: int
    per_token: int
    cache: int

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig, dtype: torch.dtype, worker: RankCoordinates) -> MemoryNeeds:
        """Return the needs of one worker. Raise InvalidField if the model cannot be sharded in this way."""
        local = ShardPlan.of(model, worker).local(model)
        quantization = read_quantization(Path(config.model), config.quantization)
        per_token = kv_bytes_per_token(local, choose_cache_dtype(config.kv_cache_dtype, dtype, quantization))
        tokens = MIN_CACHE_PAGES * config.page_size
        weights = model_bytes(model, dtype, worker, quantization)
        draft = read_draft(config, model, worker)
        if draft is not None:
            weights, per_token = weights + draft.bytes(dtype), per_token + draft.bytes_per_token(dtype)
        return cls(weights, per_token, per_token * min(tokens, config.kv_cache_tokens or tokens))

    @classmethod
    def on_one_gpu(cls, config: EngineConfig, model: ModelConfig) -> MemoryNeeds:
        """Return the needs of a model in bfloat16 on one GPU."""
        return cls.of(config, model, torch.bfloat16, RankCoordinates())

    @property
    def total(self) -> int:
        """Return the bytes of weights and the smallest cache."""
        return self.weights + self.cache


def require_memory(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, peers: ProcessGroups, workers_on_host: int
) -> None:
    """Raise an error if weights and KV cache do not fit into the free memory; allocate nothing.

    On a CPU, the needs of all workers on this host count together. All workers of a replica call this at the same
    point, before they load. Memory held by workers of other replicas, which may have loaded by then, counts as free.
    Raises EngineError if the model does not fit, and InvalidField if `kv_cache_tokens` or `max_model_len` do not fit
    beside it.
    """
    needs = MemoryNeeds.of(config, model, dtype, peers.coordinates)
    if peers.device.type == "cuda":
        free, subject = free_device_memory(config, peers.device), "it needs"
        place = f"of {peers.device} are free (--gpu-memory-fraction)"
    else:
        workers = peers.coordinates.workers
        free, place = available_memory(), "of this host's memory are free"
        if workers_on_host > workers:
            free += memory_of_siblings()
        # This waits for the replica's other workers, so that each reads the free memory before any of them loads.
        sums = peers.all_reduce_sum(needs.weights, needs.per_token, needs.cache)
        needs = MemoryNeeds(*(total * workers_on_host // workers for total in sums))
        subject = "it needs" if workers_on_host == 1 else f"{workers_on_host} workers on this host need"
    if needs.total > free:
        advice = (*_remedies(config, model, dtype, peers, needs, free), "a smaller model")
        models = config.model if config.draft is None else f"{config.model} with the draft model {config.draft}"
        raise EngineError(
            f"{models} does not fit: {subject} {_size(needs.weights)} for weights in {_name(dtype)} and "
            f"{_size(needs.cache)} for the smallest KV cache, but only {_size(free)} {place}; use {' or '.join(advice)}"
        )
    tokens = (free - needs.weights) // needs.per_token
    for field in ("kv_cache_tokens", "max_model_len"):
        if (getattr(config, field) or 0) > tokens:
            raise InvalidField(field, getattr(config, field), f"at most {tokens}, by the memory beside the weights")


def _remedies(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, peers: ProcessGroups, needs: MemoryNeeds, free: int
) -> Iterator[str]:
    """Yield the flags that would make the model fit, each by itself."""
    own = MemoryNeeds.of(config, model, dtype, peers.coordinates).total
    alternatives: dict[str, tuple[EngineConfig, torch.dtype]] = {}
    if dtype == torch.float32:
        alternatives["--dtype bfloat16"] = config, torch.bfloat16
    if read_quantization(Path(config.model), config.quantization) == QuantizationConfig():
        alternatives["--quantization fp8"] = structs.replace(config, quantization="fp8"), dtype
    for flag, (smaller_config, smaller_dtype) in alternatives.items():
        total = MemoryNeeds.of(smaller_config, model, smaller_dtype, peers.coordinates).total
        if needs.total * total <= free * own:  # of all workers on this host
            yield flag
    if peers.device.type == "cpu":
        fitting = free * config.dp // needs.total
        if 1 <= fitting < config.dp:
            yield f"--dp {fitting}"
        return
    ranks = 2 * config.tp
    while ranks <= MAX_PARALLEL_DEGREE:
        worker = structs.replace(peers.coordinates, rank=0, ranks=ranks)
        try:
            if MemoryNeeds.of(config, model, dtype, worker).total <= free:
                yield f"--tp {ranks}"
                return
        except InvalidField:  # the model cannot be divided among so many
            return
        ranks *= 2


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.1f} MiB"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
