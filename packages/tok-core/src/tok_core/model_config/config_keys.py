"""Check config.json: list the keys that are read, those without effect, and the supported values of all others.

A key in none of these tables is an error that names it, because it may change the results. transformers ignores such
keys; `EngineConfig.ignore_config_keys` lets users skip them as well.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from types import MappingProxyType

from tok_core.errors import ModelError
from tok_core.model_config.fields import Fields


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Read by read_config, for every family.
HONOURED = _names(
    """
    architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim rms_norm_eps max_position_embeddings tie_word_embeddings dtype torch_dtype
    rope_parameters rope_scaling rope_theta partial_rotary_factor original_max_position_embeddings
    bos_token_id eos_token_id sliding_window use_sliding_window max_window_layers layer_types quantization_config
    """
)
QWEN_EXPERTS = _names("num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers")
# Read for some families only.
HONOURED_BY: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "llama": frozenset({"attention_bias", "mlp_bias"}),
        # Of EAGLE-3 heads, which are Llama layers; read by `read_eagle3`.
        "eagle3": _names(
            """
            attention_bias mlp_bias draft_vocab_size target_hidden_size norm_before_residual eagle_config
            eagle_aux_hidden_state_layer_ids
            """
        ),
        "mistral": frozenset(),
        "mixtral": _names("num_local_experts num_experts_per_tok"),
        "qwen2": frozenset(),
        "qwen2_moe": _names("qkv_bias num_experts shared_expert_intermediate_size") | QWEN_EXPERTS,
        "qwen3": frozenset({"attention_bias"}),
        "qwen3_moe": _names("attention_bias num_experts num_local_experts") | QWEN_EXPERTS,
    }
)
# Keys that change no logit in inference, whatever their value.
HARMLESS = (
    # every transformers config, version 4 or 5
    _names("""
    _name_or_path name_or_path _commit_hash transformers_version auto_map custom_pipelines return_dict use_return_dict
    output_hidden_states output_attentions torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward is_decoder
    id2label label2id num_labels problem_type finetuning_task task_specific_params tokenizer_class prefix
    tie_encoder_decoder pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id decoder_start_token_id
    attn_implementation _attn_implementation _attn_implementation_internal _attn_implementation_autoset
    experts_implementation _experts_implementation_internal use_cache
    """)
    # sampling defaults, which generation_config.json and requests set instead
    | _names("""
    max_length min_length max_new_tokens min_new_tokens do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p min_p typical_p epsilon_cutoff eta_cutoff repetition_penalty
    encoder_repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens renormalize_logits
    assistant_lookbehind target_lookbehind assistant_confidence_threshold num_assistant_tokens
    num_assistant_tokens_schedule
    """)
    # training
    | _names("""
    initializer_range attention_dropout hidden_dropout hidden_dropout_prob attention_probs_dropout_prob attn_pdrop
    embd_pdrop resid_pdrop resid_dropout residual_dropout embedding_dropout mlp_dropout classifier_dropout dropout
    pretraining_tp gradient_checkpointing use_reentrant_checkpointing neftune_noise_alpha seed
    output_router_logits router_aux_loss_coef router_jitter_noise
    use_flash_attention use_flash_attention_2 use_flash_attn use_flashattn flash_attention _flash_attn_2_enabled
    """)
    # notes of the model's authors
    | _names("""
    is_llama_config transformers.js_config unsloth_fixed unsloth_version model_name base_model
    base_model_name_or_path license trust_remote_code bos_token eos_token pad_token unk_token
    model_max_length tokenizer_model_max_length max_sequence_length max_seq_length max_seq_len seq_length
    """)
)
# Values that match what this engine computes; (): the key must be absent or null.
ALLOWED: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "is_causal": (True,),
        "causal": (True,),
        "is_encoder_decoder": (False,),
        "add_cross_attention": (False,),
        "cross_attention_hidden_size": (),
        "pruned_heads": ({},),
        "per_layer_config": ({},),
        "hidden_act": ("silu", "swish"),
        "hidden_activation": ("silu", "swish"),
        "activation": ("swiglu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "qkv_bias": (False,),
        "o_bias": (False,),
        "bias": (False,),
        "use_bias": (False,),
        "attention_out_bias": (False,),
        "attention_output_bias": (False,),
        "lm_head_bias": (False,),
        "use_qk_norm": (False,),
        "qk_norm": (False,),
        "qk_layernorm": (False,),
        "qk_layer_norms": (False,),
        "clip_qkv": (),
        "use_rope": (True,),
        "use_alibi": (False,),
        "alibi": (False,),
        "use_mrope": (False,),
        "rope_interleaved": (False,),
        "rope_ratio": (1.0,),
        "rotary_pct": (1.0,),
        "rope_local_base_freq": (),
        "no_rope_layers": (),
        "no_rope_layer_interval": (),
        "position_embedding_type": ("rope", "rotary"),
        "log_scale": (False,),
        "attention_multiplier": (),
        "embedding_multiplier": (1.0,),
        "residual_multiplier": (1.0,),
        "logits_scaling": (1.0,),
        "logit_scale": (1.0,),
        "query_pre_attn_scalar": (),
        "attn_logit_softcapping": (),
        "final_logit_softcapping": (),
        "attention_chunk_size": (),
        "sliding_window_pattern": (),
        "use_parallel_residual": (False,),
        "num_experts": (0,),
        "num_local_experts": (0,),
        "shared_expert_intermediate_size": (0,),
        "scoring_func": ("softmax",),
        "n_group": (1,),
        "topk_group": (1,),
        "routed_scaling_factor": (1.0,),
        "num_nextn_predict_layers": (0,),
        "use_resampler": (False,),
        "text_config": (),
        "vision_config": (),
        "audio_config": (),
        "quantization": (),
        "compression_config": (),
    }
)
# The same for one family; overrides ALLOWED.
ALLOWED_BY: Mapping[str, Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        # transformers never reads these keys: Qwen2 always has the biases, and loading fails if they are missing.
        "qwen2": {"attention_bias": (True, False), "qkv_bias": (True,)},
        "eagle3": {"norm_before_fc": (False,)},
        "qwen3": {"use_qk_norm": (True,), "qk_norm": (True,), "qk_layernorm": (True,)},
        "qwen3_moe": {"use_qk_norm": (True,), "qk_norm": (True,), "qk_layernorm": (True,)},
    }
)


def check_keys(config: Fields, model_type: str, ignored: Collection[str]) -> None:
    """Raise ModelError for the first key with an unsupported value, or for all unknown keys.

    `ignored` are unknown keys to skip; a known key among them is an error, too.
    """
    honoured = HONOURED | HONOURED_BY[model_type]
    allowed = {**ALLOWED, **ALLOWED_BY.get(model_type, {})}
    for key in ignored:
        if key in honoured | HARMLESS or key in allowed:
            raise ModelError(f"{config.origin}: {key} cannot be ignored; allowed: keys that are not known")
    for key, values in allowed.items():
        if key in honoured:
            continue
        if key == "is_causal" and key in config.nulls:  # transformers takes null for false
            raise config.wrong(key, None, "true")
        if key in config and not any(_same(config.values[key], value) for value in values):
            raise config.wrong(key, config.values[key], " or ".join(map(json.dumps, values)) or "null")
    unknown = [key for key in config.values if key not in honoured | HARMLESS | allowed.keys() | set(ignored)]
    if unknown:
        raise ModelError(
            f"{config.origin}: not known here: {', '.join(unknown)}; if they change nothing, ignore them by "
            f"--ignore-config-keys {','.join(unknown)} (EngineConfig.ignore_config_keys)"
        )


def _same(found: object, value: object) -> bool:
    """Return whether two values are equal, with true different from 1."""
    return found == value and isinstance(found, bool) == isinstance(value, bool)
