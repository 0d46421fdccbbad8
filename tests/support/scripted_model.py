"""Write a real model that generates scripts of a test: each token of a script is followed by the next.

Attention and feed-forward layers add nothing, so that the hidden state is the embedding of the last token. The LM head
is solved for the logits that follow each token of a script. Pieces of scripts are tokens of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from support.tiny_models import make_model
from support.tiny_tokenizer import SPECIAL_TOKENS

VOCABULARY = 512
CERTAIN = 60.0  # the logit of the next token of a script; the others come from a standard normal distribution

# Like Qwen3's template: tools and calls in tags, think blocks, and a switch for them. `script` begins the answer.
CHAT_TEMPLATE = """{{ bos_token }}
{%- if tools %}[tools]
{%- for tool in tools %}{{ tool | tojson }}
{% endfor %}Write <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|eot_id|>{% endif %}
{%- for message in messages %}[{{ message.role }}]
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}</tool_call>
{%- endfor %}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}[assistant]
{%- if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{{ script }}{% endif %}"""


def make_scripted_model(directory: Path, scripts: Mapping[str, Sequence[str]], template: str = CHAT_TEMPLATE) -> Path:
    """Write a model that answers a prompt that ends with the key of a script with its pieces; return `directory`.

    No piece may have two successors or be a token already. The model follows scripts at any temperature up to 1.
    """
    make_model("llama-untied", directory, vocab_size=VOCABULARY, layers=1)
    follows = _add_tokens(directory, scripts)
    _set_weights(directory / "model.safetensors", follows)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return directory


def _add_tokens(directory: Path, scripts: Mapping[str, Sequence[str]]) -> dict[int, int]:
    """Add a token for every piece; return the successor of each token."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    follows: dict[int, int] = {}
    for tag, script in scripts.items():
        texts = [tag, *script]
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
        vocabulary = tokenizer.get_vocab()
        ids = [vocabulary[text] for text in (*texts, SPECIAL_TOKENS[2])]
        for one, following in pairwise(ids):
            assert follows.setdefault(one, following) == following, "a piece has two successors"
    assert tokenizer.get_vocab_size() <= VOCABULARY
    tokenizer.save(str(directory / "tokenizer.json"))
    return follows


def _set_weights(file: Path, follows: Mapping[int, int]) -> None:
    weights = load_file(file)
    embeddings = weights["model.embed_tokens.weight"]
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith("norm.weight"):
            tensor.fill_(1)
    before = embeddings[list(follows)]
    states = before / before.pow(2).mean(-1, keepdim=True).sqrt()  # the output of the last norm
    head = weights["lm_head.weight"]
    # Random logits, since with equal logits rounding would decide which token is second.
    wanted = torch.randn((len(states), len(head)), generator=torch.Generator().manual_seed(0))
    wanted[torch.arange(len(states)), list(follows.values())] = CERTAIN
    head += (torch.linalg.pinv(states) @ (wanted - states @ head.T)).T
    missed = (states @ head.T - wanted).abs().max()
    assert missed < CERTAIN / 4, f"{len(follows)} tokens with successors are too many for {states.shape[1]} dimensions"
    save_file({name: tensor.to(torch.float32).contiguous() for name, tensor in weights.items()}, file)
