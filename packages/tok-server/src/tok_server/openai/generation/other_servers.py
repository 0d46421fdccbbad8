"""Refuse fields of vLLM, SGLang and llama.cpp that change the answer and that this server does not have, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

NeutralValues = tuple[object, ...]


@dataclass(frozen=True, slots=True, eq=False)
class UnsupportedFields:
    """Unsupported fields, each with its neutral values (which ask for nothing), and why other values are refused."""

    fields: Mapping[str, NeutralValues]
    reason: str


def _use(instead: str) -> str:
    return f"is not supported; use {instead}"


NOT_SUPPORTED = "is not supported"
OTHER_SERVERS = (
    UnsupportedFields({"use_beam_search": (None, False)}, _use("n samples, or best_of of /v1/completions")),
    UnsupportedFields({"length_penalty": (None, 1, 1.0), "early_stopping": (None, False)}, "belongs to beam search"),
    UnsupportedFields({"prompt_embeds": (None,)}, _use("a prompt of text or token ids")),
    UnsupportedFields({"structural_tag": (None,)}, _use("tools, or structured_outputs")),
    UnsupportedFields({"documents": (None, [])}, _use("a message that holds their text")),
    UnsupportedFields({"logprob_token_ids": (None, [])}, _use("logprobs together with allowed_token_ids")),
    UnsupportedFields({"thinking_token_budget": (None,)}, _use("a limit of all tokens, max_tokens")),
    UnsupportedFields({"logits_processors": (None, [])}, _use("logit_bias, bad_words or allowed_token_ids")),
    UnsupportedFields({"guided_whitespace_pattern": (None,)}, _use("structured_outputs.regex")),
    UnsupportedFields({"regex": (None,)}, _use("structured_outputs.regex")),
    UnsupportedFields({"ebnf": (None,), "grammar": (None, "")}, _use("structured_outputs.grammar")),
    UnsupportedFields({"json_schema": (None,)}, _use("structured_outputs.json, or response_format")),
    UnsupportedFields({"lora_path": (None,), "lora": (None, [])}, NOT_SUPPORTED + ": the server has no adapters"),
    UnsupportedFields({"no_stop_trim": (None, False)}, _use("include_stop_str_in_output")),
    UnsupportedFields({"stop_regex": (None, [])}, _use("stop")),
    UnsupportedFields({"max_new_tokens": (None,), "n_predict": (None, -1)}, _use("max_tokens")),
    UnsupportedFields({"repeat_penalty": (None, 1, 1.0)}, _use("repetition_penalty")),
    UnsupportedFields({"n_probs": (None, 0)}, _use("logprobs")),
    UnsupportedFields(
        {
            "typical_p": (None, 1, 1.0),
            "mirostat": (None, 0),
            "dynatemp_range": (None, 0, 0.0),
            "dry_multiplier": (None, 0, 0.0),
            "xtc_probability": (None, 0, 0.0),
            "top_n_sigma": (None, -1, -1.0),
        },
        _use("temperature, top_p, top_k or min_p"),
    ),
)
"""Fields at the top of a request, with their names in other servers."""

_ANY_WHITESPACE = "is not supported; the grammar itself says where white space may stand"
REFUSED_PATHS: Mapping[str, str] = {
    "structured_outputs.structural_tag": _use("tools, or another field of structured_outputs"),
    "structured_outputs.whitespace_pattern": _ANY_WHITESPACE,
    "structured_outputs.disable_any_whitespace": _ANY_WHITESPACE,
    "structured_outputs.disable_additional_properties": _use("additionalProperties of the schema"),
}
"""Unknown fields inside known ones that are refused, and why."""
