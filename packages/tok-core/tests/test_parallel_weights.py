"""Each worker loads only its own slices of a checkpoint; dummy weights are slices of the whole model's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.tiny_models import make_model
from tok_core.config import RankCoordinates, all_coordinates
from tok_core.errors import ModelError
from tok_core.model_config import read_config
from tok_core.models import CausalLM, build, fill_dummy_weights, load_checkpoint
from tok_core.models.weights.targets import targets
from tok_core.quantization import StoredTensor
from tok_kernels import choose

CPU = torch.device("cpu")
GRIDS = [(1, 4), (3, 1), (2, 2)]


def share_of(path: Path, coordinates: RankCoordinates = RankCoordinates()) -> CausalLM:
    return build(read_config(path), choose(CPU), CPU, torch.float32, coordinates)


def assert_parts_of(whole: CausalLM, shares: list[CausalLM]) -> None:
    """Check that each shard holds its slices of the whole model's tensors, and that together they cover them."""
    tensors = {name: target.view for name, target in targets(whole).items()}
    seen = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in tensors.items()}
    for share in shares:
        for name, target in targets(share).items():
            assert torch.equal(target.view, target.part_of(tensors[name])), name
            target.part_of(seen[name]).fill_(True)
    assert all(bool(part.all()) for part in seen.values())


@pytest.mark.parametrize(("stages", "ranks"), GRIDS)
@pytest.mark.parametrize("kind", ["qwen2", "llama-untied"])
def test_loaded_shards_are_slices_of_the_whole_checkpoint(kind: str, stages: int, ranks: int, tmp_path: Path) -> None:
    path = make_model(kind, tmp_path, layers=3, biases=True, vocab_size=514, shards=2)
    whole, shares = share_of(path), [share_of(path, coordinates) for coordinates in all_coordinates(stages, ranks)]
    for model in (whole, *shares):
        load_checkpoint(model, path)
    assert_parts_of(whole, shares)


@pytest.mark.parametrize(("stages", "ranks"), GRIDS)
@pytest.mark.parametrize("tied", [True, False])
def test_dummy_weight_shards_are_slices_of_the_whole_model(
    tied: bool, stages: int, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tok_core.models.weights.dummy_weights.MAX_BLOCK_ENTRIES", 1000)  # several blocks a tensor
    path = make_model("llama", tmp_path, layers=3, vocab_size=514, tied=tied)
    whole, shares = share_of(path), [share_of(path, coordinates) for coordinates in all_coordinates(stages, ranks)]
    for model in (whole, *shares):
        fill_dummy_weights(model, 7, eos_probability=0.1)
    assert_parts_of(whole, shares)


class Counted:
    """A file of tensors that counts the bytes read from it."""

    def __init__(self, tensors: safe_open) -> None:
        self.tensors, self.read = tensors, 0

    def keys(self) -> list[str]:
        names: list[str] = self.tensors.keys()  # type: ignore[no-untyped-call]
        return names

    def get_tensor(self, name: str) -> Tensor:
        return self.counted(self.tensors.get_tensor(name))  # type: ignore[no-untyped-call]

    def get_slice(self, name: str) -> CountedSlice:
        return CountedSlice(self, self.tensors.get_slice(name))  # type: ignore[no-untyped-call]

    def counted(self, tensor: Tensor) -> Tensor:
        self.read += tensor.nbytes
        return tensor


class CountedSlice:
    def __init__(self, file: Counted, stored: StoredTensor) -> None:
        self.file, self.stored = file, stored
        self.get_shape, self.get_dtype = stored.get_shape, stored.get_dtype

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        return self.file.counted(self.stored[index])


@pytest.mark.parametrize("kind", ["llama-untied", "qwen3-moe"])
def test_worker_reads_only_the_checkpoint_bytes_of_its_shard(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ep = make_model(kind, tmp_path, layers=4), kind == "qwen3-moe"
    files: list[Counted] = []

    @contextmanager
    def counting(file: Path, framework: str, device: str) -> Iterator[Counted]:
        with safe_open(file, framework=framework, device=device) as tensors:
            files.append(Counted(tensors))
            yield files[-1]

    monkeypatch.setattr("tok_core.models.weights.loading.safe_open", counting)
    read = {}
    for stages, ranks in ((1, 1), (1, 2), (2, 2)):
        for coordinates in all_coordinates(stages, ranks, ep=ep):
            files.clear()
            model = share_of(path, coordinates)
            load_checkpoint(model, path)
            read[coordinates] = sum(file.read for file in files)
            assert read[coordinates] == sum(parameter.nbytes for parameter in model.parameters())
    whole = read[RankCoordinates(ep=ep)]
    assert read[RankCoordinates(0, 1, 0, 2, ep)] < 0.53 * whole
    assert max(read[coordinates] for coordinates in all_coordinates(2, 2, ep=ep)) < 0.3 * whole


def test_pipeline_stage_rejects_tensors_that_no_stage_holds(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path, layers=2)
    tensors = load_file(path / "model.safetensors")
    for name in ("model.layers.2.mlp.up_proj.weight", "model.layers.1.mlp.extra.weight", "model.other"):
        save_file({**tensors, name: torch.zeros(3)}, path / "model.safetensors")
        for coordinates in all_coordinates(2, 1):
            with pytest.raises(ModelError, match=rf"tensor {name} \[3\] has no place in the model"):
                load_checkpoint(share_of(path, coordinates), path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors")
    load_checkpoint(share_of(path, RankCoordinates(0, 2, 0, 1)), path)
    with pytest.raises(ModelError, match=r"missing tensors: model\.layers\.1\.mlp\.up_proj\.weight \[128, 64\]$"):
        load_checkpoint(share_of(path, RankCoordinates(1, 2, 0, 1)), path)
