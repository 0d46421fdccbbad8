"""Training of the demo model: packing, attention mask, and a few steps that lower the loss and write a model."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from demo_training.batches import IGNORED, pack
from demo_training.dialogue import BEGIN, END, TURN_END, document
from demo_training.smalltalk import small_talk
from demo_training.tokenizer import save_tokenizer, train_tokenizer
from demo_training.train import own_document, train
from tokenizers import Tokenizer

from tok_server.demo import MODEL_DIR


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


def test_packaged_tokenizer_equals_the_trained_tokenizer(tmp_path: Path) -> None:
    save_tokenizer(train_tokenizer(), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (MODEL_DIR / name).read_bytes()


def test_packed_rows_hold_whole_documents_and_labels_are_the_next_token(tokenizer: Tokenizer) -> None:
    batch = pack(tokenizer, 8, 1024, Random(5))
    begin, ends = tokenizer.token_to_id(BEGIN), [tokenizer.token_to_id(END), tokenizer.token_to_id(TURN_END)]
    learned = batch.labels_BS[:, :-1] != IGNORED
    assert (batch.labels_BS[:, :-1][learned] == batch.tokens_BS[:, 1:][learned]).all()
    assert (batch.labels_BS[:, -1] == IGNORED).all()
    for tokens, positions, documents in zip(batch.tokens_BS, batch.positions_BS, batch.documents_BS, strict=True):
        assert documents.max() >= 2
        for number in range(1, documents.max() + 1):
            mine = documents == number
            assert tokens[mine][0] == begin
            assert tokens[mine][-1] in ends
            assert positions[mine].tolist() == list(range(mine.sum()))


def test_chat_and_plain_documents_have_their_prompt_and_target_format(tokenizer: Tokenizer) -> None:
    random, kinds = Random(2), set()
    for _ in range(60):
        one = document(random)
        kinds.add(one.whole)
        assert one.target.endswith(END if one.whole else TURN_END)
        assert one.prompt.startswith(BEGIN)
        assert one.prompt.endswith("Answer:" if one.whole else "assistant<|end_header_id|>\n\n")
    assert kinds == {True, False}


def test_packed_batches_are_deterministic_per_seed(tokenizer: Tokenizer) -> None:
    one, same, other = (pack(tokenizer, 2, 256, Random(seed)) for seed in ("0-1", "0-1", "0-2"))
    assert (one.tokens_BS == same.tokens_BS).all()
    assert (one.tokens_BS != other.tokens_BS).any()


def test_attention_mask_is_causal_within_each_document() -> None:
    documents = [1, 1, 1, 2, 2, 0]
    mask = own_document(torch.tensor([documents]))[0, 0]
    assert mask.tolist() == [[i >= j and documents[i] == documents[j] for j in range(6)] for i in range(6)]


def test_small_talk_is_answered_in_words() -> None:
    random = Random(0)
    for _ in range(50):
        said, answer = small_talk(random)
        assert said.strip()
        assert "####" not in answer


def test_a_few_steps_of_training_lower_the_loss_and_write_a_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    loss = train(tmp_path, 12, rows=2, width=256, rate=3e-3, seed=0, device=torch.device("cpu"), processes=1)
    assert loss < 6.7  # ln 1024 is 6.93: the loss of a uniform guess
    network = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert network.dtype == torch.bfloat16
