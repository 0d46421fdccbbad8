"""`update_weights` loads other weights into the running model, in every worker or none; nothing old is read again."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.engines import async_engine, cpu_engine, manager_of, random_prompts
from support.patience import until, wait_until
from support.paused_engine import held
from support.quantized_models import write_quantized
from support.tiny_models import change_weights, make_model, reference_greedy
from tok_core import Engine, EngineConfig, EngineDead, InvalidField, ModelError, SamplingParams
from tok_core.models import weights as model_weights

pytestmark = pytest.mark.usefixtures("forked_children")

PROMPTS = random_prompts((5, 33, 64, 65, 100))
NEW = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen2", tmp_path_factory.mktemp("old") / "model", layers=4)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen2", tmp_path_factory.mktemp("new") / "model", layers=4, seed=1, shards=2)


def tokens(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in engine.generate(prompts, GREEDY)]


def expected(path: Path, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [ids for ids, _ in reference_greedy(path, prompts, NEW)]


def test_updated_engine_gives_transformers_tokens_with_the_new_weights(old: Path, new: Path) -> None:
    with cpu_engine(old) as engine:
        parameters = [one.data_ptr() for one in runner_of(engine).model.parameters()]
        assert tokens(engine) == expected(old)
        assert engine.weight_version == "default"
        assert engine.update_weights(str(new)) == "1"
        outputs = engine.generate(PROMPTS, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == expected(new)
        assert [output.cached_tokens for output in outputs] == [0] * len(PROMPTS)
        assert {output.weight_version for output in outputs} == {"1"}
        assert not engine.is_paused
        assert engine.update_weights(str(old), version="step-7") == "step-7" == engine.weight_version
        assert tokens(engine) == expected(old)
        assert engine.update_weights(str(new)) == "3"
        again = engine.generate(PROMPTS, GREEDY)
        assert [output.outputs[0].token_ids for output in again] == expected(new)
        assert [output.cached_tokens for output in again] == [0] * len(PROMPTS)  # nor what the first update cached
        assert [one.data_ptr() for one in runner_of(engine).model.parameters()] == parameters


@pytest.mark.parametrize("length", [12, 40])
@pytest.mark.parametrize("running", [4, 1], ids=["forked", "started late"])
async def test_samples_share_no_prompt_that_was_begun_with_the_old_weights(
    old: Path, new: Path, running: int, length: int
) -> None:
    (prompt,) = random_prompts((length,))
    async with async_engine(old, max_running=running, max_step_tokens=4) as engine:
        with held(engine, steps=1):
            stream = engine.generate(prompt, replace(GREEDY, n=3))
            await until(lambda: manager_of(engine).scheduler.steps == 2)  # 8 tokens of the prompt
            await engine.update_weights(str(new))
        first, *others = [sample.token_ids for sample in (await stream.output()).outputs]
        assert others == expected(new, [prompt]) * 2 != [first] * 2
        longer = prompt + others[0]
        output = await engine.generate(longer, GREEDY).output()
        assert output.cached_tokens > 0
        assert [output.outputs[0].token_ids] == expected(new, [longer])


@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"pp": 2}, {"dp": 2}], ids=["one worker", "tp 2", "pp 2", "dp 2"])
def test_all_workers_of_all_replicas_load_the_new_weights_or_none(
    old: Path, new: Path, tmp_path: Path, options: dict[str, int]
) -> None:
    broken = copy_without(new, tmp_path / "broken", DOWN)
    settings: dict[str, Any] = {
        "kv_cache_tokens": 4096,
        "max_running": 48,
        "dtype": "float32",
        "device": "cpu",
        **options,
    }
    with Engine(EngineConfig(model=str(old), **settings)) as engine:
        assert tokens(engine) == expected(old)
        with pytest.raises(ModelError, match=DOWN):
            engine.update_weights(str(broken))
        assert tokens(engine) == expected(old)
        engine.update_weights(str(new))
        assert tokens(engine) == expected(new)
        assert engine.stats()["restarts"] == 0


def runner_of(engine: Engine) -> Any:
    return manager_of(engine).ports._runner  # type: ignore[attr-defined]


def copy_without(path: Path, out: Path, *names: str) -> Path:
    """Write the weights of a model to the new directory `out` as one file, without some tensors."""
    out.mkdir()
    weights: dict[str, Tensor] = {}
    for file in path.glob("*.safetensors"):
        weights |= load_file(file)
    save_file({name: one for name, one in weights.items() if name not in names}, out / "model.safetensors")
    return out


def reshape(weights: dict[str, Tensor]) -> None:
    weights[DOWN] = weights[DOWN][:, :64].contiguous()


def add(weights: dict[str, Tensor]) -> None:
    weights["model.layers.9.mlp.down_proj.weight"] = weights[DOWN].clone()


def cast(weights: dict[str, Tensor]) -> None:
    weights[DOWN] = weights[DOWN].to(torch.float64)


def truncate(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def changed(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], object]:
    return lambda directory: change_weights(directory, change)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (changed(lambda weights: weights.pop(DOWN)), rf"missing tensors: {DOWN} \[64, 128\]"),
        (changed(reshape), rf"{DOWN} has shape \[64, 64\]; expected \[64, 128\]"),
        (changed(add), "layers.9.mlp.down_proj.weight .* has no place"),
        (changed(cast), rf"{DOWN} is stored as F64"),
        (truncate, "cannot be read as safetensors"),
        (lambda directory: (directory / "model.safetensors").unlink(), "has neither model.safetensors nor"),
    ],
    ids=["missing", "shape", "unexpected", "dtype", "truncated", "no file"],
)
def test_failed_update_names_the_fault_and_leaves_the_old_weights(
    old: Path, new: Path, tmp_path: Path, break_it: Callable[[Path], object], message: str
) -> None:
    broken = copy_without(new, tmp_path / "broken")
    break_it(broken)
    with cpu_engine(old) as engine:
        assert tokens(engine) == expected(old)
        with pytest.raises(ModelError, match=message):
            engine.update_weights(str(broken), version="never")
        outputs = engine.generate(PROMPTS, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == expected(old)
        assert min(output.cached_tokens for output in outputs[1:]) > 0  # nothing has changed
        assert engine.weight_version == "default"
        assert not engine.is_paused


@pytest.mark.parametrize("wrong", [5, None, "", Path("new")])
def test_directory_or_version_that_is_no_text_is_refused_by_name(old: Path, wrong: Any) -> None:
    with cpu_engine(old) as engine:
        with pytest.raises(InvalidField, match=r"directory is .*; allowed: the path of a directory, as text"):
            engine.update_weights(wrong)
        with pytest.raises(InvalidField, match="version is 7; allowed: text"):
            engine.update_weights(str(old), version=7)  # type: ignore[arg-type]
        assert tokens(engine) == expected(old)
        assert engine.weight_version == "default"


def spoil(weights: dict[str, Tensor]) -> None:
    weights[DOWN][3, 5] = float("nan")


def test_dense_weights_are_quantised_again_or_refused_if_not_finite(old: Path, new: Path, tmp_path: Path) -> None:
    broken = change_weights(copy_without(new, tmp_path / "broken"), spoil)
    with cpu_engine(new, quantization="fp8") as engine:
        rounded = tokens(engine)
    with cpu_engine(old, quantization="fp8") as engine:
        before = tokens(engine)
        with pytest.raises(ModelError, match=f"{DOWN} has NaN or infinities, which cannot be rounded"):
            engine.update_weights(str(broken))
        assert tokens(engine) == before != rounded
        engine.update_weights(str(new))
        assert tokens(engine) == rounded


def scale_up(weights: dict[str, Tensor]) -> None:
    for name in weights:
        if "scale" in name:
            weights[name] = weights[name] * 2


@pytest.mark.parametrize("scheme", ["fp8-block", "int4-zero-points", "awq", "gptq-desc-act"])
def test_update_repacks_weights_as_the_start_does(scheme: str, tmp_path: Path) -> None:
    first, dequantised = write_quantized("llama", tmp_path / "first", scheme)
    second = tmp_path / "second"
    shutil.copytree(first, second)
    change_weights(second, scale_up)
    with cpu_engine(second) as engine:
        doubled = tokens(engine)
    with cpu_engine(first) as engine:
        assert tokens(engine) == expected(dequantised) != doubled
        engine.update_weights(str(second))
        assert tokens(engine) == doubled


@pytest.mark.parametrize(("first", "second"), [("gptq", "gptq-v2"), ("gptq-v2", "gptq")])
def test_zero_points_of_the_other_version_of_gptq_are_refused(first: str, second: str, tmp_path: Path) -> None:
    own, other = (write_quantized("llama", tmp_path, scheme)[0] for scheme in (first, second))
    message = f"checkpoint_format is '{second.replace('-', '_')}'; allowed: {first.replace('-', '_')}, the running"
    with cpu_engine(own) as engine:
        before = tokens(engine)
        with pytest.raises(ModelError, match=message):
            engine.update_weights(str(other))
        assert tokens(engine) == before


def test_quantised_checkpoint_takes_weights_of_its_own_format(old: Path, new: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for path, out in ((old, first), (new, second)):
        assert list(model_weights.quantize_checkpoint(path, out, "fp8-dynamic"))
    with cpu_engine(second) as engine:
        rounded = tokens(engine)
    with cpu_engine(first) as engine:
        before = tokens(engine)
        with pytest.raises(ModelError, match=r"weight is stored as F32; supported: F8_E4M3"):
            engine.update_weights(str(new))
        assert tokens(engine) == before
        engine.update_weights(str(second))
        assert tokens(engine) == rounded


def test_values_beyond_the_models_dtype_are_refused_before_writing(old: Path, new: Path, tmp_path: Path) -> None:
    def enlarge(weights: dict[str, Tensor]) -> None:
        weights[DOWN][0, 0] = 1e6

    broken = change_weights(copy_without(new, tmp_path / "broken"), enlarge)
    with cpu_engine(old, dtype="float16") as engine:
        before = tokens(engine)
        with pytest.raises(ModelError, match=f"{DOWN} holds numbers beyond 65504"):
            engine.update_weights(str(broken))
        assert tokens(engine) == before


def test_projection_that_leaves_the_float16_range_is_recast_once(old: Path, new: Path, tmp_path: Path) -> None:
    def enlarge(weights: dict[str, Tensor]) -> None:
        weights["model.layers.1.self_attn.q_proj.weight"] *= 1e5

    large = change_weights(copy_without(new, tmp_path / "large"), enlarge)
    (large / "config.json").write_text((new / "config.json").read_text())
    with cpu_engine(large, dtype="bfloat16") as engine:
        fresh = parameters_of(engine)
    with cpu_engine(old, dtype="bfloat16") as engine:
        engine.update_weights(str(large))
        layers = runner_of(engine).model.model.layers.values()
        dtypes = [layer.self_attn.qkv_proj.dtype for layer in layers]
        assert dtypes == [torch.float16, torch.bfloat16, torch.float16, torch.float16]
        assert_same(parameters_of(engine), fresh)
        before = [one.data_ptr() for one in runner_of(engine).model.parameters()]
        engine.update_weights(str(large))
        assert [one.data_ptr() for one in runner_of(engine).model.parameters()] == before
        assert_same(parameters_of(engine), fresh)


def parameters_of(engine: Engine) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in runner_of(engine).model.named_parameters()}


def assert_same(found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert found.keys() == right.keys()
    for name, one in right.items():
        assert torch.equal(found[name], one), name


def test_running_samples_continue_with_new_weights_and_record_the_token(old: Path, new: Path) -> None:
    prompt = PROMPTS[1]
    with cpu_engine(old) as engine:
        found = []
        thread = threading.Thread(target=lambda: found.extend(engine.generate([prompt], LONG)))
        thread.start()
        wait_until(lambda: engine.stats()["output_tokens"] > 20)
        engine.update_weights(str(new), version="a")
        middle = engine.stats()["output_tokens"]
        wait_until(lambda: engine.stats()["output_tokens"] > middle + 20)
        engine.update_weights(str(old), version="b")
        thread.join()
        (sample,) = found[0].outputs
        assert found[0].weight_version == sample.weight_version == "b"
        versions, starts = zip(*(sample.weight_spans or []), strict=True)
        assert versions == ("default", "a", "b")
        assert 0 == starts[0] < 20 < starts[1] < starts[2] - 20 < 380
        plain, _ = reference_greedy(old, [prompt], 400)[0]
        assert sample.token_ids[: starts[1]] == plain[: starts[1]]
        assert sample.token_ids[starts[1] :] != plain[starts[1] :]
        # What the sample has cached holds keys of several versions, and nothing reads it again.
        after = engine.generate([prompt + sample.token_ids[:100]], GREEDY)[0]
        assert after.cached_tokens == 0
        assert after.outputs[0].weight_spans is None
        assert after.outputs[0].token_ids == expected(old, [prompt + sample.token_ids[:100]])[0]


def test_sample_aborted_after_an_update_has_the_version_of_its_tokens(old: Path, new: Path) -> None:
    with cpu_engine(old) as engine:
        found = []
        thread = threading.Thread(target=lambda: found.extend(engine.generate(PROMPTS[1:2], LONG)))
        thread.start()
        wait_until(lambda: engine.stats()["output_tokens"] > 20)
        engine.pause("keep")
        engine.update_weights(str(new))
        engine.pause("abort")
        thread.join()
        (sample,) = found[0].outputs
        assert sample.finish_reason == "abort"
        assert (sample.weight_version, sample.weight_spans) == ("default", None)
        assert sample.token_ids == reference_greedy(old, PROMPTS[1:2], len(sample.token_ids))[0][0]


def test_samples_that_start_after_an_update_compute_their_prompt_anew(old: Path, new: Path) -> None:
    prompts, params = PROMPTS[1:3], SamplingParams(n=8, temperature=0, max_tokens=100, ignore_eos=True)
    with cpu_engine(old, max_running=2) as engine:
        found = []
        thread = threading.Thread(target=lambda: found.extend(engine.generate(prompts, params)))
        thread.start()
        wait_until(lambda: engine.stats()["output_tokens"] > 20)
        engine.update_weights(str(new))
        thread.join()
        for prompt, output in zip(prompts, found, strict=True):
            right = reference_greedy(new, [prompt], 100)[0][0]
            whole = [one for one in output.outputs if one.weight_spans is None and one.weight_version == "1"]
            assert len(whole) >= 6
            assert all(one.token_ids == right for one in whole)


def test_retracted_samples_compute_their_cache_again_with_the_new_weights(old: Path, new: Path) -> None:
    prompts, params = PROMPTS[1:4], SamplingParams(n=2, temperature=0, max_tokens=300, ignore_eos=True)
    with cpu_engine(old, max_running=5) as engine:
        found = []
        thread = threading.Thread(target=lambda: found.extend(engine.generate(prompts, params)))
        thread.start()
        wait_until(lambda: engine.stats()["output_tokens"] > 40)
        engine.pause("retract")
        wait_until(lambda: engine.stats()["pages_used"] == 0)
        assert engine.stats()["sequences_running"] == 0
        engine.update_weights(str(new), version="a")
        engine.resume()
        thread.join()
        for prompt, output in zip(prompts, found, strict=True):
            for sample in output.outputs:
                change = dict(sample.weight_spans or [("a", 0)])["a"]
                before = prompt + sample.token_ids[:change]
                assert sample.token_ids[:change] == reference_greedy(old, [prompt], 300)[0][0][:change]
                assert sample.token_ids[change:] == reference_greedy(new, [before], 300 - change)[0][0]
        assert any(one.weight_spans for output in found for one in output.outputs)


def test_retracted_samples_are_unchanged_without_an_update(old: Path) -> None:
    params = SamplingParams(n=3, temperature=1, seed=4, max_tokens=200, ignore_eos=True)
    with cpu_engine(old, max_running=5) as engine:
        alone = engine.generate(PROMPTS, params)
        found = []
        thread = threading.Thread(target=lambda: found.extend(engine.generate(PROMPTS, params)))
        before = engine.stats()["output_tokens"]
        thread.start()
        for step in (30, 60, 90):
            wait_until(lambda step=step: engine.stats()["output_tokens"] > before + step)  # type: ignore[misc]
            engine.pause("retract")
            engine.resume()
        thread.join()
        assert [[one.token_ids for one in output.outputs] for output in found] == [
            [one.token_ids for one in output.outputs] for output in alone
        ]


def fail_while_writing(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Let the second file of a checkpoint vanish after the check and after the first file was written, once."""
    load_file, left = model_weights.loading._load_file, [2]

    def load_or_fail(file: Path, *rest: Any) -> None:
        if file.parent == path:
            left[0] -= 1
            if left[0] == 0:
                raise ModelError(f"{file}: cannot be read as safetensors: gone")
        load_file(file, *rest)

    monkeypatch.setattr(model_weights.loading, "_load_file", load_or_fail)


@pytest.mark.parametrize("dp", [1, 2])
def test_replica_that_fails_while_writing_restarts_with_the_old_weights(
    old: Path, new: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dp: int
) -> None:
    middle = copy_without(make_model("qwen2", tmp_path / "middle", layers=4, seed=2), tmp_path / "second")
    config = EngineConfig(model=str(old), device="cpu", dtype="float32", kv_cache_tokens=8192, max_running=16, dp=dp)
    with Engine(config, in_process=True) as engine:
        engine.update_weights(str(middle), version="middle")
        right = tokens(engine)
        assert right != expected(old)
        fail_while_writing(monkeypatch, new)
        with pytest.raises((EngineDead, ModelError), match="gone"):
            engine.update_weights(str(new))
        assert engine.weight_version == "middle"
        wait_until(lambda: engine.stats()["replicas_ready"] == dp)
        assert engine.stats()["restarts"] == 1
        for _ in range(2 * dp):  # so that each replica answers
            assert tokens(engine) == right
        assert not engine.is_paused
