"""Give an engine a model directory without its tokenizer, so that it computes token ids and no text."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tok_core.model_config import resolve
from tok_core.runtime import ScratchDirectory

LINKED_FILES = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json")


@contextmanager
def without_tokenizer(model: str, data_dir: str | None) -> Iterator[str]:
    """Yield a directory of links to the files of `model` (a directory or a hub id) without the tokenizer.

    Engine warnings, such as the one about the missing tokenizer, are not logged meanwhile. Errors: ModelError.
    """
    path = resolve(model, data_dir)
    log = logging.getLogger("tok_core")
    level = log.level
    scratch = ScratchDirectory("bench")
    try:
        view = Path(scratch.name) / (path.resolve().name or "model")
        view.mkdir()
        for pattern in LINKED_FILES:
            for file in path.glob(pattern):
                (view / file.name).symlink_to(file.resolve())
        log.setLevel(logging.ERROR)
        try:
            yield str(view)
        finally:
            log.setLevel(level)
    finally:
        scratch.cleanup()
