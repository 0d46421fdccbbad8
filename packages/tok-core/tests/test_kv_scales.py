"""Scales of an 8-bit KV cache: those of a checkpoint are honoured on every path, others are calibrated."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor
from transformers import DynamicCache

from support.engines import cpu_engine, random_prompts
from support.parallel_models import model_of
from support.quantized_models import write_kv_scales, write_quantized
from support.sequences import Sequences
from support.short_lengths import unsampled
from support.tiny_models import change_weights, make_model, reference_model
from tok_core import Engine, EngineConfig, InvalidField, ModelError, RequestOutput, SamplingParams
from tok_core.config import RankCoordinates, all_coordinates
from tok_core.models import CausalLM, fill_dummy_weights
from tok_core.quantization import read_quantization
from tok_core.worker.startup.kv_scales import HEADROOM, calibrated_scales
from tok_core.worker.startup.resolve import require_float8_cache

pytestmark = pytest.mark.usefixtures("forked_children")

FP8 = torch.float8_e4m3fn
LAYERS, HEADS, TOKENS = 3, 2, 60
PROMPTS = random_prompts((TOKENS, 17, 48, 90))
SCORED = SamplingParams(max_tokens=0, prompt_logprobs=0)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
THREE = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, n=3)


def scales_of(seed: int = 0) -> Tensor:
    """Return a scale for each layer, keys or values, and head. Most saturate some numbers, so that each one counts."""
    source = torch.Generator().manual_seed(seed)
    return torch.exp(torch.randn((LAYERS, 2, HEADS), generator=source)) * 0.004


class RoundedCache(DynamicCache):  # type: ignore[misc]
    """transformers' cache, whose keys and values are rounded as float8 with scales `[layers, 2, K]`."""

    def __init__(self, scales: Tensor) -> None:
        super().__init__()
        self.scales = scales

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        k_scale, v_scale = self.scales[layer_idx].view(2, 1, -1, 1, 1)
        rounded = (
            (x / scale).clamp(-448, 448).to(FP8).float() * scale
            for x, scale in ((key_states, k_scale), (value_states, v_scale))
        )
        return super().update(*rounded, layer_idx, *args, **kwargs)


def rounded_logits(path: Path, tokens: list[int], scales: Tensor) -> Tensor:
    with torch.inference_mode():
        out = reference_model(path)(torch.tensor([tokens]), past_key_values=RoundedCache(scales), use_cache=True)
        logits: Tensor = out.logits[0]
    return logits


def scaled_model(path: Path, coordinates: RankCoordinates = RankCoordinates()) -> CausalLM:
    return model_of(path, coordinates, quantization=read_quantization(path))


@pytest.mark.parametrize("kind", ["llama3", "qwen2", "qwen3", "mistral"])
def test_logits_equal_transformers_with_equally_rounded_keys_and_values(kind: str, tmp_path: Path) -> None:
    plain = make_model(kind, tmp_path / "plain", layers=LAYERS)
    path = write_kv_scales(make_model(kind, tmp_path / "scaled", layers=LAYERS), scales_of())
    model = scaled_model(path)
    scales = model.kv_scales()
    assert scales is not None
    assert torch.equal(scales, scales_of())
    sequences = Sequences(model, 2, 4, scales=scales)
    tokens = PROMPTS[0]
    found = torch.cat(
        [
            sequences.feed([(0, tokens[:37])]),
            *(sequences.feed([(0, [token]), (1, PROMPTS[1][:9])], [0]) for token in tokens[37:40]),
            sequences.feed([(0, tokens[40:])]),
        ]
    )
    expected = rounded_logits(plain, tokens, scales)
    wrong = rounded_logits(plain, tokens, scales.flip(2))
    error, other = ((found - one).norm() / one.norm() for one in (expected, wrong))
    # Float32 sums in another order may round a few keys or values to the next number of float8.
    assert error < 0.02
    assert other > 0.2


def logprobs(outputs: list[RequestOutput]) -> list[float]:
    return [one.logprob for output in outputs for one in output.prompt_logprobs or [] if one is not None]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose checkpoint has a scale for each head."""
    return write_kv_scales(make_model("llama", tmp_path_factory.mktemp("kv") / "llama", layers=LAYERS), scales_of())


@pytest.fixture(scope="module")
def scored(stored: Path) -> list[float]:
    with cpu_engine(stored) as engine:
        return logprobs(engine.generate(PROMPTS, SCORED))


def messages(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [
        (one.levelno, one.getMessage().partition(": log")[0]) for one in caplog.records if "KV cache" in one.message
    ]


@pytest.mark.parametrize(
    ("dtype", "level", "message"),
    [
        ("auto", logging.INFO, "the KV cache holds float8_e4m3fn with the checkpoint's scales"),
        ("fp8", logging.INFO, "the KV cache holds float8_e4m3fn with the checkpoint's scales"),
        ("fp8_unscaled", logging.WARNING, "the KV cache holds float8_e4m3fn without scales"),
        ("unquantized", 0, ""),
    ],
)
def test_stored_scales_are_used_unless_kv_cache_dtype_rules_them_out(
    dtype: str, level: int, message: str, stored: Path, scored: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tok_core"), cpu_engine(stored, kv_cache_dtype=dtype) as engine:
        found = logprobs(engine.generate(PROMPTS, SCORED))
    assert messages(caplog) == ([(level, message)] if message else [])
    difference = np.abs(np.subtract(found, scored)).mean()
    assert difference == 0 if "checkpoint" in message else difference > 0.1


@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}], ids=str)
def test_ranks_and_stages_apply_their_own_scales(options: dict[str, int], stored: Path, scored: list[float]) -> None:
    config = EngineConfig(model=str(stored), kv_cache_tokens=4096, max_running=8, device="cpu", **options)  # type: ignore[arg-type]
    with Engine(config) as engine:
        found = logprobs(engine.generate(PROMPTS, SCORED))
    assert np.abs(np.subtract(found, scored)).mean() < 0.01


def test_each_worker_holds_the_scales_of_its_layers_and_heads(stored: Path) -> None:
    parts = [scaled_model(stored, one).kv_scales() for one in all_coordinates(3, 2)]
    expected = [scales_of()[layer : layer + 1, :, head : head + 1] for layer in range(LAYERS) for head in range(HEADS)]
    for part, own in zip(parts, expected, strict=True):
        assert part is not None
        assert torch.equal(part, own)
    whole = [scaled_model(stored, one).kv_scales() for one in all_coordinates(1, 4)]  # heads are on two ranks each
    assert [one[0, 0, 0].item() for one in whole if one is not None] == scales_of()[0, 0].repeat_interleave(2).tolist()


@pytest.mark.parametrize(
    "names",
    [("k_scale", "v_scale"), ("k_proj.output_scale", "v_proj.output_scale"), ("k_proj.k_scale", "v_proj.v_scale")],
)
@pytest.mark.parametrize("scheme", ["fp8-per-matrix", "fp8-dynamic"])
def test_a_scale_for_each_layer_is_read_by_any_of_its_names(
    scheme: str, names: tuple[str, str], tmp_path: Path
) -> None:
    path, _ = write_quantized("llama", tmp_path, scheme)
    scales = scales_of()[:, :, 0]
    write_kv_scales(path, scales, names)
    if scheme == "fp8-per-matrix":
        config = (path / "config.json").read_text()
        start = config.index('"kv_cache_scheme": ')
        end = config.index("}", start) + 1
        (path / "config.json").write_text(f'{config[:start]}"kv_cache_scheme": "static"{config[end:]}')
    change_weights(path, lambda weights: weights.update({"model.layers.1.self_attn.q_scale": torch.ones(1)}))
    found = scaled_model(path).kv_scales()
    assert found is not None
    assert torch.equal(found, scales.unsqueeze(-1).expand(-1, -1, HEADS))
    assert "dense" not in str(read_quantization(path)).partition(";")[0]


K_SCALE = "model.layers.1.self_attn.k_scale"


def put(value: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda weights: weights.update({K_SCALE: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop(K_SCALE), rf"missing tensors: {K_SCALE} \[2, 1, 1\]$"),
        (put(torch.ones(3, 1, 1)), rf"tensor {K_SCALE} has shape \[3, 1, 1\]; expected \[2, 1, 1\]$"),
        (put(torch.ones(1)), rf"tensor {K_SCALE} has shape \[1\]; expected \[2, 1, 1\]$"),
        (put(torch.ones(2, 1, 1).int()), rf"tensor {K_SCALE} is stored as I32; supported: F32, F16, BF16$"),
        (
            put(torch.tensor([[[0.1]], [[0.0]]])),
            rf"tensor {K_SCALE} has numbers from 0 to 0.1; allowed: numbers from 1e-30 to 1e30$",
        ),
        (
            put(torch.tensor([[[-2.0]], [[1.0]]])),
            rf"tensor {K_SCALE} has numbers from -2 to 1; allowed: numbers from 1e-30 to 1e30$",
        ),
        (
            put(torch.tensor([[[0.1]], [[torch.nan]]])),
            rf"tensor {K_SCALE} has NaN; allowed: numbers from 1e-30 to 1e30$",
        ),
        (
            put(torch.tensor([[[0.1]], [[torch.inf]]])),
            rf"tensor {K_SCALE} has numbers from 0.1 to inf; allowed: numbers from 1e-30 to 1e30$",
        ),
    ],
)
def test_a_bad_scale_is_refused_in_one_line_that_names_it(
    change: Callable[[dict[str, Tensor]], object], message: str, tmp_path: Path
) -> None:
    path = write_kv_scales(make_model("llama", tmp_path / "llama", layers=LAYERS), scales_of())
    with pytest.raises(ModelError, match=message) as error, cpu_engine(change_weights(path, change)):
        pass
    assert "\n" not in str(error.value)


def test_scales_without_a_kv_cache_scheme_are_refused(tmp_path: Path) -> None:
    path = write_kv_scales(make_model("llama", tmp_path / "llama", layers=LAYERS), scales_of())
    with pytest.raises(ModelError, match=r"tensor model\.layers\.0\.self_attn\.k_scale .* has no place in the model"):
        model_of(path)


def test_dummy_weights_have_scales_of_one(stored: Path) -> None:
    model = scaled_model(stored)
    fill_dummy_weights(model)
    scales = model.kv_scales()
    assert scales is not None
    assert bool((scales == 1).all())


def test_a_gpu_without_float8_refuses_an_8_bit_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    with pytest.raises(
        InvalidField, match="kv_cache_dtype is 'auto'; allowed: int8, unquantized on cuda, which cannot"
    ):
        require_float8_cache("auto", torch.device("cuda"))
    require_float8_cache("fp8", torch.device("cpu"))


def test_calibration_scales_each_head_by_its_largest_number() -> None:
    kv = torch.randn((LAYERS, 2, 5, 4, HEADS, 8), generator=torch.Generator().manual_seed(0))
    kv[0, 1, 3, 2, 1, 7] = -600.0
    kv[1, 0, :, :, 0] = 0.0
    kv[2, 1, 4, 0, 1, 0] = torch.nan
    kv[2, 0, 4, 0, 1, 0] = torch.inf
    scales = calibrated_scales(kv)
    assert scales.shape == (LAYERS, 2, HEADS)
    assert scales[0, 1, 1] == 8  # the least power of two above 600 · 4 / 448
    assert scales[1, 0, 0] == scales[2, 1, 1] == scales[2, 0, 1] == 1
    largest = float(kv[0, 0, :, :, 0].abs().max() * HEADROOM / scales[0, 0, 0])
    assert 224 <= largest <= 448


def outgrow(weights: dict[str, Tensor]) -> None:
    """Multiply keys by 400 and values by 2000; queries and output projections make up for it."""
    for name, weight in weights.items():
        for end, factor in (("k_norm", 400.0), ("q_norm", 1 / 400.0), ("v_proj", 2000.0), ("o_proj", 1 / 2000.0)):
            if name.endswith(f"{end}.weight"):
                weight *= factor


def test_scales_keep_keys_and_values_beyond_the_range_of_float8(tmp_path: Path) -> None:
    path = change_weights(make_model("qwen3", tmp_path / "qwen3", layers=LAYERS), outgrow)
    found = []
    for dtype in ("unquantized", "fp8", "fp8_unscaled"):
        with cpu_engine(path, kv_cache_dtype=dtype) as engine:
            found.append(logprobs(engine.generate(PROMPTS, SCORED)))
    scaled, unscaled = (np.abs(np.subtract(one, found[0])).mean() for one in found[1:])
    assert 0 < scaled < 0.3
    assert unscaled > 5 * scaled


def test_weights_that_replace_dummy_weights_have_scales_that_fit(tmp_path: Path) -> None:
    path = make_model("qwen2", tmp_path / "qwen2", layers=LAYERS)
    found = []
    for options in ({}, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8", "load_format": "dummy"}):
        with cpu_engine(path, **options) as engine:
            engine.update_weights(str(path))
            found.append(logprobs(engine.generate(PROMPTS, SCORED)))
    loaded, replaced = (np.abs(np.subtract(one, found[0])).mean() for one in found[1:])
    assert replaced < 1.2 * loaded


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_preempted_forked_and_cached_sequences_keep_their_tokens(dtype: str, tmp_path: Path) -> None:
    path = make_model("qwen2", tmp_path / "qwen2", layers=LAYERS)
    found, preempted = list[list[list[int]]](), list[float]()
    small = {"kv_cache_tokens": 128, "max_model_len": 128, "page_size": 4, "max_step_tokens": 11, "max_running": 9}
    for options in ({}, small, {"max_step_tokens": 7, "max_running": 7}):
        # With a stop id, which no sample reaches, the scheduler cannot know the lengths.
        stops = (unsampled(found[0]),) if found else ()
        with cpu_engine(path, kv_cache_dtype=dtype, **options) as engine:
            outputs = engine.generate(PROMPTS, GREEDY)
            again = engine.generate([*PROMPTS, *PROMPTS], structs.replace(THREE, stop_token_ids=stops))
            preempted.append(engine.stats()["preemptions"])
        tokens = [sample.token_ids for output in outputs for sample in output.outputs]
        assert [sample.token_ids for output in again for sample in output.outputs] == [
            one for one in [*tokens, *tokens] for _ in range(3)
        ]
        found.append(tokens)
    assert found[0] == found[1] == found[2]
    assert preempted[1] > 0
