"""Mistral (Jiang et al. 2023): Llama without biases, whose layers attend to a sliding window of positions."""

from __future__ import annotations

from tok_core.models.decoder import CausalLM
from tok_core.models.llama import LlamaLayer


class MistralForCausalLM(CausalLM):
    """Mistral 7B, Nemo and models of the same structure."""

    layer = LlamaLayer
