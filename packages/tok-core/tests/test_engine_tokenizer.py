"""`EngineConfig.tokenizer`, `chat_template` and `revision` replace what the model's directory holds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from support.engines import cpu_engine
from support.tiny_models import make_model
from tok_core import Engine, EngineConfig, InvalidField, ModelError, SamplingParams

MESSAGES = [{"role": "user", "content": "hello"}]
TEMPLATE = "{{ bos_token }}{% for message in messages %}<{{ message.content }}>{% endfor %}"


def without_text(path: Path) -> Path:
    """Remove the tokenizer and the chat template from a model's directory."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (path / name).unlink(missing_ok=True)
    return path


def test_tokenizer_of_another_directory_encodes_stops_and_renders(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path / "model")
    words = shutil.copytree(path, tmp_path / "words")
    prompt, params = "the first words", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with cpu_engine(path) as engine:
        (whole,) = engine.generate([prompt], params)
        text = whole.outputs[0].text
        assert engine.chat_template is not None
        rendered = engine.chat_template.render(MESSAGES)
        stop = text[len(text) // 2 :][:3]
        (expected,) = engine.generate(
            [prompt], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=(stop,))
        )
    with cpu_engine(without_text(path), tokenizer=str(words)) as engine:
        (found,) = engine.generate(
            [prompt], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=(stop,))
        )
        assert engine.chat_template is not None
        assert engine.chat_template.render(MESSAGES) == rendered
    assert (found.prompt_token_ids, found.outputs[0].text) == (expected.prompt_token_ids, expected.outputs[0].text)
    assert expected.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("in_file", [False, True])
def test_chat_template_of_the_settings_replaces_the_model_s(in_file: bool, tmp_path: Path) -> None:
    path, file = make_model("llama", tmp_path / "model"), tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    with cpu_engine(path, chat_template=str(file) if in_file else TEMPLATE) as engine:
        assert engine.chat_template is not None
        assert engine.chat_template.render(MESSAGES).endswith("<hello>")
        assert len(engine.chat_template.render(MESSAGES)) > len("<hello>")  # the tokenizer's begin token


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"chat_template": "/nowhere.jinja"}, InvalidField, "chat_template is '/nowhere.jinja'; allowed: a file with"),
        ({"chat_template": "{{ broken"}, InvalidField, "chat_template is '{{ broken'; allowed: a file with a template"),
        ({"tokenizer": "/nowhere"}, ModelError, "tokenizer '/nowhere': is no directory"),
        ({"tokenizer": "."}, ModelError, r"directory \.: has no tokenizer\.json"),
        ({"revision": "main"}, InvalidField, "revision is 'main'; allowed: none, since model is a directory"),
        ({"revision": ""}, InvalidField, "revision is ''; allowed: a text of at least one character"),
    ],
)
def test_unusable_tokenizer_template_or_revision_is_refused(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    path = make_model("llama", tmp_path / "model")
    with pytest.raises(error, match=message), Engine(EngineConfig(model=str(path), device="cpu", **options)):
        pass
