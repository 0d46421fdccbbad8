"""Dummy weights: noise, drawn so that each worker's share is the same as if one had drawn the whole model."""

from __future__ import annotations

import math
import zlib

import torch

from tok_core.errors import InvalidField
from tok_core.models.decoder import CausalLM
from tok_core.models.weights.targets import WeightTarget, targets
from tok_core.runtime import HEARTBEAT

NOISE = 1e-3  # dummy weights are uniform in ±NOISE
BLOCK = 1 << 24  # entries drawn at once, which bounds the memory


def dummy(
    model: CausalLM, seed: int = 0, *, eos_probability: float | None = None, eos_temperature: float = 0.6
) -> None:
    """Fills every parameter, norms included, uniformly from ±1e-3, so that logits are nearly flat.

    With `eos_probability` each token is an end id with that probability, drawn at `eos_temperature`, whatever came
    before: lengths are geometric. Raises InvalidField for a model without end ids.
    Equal seeds give equal weights on one kind of device, in however many shares the model is held.
    """
    generator = torch.Generator(model.cos_sin_LD.device)
    for name, target in targets(model).items():
        HEARTBEAT.turned()
        _fill(target, f"{seed} {name}", generator)
    if eos_probability is not None:
        _favour_end_ids(model, eos_probability, eos_temperature)


def _fill(target: WeightTarget, key: str, generator: torch.Generator) -> None:
    """Draws the checkpoint's tensor in blocks of rows, each with a seed of its own, where any of it is wanted."""
    rows, width = target.parts[0], math.prod(target.shape[1:])
    each = max(1, BLOCK // width)
    for block in range(rows.start // each, -(-rows.stop // each)):
        start, stop = block * each, min((block + 1) * each, rows.size)
        noise = torch.empty((stop - start, *target.shape[1:]), dtype=target.view.dtype, device=target.view.device)
        generator.manual_seed(zlib.crc32(f"{key} {block}".encode()))  # a CPU's generator heeds 32 bits
        noise.uniform_(-NOISE, NOISE, generator=generator)
        first, last = max(start, rows.start), min(stop, rows.stop)
        columns = [slice(part.start, part.stop) for part in target.parts[1:]]
        target.view[first - rows.start : last - rows.start] = noise[(slice(first - start, last - start), *columns)]


def _favour_end_ids(model: CausalLM, probability: float, temperature: float) -> None:
    """Makes coordinate 0 of the last hidden state 1 after every token: its column of the LM head then is the logits.

    Every token's embedding has the same `lift` there, and the layers add next to nothing to it. The final norm
    divides by the root mean square, of which `lift` is twice, and multiplies by 1/2.
    """
    config, ends = model.config, list(model.config.eos_token_ids)
    if not ends:
        raise InvalidField("eos_probability", probability, "nothing (the model has no end id)")
    size = config.hidden_size
    others = NOISE**2 / 3 * (size - 1) / size + config.rms_norm_eps
    # As it will be stored: where the head is the embedding, it is also the logit of every other id.
    lift = torch.tensor(2 * math.sqrt(others / (1 - 4 / size)), dtype=model.dtype).item()
    rest = config.vocab_size - len(ends)
    gain = temperature * math.log(rest * probability / (len(ends) * (1 - probability)))
    vocabulary = model.share.vocabulary
    own = [token - vocabulary.start for token in ends if vocabulary.start <= token < vocabulary.stop]
    embedding, norm, head = model.model.embed_tokens, model.model.norm, model.lm_head
    if embedding is not None:
        embedding.weight[:, 0] = lift
        if config.tied and own:
            embedding.weight[own, 0] = lift + gain
    if norm is not None:
        norm.weight[0] = 0.5
    if head is not None:
        head.weight[:, 0] = 0.0
        if own:
            head.weight[own, 0] = gain
