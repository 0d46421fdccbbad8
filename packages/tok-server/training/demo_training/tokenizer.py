"""Train and save the tokenizer: byte-level BPE with one token per digit, trained on the generator's own texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from demo_training.dialogue import BEGIN, END, HEAD, HEAD_END, TURN_END, document

VOCAB_SIZE = 1024
SPECIAL = (BEGIN, END, HEAD, HEAD_END, TURN_END)

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\nTools:' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('role ' + message['role'] + ' is not one of system, user, assistant, tool') }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] | trim }}
    {%- else %}
        {%- for part in message['content'] or [] %}
            {{- part['text'] | trim }}
        {%- endfor %}
    {%- endif %}
    {%- for call in message['tool_calls'] or [] %}
        {%- if message['content'] or not loop.first %}
            {{- '\\n' }}
        {%- endif %}
        {{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' }}
        {%- if call['function']['arguments'] is string %}
            {{- call['function']['arguments'] }}
        {%- else %}
            {{- call['function']['arguments'] | tojson }}
        {%- endif %}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""


def train_tokenizer(texts: int = 20_000, seed: int = 0) -> Tokenizer:
    """Train BPE on `texts` documents of the training stream. Every byte has a token, so any text can be encoded."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(texts, seed), trainer)
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, begin)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, including the chat template."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": TURN_END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _texts(count: int, seed: int) -> Iterator[str]:
    random = Random(seed)
    for _ in range(count):
        # BPE must not learn merges from special tokens, so it sees only the text between them.
        one = document(random)
        text = one.prompt + one.target
        for token in SPECIAL:
            text = text.replace(token, "\0")
        yield from filter(None, text.split("\0"))
