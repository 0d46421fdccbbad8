"""Checkpoints of every layout load into the fused parameters; errors name the tensor and the file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from support.engines import cpu_engine
from support.tiny_models import KINDS, make_model, reference_greedy
from tok_core import SamplingParams
from tok_core.errors import ModelError
from tok_core.model_config import read_config
from tok_core.models import CausalLM, build, fill_dummy_weights, load_checkpoint
from tok_core.models.weights import loading as weights
from tok_core.models.weights.loading import resolve_tied_embeddings
from tok_core.models.weights.targets import stacked_targets, targets
from tok_kernels import choose

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def built(path: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return build(read_config(path), choose(CPU), CPU, dtype)


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    model = built(path, dtype)
    load_checkpoint(model, path)
    return model


def assert_equal_parameters(a: CausalLM, b: CausalLM) -> None:
    torch.testing.assert_close(dict(a.named_parameters()), dict(b.named_parameters()), rtol=0, atol=0)


def held(name: str, asked: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor in a model of dtype `asked`; bfloat16 models hold Q, K and V weights in float16."""
    fp16 = asked is torch.bfloat16 and re.search(r"\.(q|k|v|qkv)_proj\.", name)
    return torch.float16 if fp16 else asked


def edit(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite the single checkpoint file of `path` after `change` has edited its tensors."""
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_slices_of_a_checkpoint_cover_every_parameter_once(kind: str, tmp_path: Path) -> None:
    model = built(make_model(kind, tmp_path))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for target in targets(model).values():
            target.view.add_(1)
    assert all(bool((parameter == 1).all()) for parameter in model.parameters())
    stacked = stacked_targets(model)
    single = [
        piece
        for name in load_file(tmp_path / WEIGHTS)
        for piece in (stacked[name].pieces if name in stacked else [name])
    ]
    assert sorted(targets(model)) == sorted(single)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen2-moe"])
def test_a_sharded_checkpoint_loads_like_a_single_file(kind: str, tmp_path: Path) -> None:
    one = loaded(make_model(kind, tmp_path / "one"))
    many = make_model(kind, tmp_path / "many", shards=4)
    assert not (many / WEIGHTS).exists()
    assert len(list(many.glob("*.safetensors"))) == 4
    assert_equal_parameters(loaded(many), one)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16, torch.float32])
def test_stored_dtypes_are_cast_to_the_model_dtype(stored: torch.dtype, target: torch.dtype, tmp_path: Path) -> None:
    path = make_model("qwen2", tmp_path, dtype=stored)
    filled = targets(loaded(path, target))
    for name, tensor in load_file(path / WEIGHTS).items():
        assert tensor.dtype is stored
        torch.testing.assert_close(filled[name].view, tensor.to(held(name, target)), rtol=0, atol=0)


def test_a_tied_model_has_no_lm_head_of_its_own(tmp_path: Path) -> None:
    model = loaded(make_model("llama", tmp_path / "tied"))
    assert model.lm_head is None
    untied = loaded(make_model("llama", tmp_path / "untied", tied=False))
    assert untied.lm_head is not None
    assert untied.model.embed_tokens is not None
    assert not torch.equal(untied.lm_head.weight, untied.model.embed_tokens.weight)


def test_redundant_tensors_in_the_checkpoint_are_accepted(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    plain = loaded(path)

    def add_derived(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    edit(path, add_derived)
    assert_equal_parameters(loaded(path), plain)


def without_prefix(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("model.")]:
        tensors[name.removeprefix("model.")] = tensors.pop(name)


@pytest.mark.parametrize("kind", ["llama", "llama-untied"])
def test_tensor_names_may_lack_the_model_prefix(kind: str, tmp_path: Path) -> None:
    path = make_model(kind, tmp_path)
    plain = loaded(path)
    edit(path, without_prefix)
    assert "layers.0.self_attn.q_proj.weight" in load_file(path / WEIGHTS)
    assert_equal_parameters(loaded(path), plain)
    edit(path, lambda tensors: tensors.update({"rotary_emb.inv_freq": torch.zeros(8)}))
    assert_equal_parameters(loaded(path), plain)
    edit(path, lambda tensors: tensors.update({"score.weight": torch.zeros(2, 64)}))
    with pytest.raises(ModelError, match=rf"{WEIGHTS}: tensor score\.weight \[2, 64\] has no place"):
        loaded(path)


@pytest.mark.parametrize("shard_size", ["50KB", "1GB"])
@pytest.mark.parametrize("auto", [AutoModel, AutoModelForCausalLM])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mixtral", "qwen2-moe", "qwen3-moe"])
def test_checkpoints_of_save_pretrained_are_read(
    kind: str, auto: type[AutoModel | AutoModelForCausalLM], shard_size: str, tmp_path: Path
) -> None:
    path = make_model(kind, tmp_path / "one", tied=True)
    model = auto.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    model.save_pretrained(tmp_path / "saved", max_shard_size=shard_size)
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1 or shard_size == "1GB"
    assert_equal_parameters(loaded(tmp_path / "saved"), loaded(path))


def test_saved_untied_base_model_is_missing_its_lm_head(tmp_path: Path) -> None:
    path = make_model("llama-untied", tmp_path / "one")
    AutoModel.from_pretrained(path, local_files_only=True).save_pretrained(tmp_path / "saved")
    with pytest.raises(ModelError, match=r"missing tensors: lm_head\.weight \[512, 64\]$"):
        loaded(tmp_path / "saved")


def test_tensor_stored_with_and_without_prefix_is_named(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    edit(path, lambda tensors: tensors.update({"norm.weight": torch.ones(64)}))
    with pytest.raises(ModelError, match=r"tensor (model\.)?norm\.weight is stored twice"):
        loaded(path)


def add_head(path: Path) -> None:
    """Add to a tied model's checkpoint an LM head that differs from the embedding in its last rows."""

    def add(tensors: dict[str, Tensor]) -> None:
        head = tensors["model.embed_tokens.weight"].clone()
        head[300:] *= -1
        tensors["lm_head.weight"] = head

    edit(path, add)


@pytest.mark.parametrize("prefixed", [True, False])
def test_lm_head_that_differs_from_a_tied_embedding_is_used(
    prefixed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "COMPARED_ROWS", 100)
    path = make_model("llama", tmp_path)
    config = read_config(path)
    assert resolve_tied_embeddings(config, path) is config
    add_head(path)
    if not prefixed:
        edit(path, without_prefix)
    assert resolve_tied_embeddings(config, path) == replace(config, tied=False)
    with pytest.raises(ModelError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        loaded(path)
    ((tokens, _),) = reference_greedy(path, [[1, 2, 3]], 16)
    with cpu_engine(path) as engine:
        (output,) = engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    assert output.outputs[0].token_ids == tokens


def test_tied_model_may_store_its_lm_head_instead_of_the_embedding(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    plain = loaded(path)
    edit(path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    assert_equal_parameters(loaded(path), plain)


def test_a_missing_tensor_is_named_with_its_shape(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    edit(path, lambda tensors: tensors.pop(Q_PROJ))
    with pytest.raises(ModelError, match=rf"{tmp_path}: missing tensors: {Q_PROJ} \[64, 64\]$"):
        loaded(path)


def test_a_missing_lm_head_of_an_untied_model_is_named(tmp_path: Path) -> None:
    path = make_model("llama-untied", tmp_path)
    edit(path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"missing tensors: lm_head\.weight \[512, 64\]$"):
        loaded(path)


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    edit(path, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers" in name])
    with pytest.raises(ModelError, match=r"missing tensors: (model\.\S+ \[[\d, ]+\],? ){8}and 10 more$"):
        loaded(path)


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    edit(path, lambda tensors: tensors.update({"model.layers.9.extra": torch.zeros(3)}))
    with pytest.raises(ModelError, match=rf"{WEIGHTS}: tensor model\.layers\.9\.extra \[3\] has no place"):
        loaded(path)


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    edit(path, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 32)}))
    with pytest.raises(ModelError, match=rf"{WEIGHTS}: tensor {Q_PROJ} has shape \[64, 32\]; expected \[64, 64\]"):
        loaded(path)


def test_tensor_that_could_broadcast_is_rejected_as_misshapen(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    edit(path, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(1)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[1\]; expected \[64\]"):
        loaded(path)


def test_a_tensor_of_integers_is_named(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    edit(path, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 64, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=rf"tensor {Q_PROJ} is stored as I8; supported: F32, F16, BF16"):
        loaded(path)


def test_weight_beyond_the_range_of_the_model_dtype_is_rejected(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    edit(path, lambda tensors: tensors.update({Q_PROJ: torch.full((64, 64), 1e5)}))
    with pytest.raises(ModelError, match=rf"tensor {Q_PROJ} holds numbers beyond 65504, which float16 cannot hold"):
        loaded(path, torch.float16)
    edit(path, lambda tensors: tensors.update({Q_PROJ: torch.full((64, 64), 3.4e38)}))
    with pytest.raises(ModelError, match=rf"tensor {Q_PROJ} holds numbers beyond 33\d+, which bfloat16 cannot hold"):
        loaded(path, torch.bfloat16)
    assert loaded(path).config.num_layers


@pytest.mark.parametrize("keep", [0, 5, 1000, -1])
def test_truncated_safetensors_file_is_named(keep: int, tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    whole = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(whole[:keep])
    with pytest.raises(ModelError, match=rf"{WEIGHTS}: cannot be read as safetensors"):
        loaded(path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path, shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"index\.json: names the file 'model-00002-of-00003\.safetensors'"):
        loaded(path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not an index"),
        ("[" * 100_000, "is not an index"),
        ("{}", "is not an index of safetensors files: KeyError"),
        ('{"weight_map": [1]}', "is not an index"),
        ('{"weight_map": {}}', "names no file in weight_map"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "names the file '../model"),
        ('{"weight_map": {"a": 1}}', "names the file 1"),
    ],
)
def test_a_broken_index_is_named(index: str, message: str, tmp_path: Path) -> None:
    path = make_model("llama", tmp_path / "model", shards=2)
    (path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=rf"index\.json: {message}"):
        loaded(path)


def test_a_directory_without_safetensors_is_named(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    (path / WEIGHTS).rename(path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"has neither .* supported: safetensors only"):
        loaded(path)


def test_checkpoint_with_other_dimensions_than_config_is_rejected(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    with pytest.raises(ModelError, match=r"mlp\.\S+ has shape \[\d+, \d+\]; expected \[(96, 64|64, 96)\]"):
        loaded(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dummy_weights_are_small_everywhere_and_follow_the_seed(dtype: torch.dtype, tmp_path: Path) -> None:
    path = make_model("qwen3", tmp_path)
    first, again, other = built(path, dtype), built(path, dtype), built(path, dtype)
    fill_dummy_weights(first, seed=3)
    fill_dummy_weights(again, seed=3)
    fill_dummy_weights(other, seed=4)
    assert_equal_parameters(first, again)
    for name, parameter in first.named_parameters():
        assert parameter.dtype is held(name, dtype)
        assert 0 < float(parameter.abs().max()) <= 1.001e-3, name
        assert abs(float(parameter.float().mean())) < 5e-4, name
        assert not torch.equal(parameter, dict(other.named_parameters())[name])
