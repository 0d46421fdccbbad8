"""Fill a model with random dummy weights that do not depend on how it is sharded."""

from __future__ import annotations

import math
import zlib
from functools import partial

import torch
from torch import Tensor

from tok_core.errors import InvalidField
from tok_core.model_config import ModelConfig
from tok_core.models.decoder import CausalLM
from tok_core.models.layers import KVScales, Linear
from tok_core.models.weights.targets import EMBEDDING, HEAD, NORM, module_targets, modules
from tok_core.quantization import WeightTarget
from tok_core.runtime import HEARTBEAT

NOISE = 1e-3  # dummy weights are uniform in ±NOISE
BLOCK = 1 << 24  # entries generated at once; bounds the memory


def dummy(
    model: CausalLM, seed: int = 0, *, eos_probability: float | None = None, eos_temperature: float = 0.6
) -> None:
    """Fill the model from dense tensors, norms included, that are uniform in ±1e-3, so that logits are nearly flat.

    Routers send tokens to all experts evenly.
    With `eos_probability`, each token sampled at `eos_temperature` is an end id with that probability, whatever
    precedes it: lengths are geometric. Raises InvalidField for a model without end ids.
    Equal seeds give equal weights on one kind of device, however the model is sharded.
    """
    generator = torch.Generator(model.cos_sin_LD.device)
    column_0: dict[str, Tensor] = {}
    if eos_probability is not None:
        column_0 = _end_id_columns(model.config, model.dtype, eos_probability, eos_temperature)

    def fill(prefix: str, name: str, target: WeightTarget) -> None:
        HEARTBEAT.turned()
        _fill_noise(target, f"{seed} {prefix}{name}", generator)
        if f"{prefix}{name}" in column_0:
            target.view[..., :1] = target.part_of(column_0[f"{prefix}{name}"])

    for prefix, module in modules(model):
        if isinstance(module, Linear):
            module.fill_dense(partial(fill, prefix))
        elif isinstance(module, KVScales):
            module.scale.fill_(1)
        else:
            for name, target in module_targets(module):
                fill(prefix, name, target)


def _fill_noise(target: WeightTarget, key: str, generator: torch.Generator) -> None:
    """Generate the checkpoint's tensor in blocks of rows, each with a seed; skip blocks that `target` does not hold."""
    rows, width = target.parts[0], math.prod(target.shape[1:])
    each = max(1, BLOCK // width)
    for block in range(rows.start // each, -(-rows.stop // each)):
        start, stop = block * each, min((block + 1) * each, rows.size)
        noise = torch.empty((stop - start, *target.shape[1:]), dtype=target.view.dtype, device=target.view.device)
        generator.manual_seed(zlib.crc32(f"{key} {block}".encode()))  # a CPU generator uses only 32 bits
        noise.uniform_(-NOISE, NOISE, generator=generator)
        first, last = max(start, rows.start), min(stop, rows.stop)
        columns = [slice(part.start, part.stop) for part in target.parts[1:]]
        target.view[first - rows.start : last - rows.start] = noise[(slice(first - start, last - start), *columns)]


def _end_id_columns(
    config: ModelConfig, dtype: torch.dtype, probability: float, temperature: float
) -> dict[str, Tensor]:
    """Return column 0 of the dense tensors that give end ids their logits, `[…, 1]` by name.

    Coordinate 0 of the last hidden state becomes 1 after every token, so that column 0 of the LM head is added to the
    logits. Every token's embedding has the value `lift` there, and the layers add next to nothing. `lift` is twice the
    root mean square of the hidden state, so that the final norm with weight 1/2 maps it to 1.
    """
    ends = list(config.eos_token_ids)
    if not ends:
        raise InvalidField("eos_probability", probability, "none, because the model has no end id")
    size = config.hidden_size
    others = NOISE**2 / 3 * (size - 1) / size + config.rms_norm_eps
    # Rounded to the stored dtype: with tied weights `lift` is also the logit of every other id.
    lift = torch.tensor(2 * math.sqrt(others / (1 - 4 / size)), dtype=dtype).item()
    rest = config.vocab_size - len(ends)
    gain = temperature * math.log(rest * probability / (len(ends) * (1 - probability)))
    embedding, head = (torch.full((config.vocab_size, 1), base, dtype=torch.float64) for base in (lift, 0.0))
    (embedding if config.tied else head)[ends] += gain
    columns = {EMBEDDING: embedding, NORM: torch.tensor([0.5]), HEAD: head}
    if config.moe is not None:  # what all tokens have in common must not choose their experts
        columns |= {
            f"model.layers.{layer}.mlp.gate.weight": torch.zeros(config.moe.experts, 1) for layer in config.moe.layers
        }
    return columns
