"""Name the supported architectures, and find that of a config.json. Loads no torch."""

from __future__ import annotations

from tok_core.model_config.fields import Fields

# model_type -> the class that computes it, then other names that its checkpoints use.
ARCHITECTURES_OF: dict[str, tuple[str, ...]] = {
    "llama": ("LlamaForCausalLM", "LlamaModel", "LLaMAForCausalLM"),
    "mistral": ("MistralForCausalLM", "MistralModel"),
    "mixtral": ("MixtralForCausalLM", "MixtralModel"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Model"),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeModel"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Model"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
}
SUPPORTED_ARCHITECTURES = tuple(names[0] for names in ARCHITECTURES_OF.values())


def read_family(config: Fields) -> str:
    """Return the model_type, a key of ARCHITECTURES_OF; if config.json has none, derive it from the architecture.

    Raises ModelError, which names the key, for a model that is not supported.
    """
    names = config.texts("architectures")
    families = {name: family for family, known in ARCHITECTURES_OF.items() for name in known}
    if len(names) > 1 or any(name not in families for name in names):
        raise config.wrong("architectures", names, ", ".join(SUPPORTED_ARCHITECTURES))
    if "model_type" not in config:
        if not names:
            raise config.wrong("architectures", names, ", ".join(SUPPORTED_ARCHITECTURES))
        return families[names[0]]
    family = config.text("model_type")
    if family not in ARCHITECTURES_OF:
        raise config.wrong("model_type", family, ", ".join(ARCHITECTURES_OF))
    if names and families[names[0]] != family:
        allowed = f"{', '.join(ARCHITECTURES_OF[family])} (model_type is {family!r})"
        raise config.wrong("architectures", names, allowed)
    return family
