"""An EAGLE-3 head drafts what its published description says, and changes no answer."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from support.drafting import (
    NEW,
    PARAMS,
    PARTS,
    PLAIN,
    PROMPTS,
    SETTINGS,
    STEM,
    Answer,
    answer,
    answers,
    draft_often,
    pad_passes,
    record_drafts,
    refused,
)
from support.engines import cpu_engine, manager_of, random_prompts
from support.grouping import group_eagerly
from support.parallel_heads import drafts_after_prompt, drafts_of_rank
from support.ranks import run_ranks
from support.tiny_eagle3 import ReferenceHead, make_head, make_target
from support.tiny_models import change_weights, reference_greedy
from tok_core import Engine, EngineConfig
from tok_core.config import all_coordinates
from tok_kernels import SamplingBatch, choose

pytestmark = pytest.mark.usefixtures("forked_children")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def head(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_head(tmp_path_factory.mktemp("head") / "tiny", path)


@pytest.fixture(scope="module")
def expected(path: Path) -> list[Answer]:
    """Return the answers without speculation."""
    with cpu_engine(path, batch_invariant=True) as engine:
        return answers(engine)


@pytest.mark.parametrize(("speculate", "options"), SETTINGS[1:4])
def test_head_changes_no_bit_of_any_answer(
    path: Path, head: Path, expected: list[Answer], speculate: int, options: dict[str, Any]
) -> None:
    settings = {"batch_invariant": True, "max_model_len": 128, **options}
    with cpu_engine(path, speculate=speculate, draft=str(head), **settings) as engine:
        draft_often(engine)
        group_eagerly(manager_of(engine))
        assert answers(engine) == expected
        found = engine.stats()
    assert found["model_drafted_tokens"] > found["model_accepted_tokens"] > 5
    assert found["preemptions"] > 0 or "kv_cache_tokens" not in options


def test_rows_padded_to_the_size_of_graphs_change_no_answer(path: Path, head: Path, expected: list[Answer]) -> None:
    """On a CPU, the passes run as they are captured on a GPU, without a graph."""
    options: dict[str, Any] = {"batch_invariant": True, "max_model_len": 128, "max_running": 256}
    with cpu_engine(path, speculate=4, draft=str(head), **options) as engine:
        draft_often(engine)
        replays = pad_passes(engine, (1, 2, 4, 24, 64))
        assert answers(engine) == expected
        assert engine.stats()["model_accepted_tokens"] > 40
    assert len(replays) > 2


@pytest.mark.parametrize(
    ("options", "padded", "temperature"),
    [
        ({"noise": 0.05}, False, 0.0),
        ({"own_embedding": True, "norm_before_residual": True}, False, 0.0),
        ({"draft_vocab_size": 512, "noise": 0.02}, True, 0.0),
        ({"focus": 2.0, "noise": 0.04}, True, 1.0),
    ],
)
def test_drafts_equal_those_of_the_plain_head(
    path: Path, tmp_path: Path, options: dict[str, Any], padded: bool, temperature: float
) -> None:
    """Whole prompts, chunks, forks, accepted and rejected drafts, and steps without drafts precede them.

    No prompt fills its last page: the head would read its last position with the next token of one sample for all.
    """
    prompts = [STEM, STEM + PARTS[0], STEM + PARTS[1][:13], PARTS[2][:39]]
    head = make_head(tmp_path / "head", path, **options)
    with cpu_engine(path, speculate=4, draft=str(head), page_size=16, max_step_tokens=48, max_running=48) as engine:
        draft_often(engine)
        if padded:
            pad_passes(engine, (1, 3, 8, 64))
        drafts = record_drafts(engine)
        engine.generate(prompts, msgspec.structs.replace(PLAIN, temperature=temperature, n=3 if temperature else 1))
        assert engine.stats()["model_accepted_tokens"] > 5
    plain = ReferenceHead(head, path)
    assert sum(len(one.drafted) for one in drafts) > 100
    for one in drafts:
        sampled = partial(sampled_token, temperature=temperature, seed=one.seed, number=one.sample)
        assert plain.draft(one.tokens, len(one.drafted), sampled) == one.drafted


def sampled_token(logits: Tensor, position: int, *, temperature: float, seed: int, number: int) -> int:
    """Return the token that the model would sample at this position by these logits, `[1, V]`."""
    batch = SamplingBatch(
        temperature=torch.tensor([temperature]),
        seed=torch.tensor([seed]),
        sample=torch.tensor([number]),
        position=torch.tensor([position]),
    )
    return int(choose(torch.device("cpu")).sample(logits, batch).token)


@pytest.mark.parametrize("options", [{"quantization": "int8", "kv_cache_dtype": "int8"}, {"dtype": "bfloat16"}])
def test_head_changes_no_answer_in_few_bits(path: Path, head: Path, options: dict[str, Any]) -> None:
    found = []
    for draft in ({}, {"speculate": 4, "draft": str(head)}):
        with cpu_engine(path, batch_invariant=True, **options, **draft) as engine:
            if draft:
                draft_often(engine)
            found.append([answer(output) for output in engine.generate(PROMPTS, PARAMS["samples"])])
            assert (engine.stats()["model_accepted_tokens"] > 10) == bool(draft)
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["qwen3-moe", "mistral"])
def test_greedy_tokens_equal_transformers_with_a_head(kind: str, tmp_path: Path) -> None:
    path = make_target(tmp_path / "target", kind)
    head = make_head(tmp_path / "head", path)
    with cpu_engine(path, speculate=4, draft=str(head)) as engine:
        draft_often(engine)
        outputs = engine.generate(PROMPTS, PARAMS["greedy"])
        assert engine.stats()["model_drafted_tokens"] > 0
    for output, (tokens, _) in zip(outputs, reference_greedy(path, PROMPTS, NEW), strict=True):
        assert output.outputs[0].token_ids == tokens


def test_ranks_compute_hidden_states_and_rows_of_one_process(path: Path, tmp_path: Path) -> None:
    """Steps of more tokens than the limit have a sequence-parallel layout, in the model and in the head."""
    heads = [
        make_head(tmp_path / "shared", path, noise=0.1, focus=2.0),
        make_head(tmp_path / "own", path, noise=0.1, focus=2.0, own_embedding=True, norm_before_residual=True),
    ]
    alone = [drafts_after_prompt(path, head) for head in heads]
    for rank, layouts in enumerate(run_ranks(all_coordinates(1, 2), drafts_of_rank, path, heads, (0, 10, 1000))):
        for found, expected in zip(itertools.chain(*layouts), itertools.cycle(alone), strict=False):
            count = found.kv.shape[3]
            assert found.drafted == expected.drafted
            np.testing.assert_allclose(found.hidden, expected.hidden, atol=1e-4)
            np.testing.assert_allclose(found.kv, expected.kv[:, :, :, rank * count : (rank + 1) * count], atol=1e-4)


def test_tensor_parallel_engine_drafts_with_a_head(tmp_path: Path) -> None:
    path = make_target(tmp_path / "target", layers=8)
    head = make_head(tmp_path / "head", path)
    prompts = random_prompts((90, 70, 30, 130), seed=9)
    config = EngineConfig(
        model=str(path), device="cpu", dtype="float32", tp=2, kv_cache_tokens=8192, speculate=4, draft=str(head)
    )
    with Engine(config) as engine:
        outputs = engine.generate(prompts, PARAMS["greedy"])
        found = engine.stats()
    for output, (tokens, _) in zip(outputs, reference_greedy(path, prompts, NEW), strict=True):
        assert output.outputs[0].token_ids == tokens

    assert found["model_accepted_tokens"] > 0.1 * found["model_drafted_tokens"] > 1


def test_weights_may_change_and_memory_sleep_beside_a_head(path: Path, head: Path, tmp_path: Path) -> None:
    other = make_target(tmp_path / "other", seed=1)
    with cpu_engine(other, batch_invariant=True) as engine:
        wanted = [answer(output) for output in engine.generate(PROMPTS, PLAIN)]
    with cpu_engine(path, speculate=4, draft=str(head), batch_invariant=True, enable_sleep_mode=True) as engine:
        draft_often(engine)
        before = [answer(output) for output in engine.generate(PROMPTS, PLAIN)]
        engine.sleep()
        engine.wake_up()
        assert [answer(output) for output in engine.generate(PROMPTS, PLAIN)] == before
        engine.update_weights(str(other))
        assert [answer(output) for output in engine.generate(PROMPTS, PLAIN)] == wanted
        assert engine.stats()["model_drafted_tokens"] > engine.stats()["model_accepted_tokens"] > 0


def test_dummy_weights_of_a_head_need_its_config_only(path: Path, head: Path, tmp_path: Path) -> None:
    for name, source in (("target", path), ("head", head)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text((source / "config.json").read_text())
    dummy: dict[str, Any] = {"load_format": "dummy", "markov_probability": 0.9, "eos_probability": 0.01}
    with cpu_engine(tmp_path / "target", speculate=2, draft=str(tmp_path / "head"), **dummy) as engine:
        draft_often(engine)
        engine.generate(PROMPTS, PLAIN)
        assert engine.stats()["model_drafted_tokens"] > 0


def change_config(head: Path, **changes: object) -> None:
    file = head / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"vocab_size": 600}, "vocab_size is 600; allowed: 512, as the model has"),
        ({"draft_vocab_size": 513}, "draft_vocab_size is 513; allowed: at most vocab_size (512)"),
        ({"target_hidden_size": 32}, "target_hidden_size is 32; allowed: 64, as the model has"),
        ({"hidden_size": 32}, "hidden_size is 32; allowed: 64, as the model has"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; allowed: 1"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True; allowed: false"),
        ({"model_type": "qwen3"}, "model_type is 'qwen3'; allowed: llama (an EAGLE-3 head)"),
        ({"norm_before_fc": True}, "norm_before_fc is True; allowed: false"),
        ({"rope_scaling": {"rope_type": "new"}}, "rope_type is 'new'; allowed: default, linear"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False; allowed: true"),
        ({"eagle_config": {}}, "eagle_aux_hidden_state_layer_ids is None; allowed: layers of the model, which has"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 1, 0]}, "allowed: a rising list of layers of the model, which has 3"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "allowed: a rising list of layers of the model, which has 3"),
        ({"speculators_model_type": "mlp", "transformer_layer_config": {}}, "speculators_model_type is 'mlp'"),
        ({"mystery": 1}, "not known here: mystery"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "its weights are quantised",
        ),
    ],
)
def test_config_of_a_head_is_refused_by_name(
    path: Path, tmp_path: Path, changes: dict[str, object], error: str
) -> None:
    head = make_head(tmp_path / "head", path)
    change_config(head, **changes)
    found = refused(path, head)
    assert found.startswith(f"draft is '{head}'; allowed: a model that tok serves ({head}")
    assert error in found


def without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda weights: weights.pop(name)


def with_tensor(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda weights: weights.__setitem__(name, tensor)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (without("fc.weight"), "missing tensors: model.fc.weight [64, 192]"),
        (without("d2t"), "missing tensors: model.d2t [490]"),
        (without("midlayer.hidden_norm.weight"), "missing tensors: model.layers.0.hidden_norm.weight [64]"),
        (with_tensor("fc.weight", torch.zeros(64, 64)), "tensor fc.weight has shape [64, 64]; expected [64, 192]"),
        (with_tensor("lm_head.weight", torch.zeros(512, 64)), "has shape [512, 64]; expected [490, 64]"),
        (with_tensor("d2t", torch.full((490,), 30)), "allowed: differences that lead to token ids from 0 to 511"),
        (with_tensor("d2t", torch.zeros(490)), "tensor d2t is stored as F32; supported: I64, I32"),
        (with_tensor("mystery", torch.zeros(1)), "tensor mystery [1] has no place in the model"),
    ],
)
def test_tensors_of_a_head_are_refused_by_name(
    path: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], object], error: str
) -> None:
    head = change_weights(make_head(tmp_path / "head", path), change)
    found = refused(path, head)
    assert found.startswith(f"draft model: {head}")
    assert error in found


def test_head_is_no_model_of_its_own(head: Path) -> None:
    with pytest.raises(Exception, match="LlamaForCausalLMEagle3"), cpu_engine(head):
        pass


def test_head_that_does_not_fit_beside_the_model_is_refused(
    path: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())
    monkeypatch.setattr("tok_core.worker.startup.memory.available_memory", lambda: int(weights * 1.2))
    assert refused(path, head).startswith(f"{path} with the draft model {head} does not fit: it needs")
