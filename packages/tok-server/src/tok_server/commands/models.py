"""`tok models`: which models can be served, or what a model directory holds."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from tok_core.errors import ModelError
from tok_core.text import ChatTemplate, Tokenizer
from tok_server.default_model import DEMO_MODEL, DEMO_NAME

MIB = 1 << 20


def main(options: argparse.Namespace) -> int:
    """Prints. Errors: ModelError for a directory that cannot be served."""
    print(_directory(Path(options.model).expanduser()) if options.model else _known())
    return 0


def _known() -> str:
    from tok_core.model import ARCHITECTURES

    names = "\n".join(f"  {name}" for name in ARCHITECTURES)
    return (
        f"architectures (a local directory or a hub id, safetensors):\n{names}\n"
        f"demo model, served when none is named:\n  {DEMO_NAME}  {DEMO_MODEL} ({_size(DEMO_MODEL)})\n"
        "tok models DIRECTORY shows what a model directory holds."
    )


def _directory(path: Path) -> str:
    from tok_core.model import read_config

    if not path.is_dir():
        raise ModelError(f"model {str(path)!r}: is no directory; allowed: a model directory")
    config = read_config(path)
    rows = {
        "architecture": config.architecture,
        "layers": config.num_layers,
        "hidden size": config.hidden_size,
        "heads": f"{config.num_heads}, of keys and values {config.num_kv_heads}, size {config.head_dim}",
        "vocabulary": config.vocab_size,
        "context": config.max_positions,
        "stored as": str(config.dtype).removeprefix("torch."),
        "end tokens": ", ".join(map(str, config.eos_token_ids)) or "none",
        "files": _size(path),
        "tokenizer": _works(Tokenizer.load, path),
        "chat template": _works(ChatTemplate.load, path),
    }
    width = max(map(len, rows))
    return "\n".join([str(path), *(f"  {name:<{width}}  {value}" for name, value in rows.items())])


def _works(load: Callable[[Path], object], path: Path) -> str:
    try:
        load(path)
    except ModelError as error:
        return f"none ({error})"
    return "yes"


def _size(path: Path) -> str:
    if not path.is_dir():
        return "missing"
    total = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    return f"{total / MIB:.1f} MiB"
