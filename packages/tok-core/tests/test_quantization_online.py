"""`EngineConfig.quantization` quantises a dense checkpoint while loading it, to the same weights as `tok quantize`.

Peaks of memory are those that torch's profiler records; tensors of a mapped file do not count.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from support.engines import cpu_engine
from support.parallel_models import CPU, model_of, tokens_of
from support.quantized_models import write_quantized
from support.tiny_models import change_weights, make_model
from tok_core import InvalidField, ModelError, SamplingParams
from tok_core.config import Quantization, RankCoordinates, all_coordinates
from tok_core.model_config import read_config
from tok_core.models import CausalLM, Linear, build, fill_dummy_weights
from tok_core.models.weights import quantize_checkpoint
from tok_core.quantization import LinearMethod, QuantizationConfig, ScaledMethod, read_quantization, weight_target
from tok_core.quantization.checkpoint_format import ONLINE, READERS
from tok_core.worker.startup.resolve import warn_without_float8
from tok_kernels import choose

SHARDS = [RankCoordinates(), *all_coordinates(2, 1), *all_coordinates(1, 2)]


def rounded(path: Path) -> Path:
    """Write the model as `tok quantize` does, beside it."""
    out = path.parent / f"{path.name}-fp8"
    assert list(quantize_checkpoint(path, out, "fp8-dynamic"))
    return out


def assert_same_parameters(found: CausalLM, expected: CausalLM) -> None:
    parameters = dict(found.named_parameters())
    assert parameters.keys() == dict(expected.named_parameters()).keys()
    for name, one in expected.named_parameters():
        assert parameters[name].dtype == one.dtype, name
        assert torch.equal(parameters[name].view(torch.uint8), one.view(torch.uint8)), name


@pytest.mark.parametrize("rows", [1 << 24, 5 * 64])
@pytest.mark.parametrize(
    ("kind", "stored", "dtype"),
    [
        ("llama", torch.float32, torch.float32),
        ("llama-untied", torch.bfloat16, torch.bfloat16),
        ("qwen2", torch.float16, torch.float32),
        ("qwen3", torch.bfloat16, torch.float16),
    ],
)
def test_every_shard_holds_the_bits_that_quantize_would_have_written(
    kind: str, stored: torch.dtype, dtype: torch.dtype, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_target, "MAX_QUANTIZED_WEIGHTS", rows)
    path = make_model(kind, tmp_path / kind, dtype=stored, layers=3, shards=2, biases=kind != "qwen2")
    out = rounded(path)
    for coordinates in SHARDS:
        found = model_of(path, coordinates, dtype=dtype, quantization=read_quantization(path, "fp8"))
        assert_same_parameters(found, model_of(out, coordinates, dtype=dtype, quantization=read_quantization(out)))


def test_projection_beyond_the_float16_range_is_rounded_again(tmp_path: Path) -> None:
    def enlarge(weights: dict[str, Tensor]) -> None:
        weights["model.layers.1.self_attn.q_proj.weight"] *= 1e5

    path = change_weights(make_model("llama", tmp_path / "llama", layers=3), enlarge)
    out = rounded(path)
    found = model_of(path, dtype=torch.bfloat16, quantization=read_quantization(path, "fp8"))
    expected = model_of(out, dtype=torch.bfloat16, quantization=read_quantization(out))
    assert_same_parameters(found, expected)
    projections = [module for name, module in found.named_modules() if name.endswith("qkv_proj")]
    assert [one.dtype for one in projections] == [torch.float16, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("name", ONLINE)
@pytest.mark.parametrize("kind", ["qwen2", "qwen2-moe"])
def test_bfloat16_models_with_biases_answer_as_in_float32(kind: str, name: Quantization, tmp_path: Path) -> None:
    path, params = make_model(kind, tmp_path / kind), SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=0)
    found = []
    for dtype in ("bfloat16", "float32"):
        with cpu_engine(path, dtype=dtype, quantization=name) as engine:
            logprobs = engine.generate([tokens_of(60)], params)[0].prompt_logprobs or []
            found.append([one.logprob for one in logprobs if one is not None])
    assert np.abs(np.subtract(found[0], found[1])).mean() < 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("method", [*ONLINE.values(), ScaledMethod(torch.float8_e4m3fn, block=(128, 128))], ids=str)
def test_gpu_rounds_to_the_bits_of_a_cpu(method: LinearMethod) -> None:
    weight = torch.randn(1000, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    on_gpu = method.quantize(weight.cuda())
    for end, expected in method.quantize(weight).items():
        found = on_gpu[end].cpu()
        assert torch.equal(*(one.contiguous().view(torch.uint8) for one in (found, expected))), end


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_matrix_that_cannot_be_rounded_is_named(value: float, tmp_path: Path) -> None:
    def corrupt(weights: dict[str, Tensor]) -> None:
        weights["model.layers.1.mlp.up_proj.weight"][3, 5] = value

    path = change_weights(make_model("llama", tmp_path / "llama"), corrupt)
    message = "tensor model.layers.1.mlp.up_proj.weight has NaN or infinities, which cannot be rounded; allowed: finite"
    with pytest.raises(ModelError, match=message):
        model_of(path, quantization=read_quantization(path, "fp8"))


@pytest.mark.parametrize("name", ONLINE)
def test_dummy_weights_of_every_shard_are_slices_of_the_rounded_ones(name: Quantization, tmp_path: Path) -> None:
    path = make_model("llama-untied", tmp_path / "llama", layers=3)
    quantization = read_quantization(path, name)

    def layers(coordinates: RankCoordinates, config: QuantizationConfig = quantization) -> dict[str, Linear]:
        model = build(read_config(path), choose(CPU), CPU, torch.float32, coordinates, quantization=config)
        fill_dummy_weights(model, 5)
        return {name: module for name, module in model.named_modules() if isinstance(module, Linear)}

    whole, dense = layers(RankCoordinates()), layers(RankCoordinates(), QuantizationConfig())
    for part, linear in whole.items():
        if part != "lm_head":
            tensors = linear.method.quantize(dense[part].weight)
            assert all(torch.equal(linear.get_parameter(end), tensor) for end, tensor in tensors.items())
    for coordinates in SHARDS[1:]:
        for part, linear in layers(coordinates).items():
            stored = dict(whole[part].method.targets(whole[part]))
            for end, target in linear.method.targets(linear):
                assert torch.equal(target.view, target.part_of(stored[end].view)), (part, end)


def test_loading_never_holds_more_than_the_rounded_model_and_a_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_target, "MAX_QUANTIZED_WEIGHTS", 16 * 64)  # weights, an eighth of the largest matrix
    path = make_model("llama-untied", tmp_path / "llama", layers=24)
    matrix, trace = 64 * 128 * 4, tmp_path / "trace.json"
    sizes = []
    for quantization in (read_quantization(path, "fp8"), QuantizationConfig()):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
            model = model_of(path, quantization=quantization)
        profiled.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
        totals = [event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]"]
        steps = [event["args"]["Bytes"] for event in events if event["name"] == "[memory]"]
        held = sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
        sizes.append(held)
        before = totals[0] - steps[0]
        assert held <= max(totals) - before <= 1.1 * held + matrix
        del model
    assert 1.1 * sizes[0] + matrix < sizes[1] / 2  # hence a second copy would have been noticed


@pytest.mark.parametrize(
    ("name", "capability", "lines"), [("fp8", (8, 0), 1), ("fp8", (8, 9), 0), ("int8", (8, 0), 0), ("auto", (7, 5), 0)]
)
def test_gpu_without_float8_is_reported_in_one_line(
    name: Quantization,
    capability: tuple[int, int],
    lines: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    path = make_model("llama", tmp_path / "llama")
    warn_without_float8(read_quantization(path, name), torch.device("cuda", 0))
    warn_without_float8(read_quantization(path, name), CPU)
    line = (
        "cuda:0 has compute capability 8.0, and float8 arithmetic needs 8.9: float8 weights save memory here, and are "
        "dequantised before each GEMM"
    )
    assert [record.getMessage() for record in caplog.records] == [line] * lines


def test_checkpoints_own_format_may_be_named_and_no_other(tmp_path: Path) -> None:
    assert set(get_args(Quantization)) == {"auto", *READERS, *ONLINE}
    path, dense = write_quantized("llama", tmp_path, "awq")
    assert read_quantization(path, "awq") == read_quantization(path)
    with pytest.raises(InvalidField) as refused:
        read_quantization(path, "fp8")
    assert str(refused.value) == "quantization is 'fp8'; allowed: auto, awq, since the checkpoint is quantised so"
    with pytest.raises(InvalidField) as refused:
        read_quantization(dense, "awq")
    assert str(refused.value) == (
        "quantization is 'awq'; allowed: auto, fp8, int8, since the checkpoint is not quantised"
    )
    fp8, _ = write_quantized("llama", tmp_path, "fine-grained-fp8")
    assert read_quantization(fp8, "fp8") == read_quantization(fp8)
    assert str(read_quantization(dense, "fp8")) == (
        "float8 with a scale for each row, rounded while loading; dense: lm_head"
    )
