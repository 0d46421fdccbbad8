"""Map architecture names to model classes and build models."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from tok_core.config import RankCoordinates
from tok_core.errors import ModelError
from tok_core.model_config import ModelConfig
from tok_core.models.decoder import CausalLM
from tok_core.models.eagle3 import Eagle3Decoder, Eagle3LlamaForCausalLM
from tok_core.models.experts import MixtureOfExperts
from tok_core.models.layers import Allocate, Placement
from tok_core.models.llama import LlamaForCausalLM
from tok_core.models.mistral import MistralForCausalLM
from tok_core.models.moe import MixtralForCausalLM, Qwen2MoeForCausalLM, Qwen3MoeForCausalLM
from tok_core.models.qwen2 import Qwen2ForCausalLM
from tok_core.models.qwen3 import Qwen3ForCausalLM
from tok_core.parallel import ShardPlan, TensorParallel
from tok_core.quantization import QuantizationConfig
from tok_kernels import Backend, choose

SUPPORTED = (
    LlamaForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    Qwen2ForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)
ARCHITECTURES: Mapping[str, type[CausalLM]] = MappingProxyType({model.__name__: model for model in SUPPORTED})
HEADS = {Eagle3LlamaForCausalLM.__name__: Eagle3LlamaForCausalLM}  # draft heads, which need a target model


def build(
    config: ModelConfig,
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype,
    coordinates: RankCoordinates = RankCoordinates(),
    tensor: TensorParallel | None = None,
    quantization: QuantizationConfig = QuantizationConfig(),
    allocate: Allocate | None = None,
) -> CausalLM:
    """Build the model of `config`, or the shard of the worker at `coordinates`, with uninitialised parameters.

    `tensor` connects the ranks of a stage and is required if there are several. `quantization` chooses the weight
    format of each linear layer. `allocate` allocates parameters; None: PyTorch does. Raises ModelError for an unknown
    architecture, or for a stacked layer whose matrices have several formats, and InvalidField for a model that cannot
    be sharded in this way.
    """
    model = ARCHITECTURES.get(config.architecture) or HEADS.get(config.architecture)
    if model is None:
        supported = ", ".join(ARCHITECTURES)
        raise ModelError(f"architecture is {config.architecture!r}; supported: {supported}")
    placement = Placement(backend, device, dtype, ShardPlan.of(config, coordinates), tensor, quantization, allocate)
    return model(config, placement).eval()


def model_bytes(
    config: ModelConfig, dtype: torch.dtype, coordinates: RankCoordinates, quantization: QuantizationConfig
) -> int:
    """Return the bytes of the model, or of the shard of the worker at `coordinates`, without allocating them.

    Raises as `build` does.
    """
    model = _on_meta(config, dtype, coordinates, quantization)
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def weight_reads(
    config: ModelConfig, dtype: torch.dtype, coordinates: RankCoordinates, quantization: QuantizationConfig
) -> tuple[int, int]:
    """Return the bytes of parameters that every decode step reads, and those of all experts, of which it reads some.

    Of an embedding that is no LM head, a step reads a row per token, which does not count; nor does the part of a draft
    head that the target model's steps read. Raises as `build` does.
    """
    model = _on_meta(config, dtype, coordinates, quantization)
    parts = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    experts = sum(_bytes(part.gate_up_proj) + _bytes(part.down_proj) for part in parts)
    embedding = model.model.embed_tokens
    unread = 0 if config.tied or embedding is None else _bytes(embedding)
    if isinstance(model.model, Eagle3Decoder):
        unread += _bytes(model.model.fc)
    return _bytes(model) - experts - unread, experts


def _bytes(module: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in module.parameters())


def _on_meta(
    config: ModelConfig, dtype: torch.dtype, coordinates: RankCoordinates, quantization: QuantizationConfig
) -> CausalLM:
    with torch.device("meta") as meta:
        return build(config, choose(torch.device("cpu")), meta, dtype, coordinates, None, quantization)
