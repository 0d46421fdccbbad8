"""Read a mixture of experts from config.json, as transformers 5 does."""

from __future__ import annotations

from dataclasses import dataclass

from tok_core.model_config.fields import Fields

MOE_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")
MAX_EXPERTS = 1024  # a router's logits are held in registers together


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Experts of the layers that have them, and the router's rule.

    layers                    indices of the layers that have experts; all others have an MLP
    experts                   number of experts of a layer
    experts_per_token         number of experts that compute a token
    intermediate_size         columns between the two GEMMs of an expert
    normalize                 the weights of a token's experts are divided by their sum
    shared_intermediate_size  the same of an expert that computes every token; 0: there is none
    """

    layers: frozenset[int]
    experts: int
    experts_per_token: int
    intermediate_size: int
    normalize: bool
    shared_intermediate_size: int = 0

    def __str__(self) -> str:
        shared = f", one of {self.shared_intermediate_size} for all tokens" if self.shared_intermediate_size else ""
        sizes = f"{self.experts} of {self.intermediate_size} columns, {self.experts_per_token} a token{shared}"
        return f"{sizes}; layers with experts: {len(self.layers)}"

    @property
    def active_columns(self) -> int:
        """Return the columns of a layer's experts that compute a token."""
        return self.experts_per_token * self.intermediate_size + self.shared_intermediate_size


def read_experts(config: Fields, family: str, num_layers: int) -> MoEConfig | None:
    """Return the mixture of experts of a model; None if the family has none. Raise ModelError for wrong values."""
    if family not in MOE_FAMILIES:
        return None
    key = _count_key(config, family)
    experts, chosen = config.integer(key), config.integer("num_experts_per_tok")
    if experts > MAX_EXPERTS:
        raise config.wrong(key, experts, f"at most {MAX_EXPERTS}")
    if chosen > experts:
        raise config.wrong("num_experts_per_tok", chosen, f"at most {experts}, the experts of a layer")
    if family == "mixtral":
        columns = config.integer("intermediate_size")
        return MoEConfig(frozenset(range(num_layers)), experts, chosen, columns, normalize=True)
    return MoEConfig(
        layers=_layers(config, num_layers),
        experts=experts,
        experts_per_token=chosen,
        intermediate_size=config.integer("moe_intermediate_size"),
        normalize=config.flag("norm_topk_prob"),
        shared_intermediate_size=config.integer("shared_expert_intermediate_size") if family == "qwen2_moe" else 0,
    )


def _count_key(config: Fields, family: str) -> str:
    """Return the key that holds the number of experts: transformers 5 writes another one for Qwen3-MoE."""
    names = {"mixtral": ("num_local_experts",), "qwen2_moe": ("num_experts",)}
    keys = [key for key in names.get(family, ("num_experts", "num_local_experts")) if key in config]
    if len(keys) == 2 and config.values[keys[0]] != config.values[keys[1]]:
        raise config.wrong(keys[1], config.values[keys[1]], f"{config.values[keys[0]]}, as {keys[0]}, or nothing")
    return keys[0] if keys else names.get(family, ("num_experts",))[0]


def _layers(config: Fields, num_layers: int) -> frozenset[int]:
    """Return the layers that have experts: each `decoder_sparse_step`-th, but not those of `mlp_only_layers`."""
    step, dense = config.integer("decoder_sparse_step", 1), config.values.get("mlp_only_layers", [])
    if not isinstance(dense, list) or any(type(one) is not int or not 0 <= one < num_layers for one in dense):
        raise config.wrong("mlp_only_layers", dense, f"a list of layers, each from 0 to {num_layers - 1}")
    return frozenset(range(step - 1, num_layers, step)).difference(dense)
