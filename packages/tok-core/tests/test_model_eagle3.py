"""Configs of EAGLE-3 heads in their published forms."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from support.tiny_eagle3 import make_head, make_target
from tok_core import ModelError
from tok_core.model_config import ModelConfig, read_config, read_head


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture
def head(target: Path, tmp_path: Path) -> Path:
    return make_head(tmp_path / "head", target)


def of_layers(target: Path, layers: int) -> ModelConfig:
    config = read_config(target)
    return replace(config, num_layers=layers, windows=(None,) * layers)


def rewrite(head: Path, config: dict[str, object]) -> None:
    (head / "config.json").write_text(json.dumps(config))


def flat(head: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((head / "config.json").read_text())
    return config


@pytest.mark.parametrize(
    ("keys", "layers", "streams"),
    [
        ({}, 32, (2, 16, 29)),
        ({}, 7, (2, 3, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 46, 90]}}, 94, (2, 47, 91)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}, 36, (2, 18, 33)),
        ({"eagle_aux_hidden_state_layer_ids": [24, 30, 36]}, 36, (24, 30, 36)),
    ],
)
def test_streams_of_a_head_are_numbered_by_their_reader(
    target: Path, head: Path, keys: dict[str, object], layers: int, streams: tuple[int, ...]
) -> None:
    config = flat(head)
    del config["eagle_config"]
    rewrite(head, {**config, **keys})
    found = read_head(head, of_layers(target, layers))
    assert found is not None
    assert found.eagle3 is not None
    assert found.eagle3.streams == streams


def test_head_of_the_speculators_library_reads_like_a_flat_one(target: Path, head: Path) -> None:
    config = {**flat(head), "norm_before_residual": True}
    rewrite(head, config)
    expected = read_head(head, read_config(target))
    layer = {key: value for key, value in config.items() if key not in ("draft_vocab_size", "eagle_config")}
    del layer["norm_before_residual"]
    nested = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "owner/name"}},
        "has_no_defaults_at_init": False,
        "transformer_layer_config": layer,
        "draft_vocab_size": config["draft_vocab_size"],
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    }
    rewrite(head, nested)
    assert read_head(head, read_config(target)) == expected
    assert expected is not None


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Eagle3LlamaForCausalLM"])
def test_vocabulary_of_its_own_makes_a_head(target: Path, head: Path, name: str) -> None:
    rewrite(head, {**flat(head), "architectures": [name]})
    found = read_head(head, read_config(target))
    assert found is not None
    assert found.vocab_size == 490
    assert read_head(target, read_config(target)) is None


def test_model_of_few_layers_has_no_default_streams(target: Path, head: Path) -> None:
    config = flat(head)
    del config["eagle_config"]
    rewrite(head, config)
    with pytest.raises(ModelError, match=r"eagle_aux_hidden_state_layer_ids is None; .* fewer than 7"):
        read_head(head, of_layers(target, 6))
