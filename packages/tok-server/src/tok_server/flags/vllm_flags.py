"""vLLM's flags: other names of flags of `tok serve`, statements of what always holds, and refusals that say why."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

SAME_FLAGS = {
    ("--tensor-parallel-size", "-tp"): "--tp",
    ("--pipeline-parallel-size", "-pp"): "--pp",
    ("--data-parallel-size", "-dp"): "--dp",
    ("--enable-expert-parallel",): "--ep",
    ("--max-num-seqs",): "--max-running",
    ("--max-num-batched-tokens",): "--max-step-tokens",
    ("--gpu-memory-utilization",): "--gpu-memory-fraction",
    ("--block-size",): "--page-size",
    ("--enforce-eager",): "--no-cuda-graphs",
    ("-q",): "--quantization",
    ("--ssl-certfile",): "--tls-cert",
    ("--ssl-keyfile",): "--tls-key",
}
"""vLLM's names of a flag -> the flag of `tok serve` with the same meaning."""

ALWAYS_TRUE = {
    "--enable-prefix-caching": "prompts always share cached prefixes",
    "--calculate-kv-scales": "scales of an fp8 KV cache are always calculated if the checkpoint has none",
    "--enable-chunked-prefill": "long prompts are always prefilled in chunks",
    "--async-scheduling": "steps are always scheduled ahead",
    "--enable-auto-tool-choice": "tool_choice auto always works if the chat template takes tools",
    "--enable-prompt-tokens-details": "usage always has prompt_tokens_details",
    "--enable-server-load-tracking": "/load is always served",
    "--enable-tokenizer-info-endpoint": "/tokenizer_info is always served",
    "--enable-request-id-headers": "answers always have x-request-id",
    "--disable-log-requests": "requests are never logged",
    "--no-enable-log-requests": "requests are never logged",
    "--disable-log-stats": "statistics are never logged; /metrics has them",
    "--trust-remote-code": "code of a model is never run; a model that needs it is refused",
}
"""vLLM's switches whose effect always holds here, and that effect."""

REFUSED = {
    "--allowed-origins": "use --allow-origin URL, once per origin",
    "--cpu-offload-gb": "weights are never offloaded to the CPU",
    "--default-chat-template-kwargs": "set chat_template_kwargs in each request",
    "--distributed-executor-backend": "replicas run in processes of this host, or by --ray ADDRESS",
    "--download-dir": "use --data-dir DIR, which also has files and batches, or set HF_HOME",
    "--enable-log-requests": "requests are never logged",
    "--enable-eplb": "use --redundant-experts N, which moves experts, and --expert-rebalance-steps",
    "--eplb-config": "use --redundant-experts N and --expert-rebalance-steps N",
    "--enable-lora": "adapters are not supported; merge them into the checkpoint",
    "--guided-decoding-backend": "grammars are always compiled by xgrammar",
    "--hf-overrides": "config.json is read as it is; edit a copy of the model's directory",
    "--kv-transfer-config": "the KV cache is not sent between servers",
    "--lora-modules": "adapters are not supported; merge them into the checkpoint",
    "--middleware": "tok_server.make_app returns an aiohttp application to extend in Python",
    "--model": "name the model without a flag: tok serve MODEL",
    "--no-enable-chunked-prefill": "long prompts are always prefilled in chunks; --max-step-tokens sets their size",
    "--no-enable-prefix-caching": "prefix caching is always on; a request's cache_salt keeps it apart from others",
    "--override-generation-config": "edit the model's generation_config.json, or set the fields in each request",
    "--rope-scaling": "the scaling is read from the model's config.json",
    "--runner": "generation and embeddings are always both served",
    "--scheduling-policy": "requests are always served by priority, and within one fairly among API keys",
    "--speculative-config": "use --speculate auto, which drafts from prompts and their samples, and --draft MODEL",
    "--structured-outputs-config": "grammars are always compiled by xgrammar",
    "--swap-space": "the KV cache is never swapped to the CPU; preempted samples are computed again",
    "--task": "generation and embeddings are always both served",
    "--tokenizer-mode": "tokenizer.json is always read by the tokenizers library",
    "--uds": "the server listens on --host and --port only",
}
"""vLLM's flags that cannot be honoured, and why, or what to use instead."""

SPELLINGS = {
    "dtype": {"half": "float16", "float": "float32"},
    "load_format": {"safetensors": "auto"},
    "quantization": {"awq_marlin": "awq", "gptq_marlin": "gptq"},
    "kv_cache_dtype": {"int8_per_token_head": "int8"},
    "generation_config": {"vllm": "none"},
    "tool_call_parser": {"llama3_json": "llama3"},
}
"""Field -> vLLM's word for a value -> the same value here."""


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's flags to a parser that has all flags of `tok serve`; refused ones are not part of its help."""
    text = "The same flags by vLLM's names. Other flags of vLLM are refused, with the reason."
    group = parser.add_argument_group("names used by vLLM", text)
    for names, flag in SAME_FLAGS.items():
        alias = copy.copy(parser._option_string_actions[flag])
        alias.option_strings, alias.default, alias.help = names, argparse.SUPPRESS, f"same as {flag}"
        group._add_action(alias)
    for flag, reason in ALWAYS_TRUE.items():
        group.add_argument(flag, action=_AlwaysTrue, help=f"accepted: {reason}")
    for flag, reason in REFUSED.items():
        group.add_argument(flag, action=_Refused, help=argparse.SUPPRESS, reason=reason)
    for action in parser._actions:
        if words := SPELLINGS.get(action.dest):
            action.type = lambda word, words=words: words.get(word, word)


class _AlwaysTrue(argparse.Action):
    """A switch without effect, since what it asks for always holds."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, *_: object) -> None:
        """Do nothing."""


class _Refused(argparse.Action):
    """A flag that ends the command with the reason why it is refused, whatever its values."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str, reason: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs="*", default=argparse.SUPPRESS, help=help)
        self.reason = reason

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Exit with the reason."""
        parser.error(f"{self.option_strings[0]} is not supported: {self.reason}")
