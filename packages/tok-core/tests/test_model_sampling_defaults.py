"""Sampling defaults of generation_config.json are read, validated and reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.engines import cpu_engine
from support.tiny_models import make_model
from tok_core import Engine, InvalidField, ModelError, SamplingParams
from tok_core.config import EngineConfig
from tok_core.worker.startup.resolve import sampling_defaults


def write(path: Path, **values: object) -> Path:
    (path / "generation_config.json").write_text(json.dumps(values))
    return path


def test_sampling_defaults_are_read_from_generation_config(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    given = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}
    assert sampling_defaults(write(tmp_path, **given, do_sample=False, eos_token_id=1, max_length=7)) == given
    assert sampling_defaults(write(tmp_path, temperature=1.0, top_p=None)) == {"temperature": 1.0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_p": 0}, r"generation_config\.json: top_p is 0; allowed: "),
        ({"temperature": "hot"}, r"generation_config\.json: temperature is 'hot'; allowed: "),
    ],
)
def test_invalid_sampling_default_is_named(values: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        sampling_defaults(write(tmp_path, **values))


def test_engine_reports_sampling_defaults_unless_disabled(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path / "model")
    write(path, **json.loads((path / "generation_config.json").read_text()), top_k=3)
    for generation_config, told in (("auto", {"top_k": 3}), ("none", {})):
        with cpu_engine(path, generation_config=generation_config) as engine:
            assert engine.info.sampling_defaults == told
    with Engine(EngineConfig(model=str(path), device="cpu", kv_cache_tokens=1024)) as engine:  # in another process
        params = SamplingParams(**engine.info.sampling_defaults, max_tokens=2)  # type: ignore[arg-type]
        assert len(engine.generate([[1, 2, 3]], params)[0].outputs[0].token_ids) == 2
    with pytest.raises(InvalidField, match="generation_config is 'vllm'; allowed: auto, none"):
        EngineConfig(model="m", generation_config="vllm")  # type: ignore[arg-type]
