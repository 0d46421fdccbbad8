"""Fill a model with random dummy weights that do not depend on how it is sharded."""

from __future__ import annotations

import math
import zlib

import torch

from tok_core.errors import InvalidField
from tok_core.models.decoder import CausalLM
from tok_core.models.weights.targets import targets
from tok_core.quantization import WeightTarget
from tok_core.runtime import HEARTBEAT

NOISE = 1e-3  # dummy weights are uniform in ±NOISE
BLOCK = 1 << 24  # entries generated at once; bounds the memory


def dummy(
    model: CausalLM, seed: int = 0, *, eos_probability: float | None = None, eos_temperature: float = 0.6
) -> None:
    """Fill every parameter, norms included, uniformly from ±1e-3, so that logits are nearly flat.

    With `eos_probability`, each token sampled at `eos_temperature` is an end id with that probability, whatever
    precedes it: lengths are geometric. Raises InvalidField for a model without end ids.
    Equal seeds give equal weights on one kind of device, however the model is sharded.
    """
    generator = torch.Generator(model.cos_sin_LD.device)
    for name, target in targets(model).items():
        HEARTBEAT.turned()
        _fill(target, f"{seed} {name}", generator)
    if eos_probability is not None:
        _favour_end_ids(model, eos_probability, eos_temperature)


def _fill(target: WeightTarget, key: str, generator: torch.Generator) -> None:
    """Generate the checkpoint's tensor in blocks of rows with one seed each, skipping blocks that `target` lacks."""
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


def _favour_end_ids(model: CausalLM, probability: float, temperature: float) -> None:
    """Set the end ids' logits through coordinate 0 of the last hidden state, which becomes 1 after every token.

    With that coordinate at 1, column 0 of the LM head is added to the logits. Every token's embedding has the value
    `lift` there, and the layers add next to nothing. `lift` is twice the root mean square of the hidden state, so
    that the final norm with weight 1/2 maps it to 1.
    """
    config, ends = model.config, list(model.config.eos_token_ids)
    if not ends:
        raise InvalidField("eos_probability", probability, "nothing (the model has no end id)")
    size = config.hidden_size
    others = NOISE**2 / 3 * (size - 1) / size + config.rms_norm_eps
    # Rounded to the stored dtype: with tied weights `lift` is also the logit of every other id.
    lift = torch.tensor(2 * math.sqrt(others / (1 - 4 / size)), dtype=model.dtype).item()
    rest = config.vocab_size - len(ends)
    gain = temperature * math.log(rest * probability / (len(ends) * (1 - probability)))
    vocabulary = model.shard_plan.vocabulary
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
