"""Write a small byte-level BPE tokenizer with a Llama-3-like chat template into a model directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, processors, trainers
from tokenizers.pre_tokenizers import ByteLevel

SPECIAL_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")
MERGES = 64
TRAINING_TEXT = (
    "the quick brown fox jumps over the lazy dog and then the other dog jumps over the other fox",
    "she had three apples and then bought three more so there are six apples in the basket",
    "naïve café, über, 日本語のテキスト, 🙂🙃 emoji and 123 + 456 = 579",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "[{{ message['role'] }}]\n{{ message['content'] | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]\n{% endif %}"
)


def write_tokenizer(directory: Path, vocab_size: int) -> int:
    """Write tokenizer.json and tokenizer_config.json; return the id of the first of `SPECIAL_TOKENS`.

    Ids 0 to 255 are the bytes in the order of the byte-level alphabet, followed by merges and special tokens. A model's
    vocabulary may be larger.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _train(vocab_size)
    first_special = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    begin = SPECIAL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, first_special)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": SPECIAL_TOKENS[1],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return first_special


def add_merges(directory: Path, texts: Sequence[str], most: int) -> None:
    """Add tokens to a directory's tokenizer: the first two, three, ... `most` bytes of each text."""
    file = directory / "tokenizer.json"
    found = json.loads(file.read_text())
    vocab, merges = found["model"]["vocab"], found["model"]["merges"]
    first = 1 + max(*vocab.values(), *(token["id"] for token in found["added_tokens"]))
    for text in texts:
        ((spelt, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
        for end in range(2, min(most, len(spelt)) + 1):
            if spelt[:end] not in vocab:
                vocab[spelt[:end]] = first
                merges.append([spelt[: end - 1], spelt[end - 1]])
                first += 1
    file.write_text(json.dumps(found))


def _train(vocab_size: int) -> Tokenizer:
    """Train merges on `TRAINING_TEXT`, at most as many as fit in the vocabulary."""
    size = min(256 + MERGES, vocab_size - len(SPECIAL_TOKENS))
    if size < 256:
        raise ValueError(f"vocab_size is {vocab_size}; allowed: at least {256 + len(SPECIAL_TOKENS)}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=sorted(ByteLevel.alphabet()), show_progress=False)
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    return tokenizer
