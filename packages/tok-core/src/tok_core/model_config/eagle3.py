"""Read what the config.json of an EAGLE-3 head has beside that of a Llama layer (Li et al. 2025, arXiv 2503.01840)."""

from __future__ import annotations

from dataclasses import dataclass

from tok_core.model_config.fields import Fields

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
MIN_TARGET_LAYERS = 7  # of which layers 2, n / 2 and n − 3 are three different ones, in this order
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Keys of the speculators library around the layer's own config that say nothing about the computation.
_SPECULATORS_NOTES = frozenset({"speculators_config", "speculators_version", "has_no_defaults_at_init"})


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Settings of an EAGLE-3 head beside those of its layer; `ModelConfig.vocab_size` is that of its own LM head.

    target_vocab_size     entries of the embedding that it reads
    target_hidden_size    width of the target model's residual stream
    streams               layers of the target model whose input the head reads, in rising order; the number of layers
                          stands for the output of the last one
    norm_before_residual  the residual stream begins with the normed hidden state instead of the hidden state
    own_embedding         the checkpoint has an embedding; else the head uses the target model's
    maps_tokens           the checkpoint maps the ids of the head's vocabulary to the target model's
    """

    target_vocab_size: int
    target_hidden_size: int
    streams: tuple[int, ...]
    norm_before_residual: bool
    own_embedding: bool
    maps_tokens: bool


def is_eagle3(config: Fields) -> bool:
    """Return whether config.json is that of an EAGLE-3 head: by its architecture, or by its own vocabulary."""
    names = config.texts("architectures")
    return "draft_vocab_size" in config or any(name in ARCHITECTURES for name in names)


def flattened(config: Fields) -> Fields:
    """Return config.json in the flat form; the speculators library nests the layer's keys.

    Raises ModelError for a speculator of another kind.
    """
    layer = config.section("transformer_layer_config")
    if layer is None:
        return config
    if config.text("speculators_model_type", "eagle3") != "eagle3":
        raise config.wrong("speculators_model_type", config.values["speculators_model_type"], "eagle3")
    outer = {key: value for key, value in config.values.items() if key not in _SPECULATORS_NOTES}
    del outer["transformer_layer_config"]
    outer.pop("speculators_model_type", None)
    # In this form the normed hidden state begins the residual stream by default, as in vLLM.
    return Fields(config.origin, {"norm_before_residual": True, **layer.values, **outer})


def read_eagle3(config: Fields, target_layers: int, target_hidden_size: int, target_vocab_size: int) -> Eagle3Config:
    """Return the settings of a head for a target model of this shape.

    Raises ModelError, which names the key, for a head of another target model.
    """
    nested = config.section("eagle_config") or Fields(f"{config.origin}: eagle_config", {})
    if not nested.flag("use_aux_hidden_state", True):
        raise nested.wrong("use_aux_hidden_state", False, "true (an EAGLE-3 head)")
    if config.integer("num_hidden_layers") != 1:
        raise config.wrong("num_hidden_layers", config.values["num_hidden_layers"], "1")
    if config.flag("tie_word_embeddings"):
        raise config.wrong("tie_word_embeddings", True, "false")
    vocab_size, hidden_size = config.integer("vocab_size"), config.integer("hidden_size")
    if vocab_size != target_vocab_size:
        raise config.wrong("vocab_size", vocab_size, f"{target_vocab_size}, as the model has")
    if (wanted := config.integer("target_hidden_size", hidden_size)) != target_hidden_size:
        key = "target_hidden_size" if "target_hidden_size" in config else "hidden_size"
        raise config.wrong(key, wanted, f"{target_hidden_size}, as the model has")
    own_size = config.integer("draft_vocab_size", vocab_size)
    if own_size > vocab_size:
        raise config.wrong("draft_vocab_size", own_size, f"at most vocab_size ({vocab_size})")
    return Eagle3Config(
        target_vocab_size=vocab_size,
        target_hidden_size=target_hidden_size,
        streams=_streams(config, nested, target_layers),
        norm_before_residual=config.flag("norm_before_residual"),
        own_embedding=hidden_size != target_hidden_size,
        maps_tokens=own_size != vocab_size,
    )


def _streams(config: Fields, nested: Fields, layers: int) -> tuple[int, ...]:
    """Return the layers whose input the head reads; by default those of the EAGLE-3 paper's code.

    Published configs number the streams in two ways: by the layer that reads one, or by the layer that wrote it. As in
    SGLang, the first number decides: 2 in the first way and 1 in the second are the input of layer 2.
    """
    fields = config if LAYER_IDS in config else nested
    if LAYER_IDS not in fields:
        if layers < MIN_TARGET_LAYERS:
            raise fields.wrong(LAYER_IDS, None, f"layers of the model, which has fewer than {MIN_TARGET_LAYERS}")
        return 2, layers // 2, layers - 3
    ids = fields.values[LAYER_IDS]
    if isinstance(ids, list) and ids and all(type(one) is int for one in ids):
        streams = tuple(one + 1 if ids[0] == 1 else one for one in ids)
        if streams == tuple(sorted(set(streams))) and streams[0] >= 0 and streams[-1] <= layers:
            return streams
    raise fields.wrong(LAYER_IDS, ids, f"a rising list of layers of the model, which has {layers}")
