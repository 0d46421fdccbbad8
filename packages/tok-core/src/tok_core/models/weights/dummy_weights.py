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
from tok_core.models.eagle3 import DraftVocabulary
from tok_core.models.layers import KVScales, Linear
from tok_core.models.weights.markov_weights import SparseEntries, markov_entries
from tok_core.models.weights.targets import EMBEDDING, HEAD, NORM, module_targets, modules
from tok_core.quantization import WeightTarget
from tok_core.runtime import HEARTBEAT

NOISE = 1e-3  # dummy weights are uniform in ±NOISE
MAX_BLOCK_ENTRIES = 1 << 24  # generated at once; bounds the memory
FIT_TOKENS, FIT_ITERATIONS = 1 << 14, 12  # random tokens, and iterations, to fit the offsets of router logits


def fill_dummy_weights(
    model: CausalLM,
    seed: int = 0,
    *,
    eos_probability: float | None = None,
    eos_temperature: float = 0.6,
    moe_skew: float = 0.0,
    markov_probability: float | None = None,
) -> None:
    """Fill the model from dense tensors, norms included, that are uniform in ±1e-3, so that logits are nearly flat.

    Routers send tokens to all experts evenly, or with `moe_skew` to the r-th most popular of a layer in proportion to
    `r ** -moe_skew`, but not more than each token once. Raises InvalidField for a model without experts.
    With `eos_probability`, each token sampled at `eos_temperature` is an end id with that probability, whatever
    precedes it: lengths are geometric. Raises InvalidField for a model without end ids.
    With `markov_probability`, each token sampled at `eos_temperature` is followed by its successor with that
    probability (`markov_entries`).
    Equal seeds give equal weights on the same kind of device, however the model is sharded.
    """
    generator = torch.Generator(model.cos_sin_LD.device)
    column_0: dict[str, Tensor] = {}
    if eos_probability is not None or moe_skew:
        column_0 = _router_columns(model.config, model.dtype, moe_skew, seed)
    entries: dict[str, SparseEntries] = {}
    if markov_probability is not None:
        entries = markov_entries(model.config, markov_probability, eos_temperature, eos_probability, seed)
    if eos_probability is not None:
        column_0 |= _end_id_columns(model.config, model.dtype, eos_probability, eos_temperature)

    def fill(prefix: str, name: str, target: WeightTarget) -> None:
        HEARTBEAT.turned()
        _fill_noise(target, f"{seed} {prefix}{name}", generator)
        if f"{prefix}{name}" in column_0:
            target.view[..., :1] = target.part_of(column_0[f"{prefix}{name}"])
        if f"{prefix}{name}" in entries:
            entries[f"{prefix}{name}"].write(target)

    for prefix, module in modules(model):
        if isinstance(module, Linear):
            module.fill_dense(partial(fill, prefix))
        elif isinstance(module, KVScales):
            module.scale.fill_(1)
        elif isinstance(module, DraftVocabulary):
            torch.arange(len(module.ids), out=module.ids)
        else:
            for name, target in module_targets(module):
                fill(prefix, name, target)


def _fill_noise(target: WeightTarget, key: str, generator: torch.Generator) -> None:
    """Generate the tensor in blocks of rows, each seeded by its number; skip blocks that `target` does not hold."""
    rows, width = target.parts[0], math.prod(target.shape[1:])
    block_rows = max(1, MAX_BLOCK_ENTRIES // width)
    for block in range(rows.start // block_rows, -(-rows.stop // block_rows)):
        start, stop = block * block_rows, min((block + 1) * block_rows, rows.size)
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
    logits. Every token's embedding has the value `_lift` there, which the final norm with weight 1/2 maps to 1.
    """
    ends = list(config.eos_token_ids)
    if not ends:
        raise InvalidField("eos_probability", probability, "none, because the model has no end id")
    lift = _lift(config, dtype)
    rest = config.vocab_size - len(ends)
    gain = temperature * math.log(rest * probability / (len(ends) * (1 - probability)))
    embedding, head = (torch.full((config.vocab_size, 1), base, dtype=torch.float64) for base in (lift, 0.0))
    (embedding if config.tied else head)[ends] += gain
    return {EMBEDDING: embedding, NORM: torch.tensor([0.5]), HEAD: head}


def _router_columns(config: ModelConfig, dtype: torch.dtype, skew: float, seed: int) -> dict[str, Tensor]:
    """Return column 0 of the tensors that offset the router logits, so that some experts are more popular.

    Coordinate 0 of the hidden state is the same for all tokens. All other coordinates add noise to the logits, normally
    distributed over tokens. The popular experts differ from layer to layer. Without a skew, coordinate 0 is ignored.
    """
    moe = config.moe
    if moe is None:
        if skew:
            raise InvalidField("moe_skew", skew, "0 for a model without experts")
        return {}
    lift = _lift(config, dtype)
    columns = {EMBEDDING: torch.full((config.vocab_size, 1), lift)}
    deviation = NOISE**2 / 3 * math.sqrt(config.hidden_size - 1) * (NOISE / math.sqrt(3)) / (lift / 2)  # of the noise
    offset_E = zipf_offsets(moe.experts, moe.experts_per_token, skew) * deviation / (2 * NOISE)
    for layer in moe.layers:
        source = torch.Generator().manual_seed(zlib.crc32(f"{seed} {layer}".encode()))
        gate = offset_E[torch.randperm(moe.experts, generator=source)]
        columns[f"model.layers.{layer}.mlp.gate.weight"] = gate.unsqueeze(1)
        columns[f"model.layers.{layer}.post_attention_layernorm.weight"] = torch.tensor([NOISE])
    return columns


def zipf_shares(experts: int, chosen: int, skew: float) -> Tensor:
    """Return the share of tokens that each expert computes, the most popular first: `min(1, c · r ** -skew)`.

    >>> zipf_shares(4, 2, 2.0).tolist()  # the most popular expert computes every token
    [1.0, 0.5901639344262295, 0.26229508196721313, 0.14754098360655737]
    """
    share = torch.zeros(experts, dtype=torch.float64)
    weight = torch.arange(1, experts + 1, dtype=torch.float64) ** -skew
    for full in range(chosen):  # experts that compute every token
        share[full:] = (chosen - full) * weight[full:] / weight[full:].sum()
        if share[full] <= 1:
            break
        share[full] = 1
    return share


def zipf_offsets(experts: int, chosen: int, skew: float) -> Tensor:
    """Return the offsets of standard normal logits with which experts get `zipf_shares` of the tokens.

    Fit iteratively on random logits. Each iteration corrects an offset by the difference between the quantiles of the
    wanted and the measured share, which would be exact if top-k were a fixed threshold.
    """
    offset = torch.zeros(experts)
    if not skew:
        return offset
    noise = torch.randn((FIT_TOKENS, experts), generator=torch.Generator().manual_seed(0))
    quantile = _quantiles(zipf_shares(experts, chosen, skew))
    for _ in range(FIT_ITERATIONS):
        tokens = torch.bincount((noise + offset).topk(chosen).indices.flatten(), minlength=experts)
        offset += quantile - _quantiles(tokens / FIT_TOKENS)
    return offset


def _quantiles(share: Tensor) -> Tensor:
    """Return the standard normal quantiles of the shares, which are clamped to what FIT_TOKENS can resolve."""
    quantile: Tensor = torch.special.ndtri(share.clamp(0.5 / FIT_TOKENS, 1 - 0.5 / FIT_TOKENS)).float()
    return quantile


def _lift(config: ModelConfig, dtype: torch.dtype) -> float:
    """Return the value of coordinate 0 of every token's embedding: twice the root mean square of the hidden state.

    The layers add next to nothing to it. It is rounded to the stored dtype, since tied weights add it to every logit.
    """
    size = config.hidden_size
    others = NOISE**2 / 3 * (size - 1) / size + config.rms_norm_eps
    return torch.tensor(2 * math.sqrt(others / (1 - 4 / size)), dtype=dtype).item()
