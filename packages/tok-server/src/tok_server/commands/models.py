"""`tok models`: list the supported architectures, or show the contents of a model directory."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tok_core.errors import ModelError
from tok_core.text import ChatTemplate, Tokenizer, with_end_token
from tok_server.flags import DEMO_MODEL, DEMO_NAME

if TYPE_CHECKING:
    from tok_core.model_config import ModelConfig

MIB = 1 << 20
NONE = "none"


def main(options: argparse.Namespace) -> int:
    """Print the models. Returns 1 for a directory without weights. Errors: ModelError for an unsupported model."""
    if not options.model:
        print(_supported_models())
        return 0
    return _show(Path(options.model).expanduser())


def _supported_models() -> str:
    from tok_core.models.registry import ARCHITECTURES

    names = "\n".join(f"  {name}" for name in ARCHITECTURES)
    return (
        f"supported architectures (local directory or hub id, safetensors):\n{names}\n"
        f"demo model, the default:\n  {DEMO_NAME}  {DEMO_MODEL} ({_size(DEMO_MODEL)})\n"
        "tok models DIRECTORY describes a model directory."
    )


def _show(path: Path) -> int:
    from tok_core.model_config.model_config import read_config
    from tok_core.quantization import read_quantization

    if not path.is_dir():
        raise ModelError(f"model {str(path)!r}: is not a directory; allowed: a model directory")
    config = read_config(path)
    ends = with_end_token(config.eos_token_ids, path, config.vocab_size)
    quantization = read_quantization(path)
    weights, problem = _weights(path)
    rows = {
        "architecture": config.architecture,
        "layers": config.num_layers,
        **({"experts": str(config.moe)} if config.moe is not None else {}),
        "hidden size": config.hidden_size,
        "heads": f"{config.num_heads}, KV heads {config.num_kv_heads}, size {config.head_dim}",
        "vocabulary": config.vocab_size,
        "context": config.max_positions,
        "stored as": str(config.dtype).removeprefix("torch."),
        "linear layers": str(quantization),
        "KV cache": f"float8 with a scale for each {unit}" if (unit := quantization.kv_scales) else "as computed",
        "end tokens": ", ".join(map(str, ends)) or "none",
        "files": _size(path),
        "weights": weights or f"{NONE} ({problem})",
        "on a GPU": _memory(path, config),
        "tokenizer": _load_status(Tokenizer.load, path),
        "chat template": _load_status(ChatTemplate.load, path),
    }
    width = max(map(len, rows))
    print("\n".join([str(path), *(f"  {name:<{width}}  {value}" for name, value in rows.items())]))
    return 0 if weights else 1


def _memory(path: Path, model: ModelConfig) -> str:
    """Describe the model's memory on one GPU: its weights, as stored and quantised, and its KV cache for a token."""
    from tok_core.config import EngineConfig
    from tok_core.quantization import QuantizationConfig, read_quantization
    from tok_core.worker import MemoryNeeds

    def needs(**options: Any) -> MemoryNeeds:
        return MemoryNeeds.on_one_gpu(EngineConfig(model=str(path), **options), model)

    stored = needs()
    parts = [f"{stored.weights / MIB:,.1f} MiB of weights", f"{stored.per_token:,} bytes of KV cache a token"]
    if read_quantization(path) == QuantizationConfig():
        parts.insert(1, f"{needs(quantization='fp8').weights / MIB:,.1f} MiB with --quantization fp8")
    return "; ".join(parts)


def _weights(path: Path) -> tuple[str, str]:
    """Return a description of the weights, or "" and the problem with them."""
    try:
        return f"{stored_tensors(path)} tensors", ""
    except ModelError as error:
        return "", str(error)


def _load_status(load: Callable[[Path], object], path: Path) -> str:
    try:
        load(path)
    except ModelError as error:
        return f"{NONE} ({error})"
    return "yes"


def _size(path: Path) -> str:
    if not path.is_dir():
        return "missing"
    total = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    return f"{total / MIB:.1f} MiB"


class _Entry(msgspec.Struct):
    """A tensor in a header: element type, shape, and first and end byte, counted from the end of the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def stored_tensors(directory: Path) -> int:
    """Return the number of tensors, having checked that no file is truncated. Errors: ModelError naming the file."""
    from tok_core.models.weights.loading import checkpoint_files

    return sum(map(_count_tensors, checkpoint_files(directory)))


def _count_tensors(file: Path) -> int:
    """Return the number of tensors in one file.

    File format: 8 bytes with the header's length (little-endian), the header (JSON), the tensors.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = stream.read(length) if length <= size - 8 else b""
        header_entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries = [
            msgspec.json.decode(raw, type=_Entry) for name, raw in header_entries.items() if name != "__metadata__"
        ]
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{file}: cannot be read as safetensors: {error}") from error
    end = 8 + length + max((entry.data_offsets[1] for entry in entries), default=0)
    if not entries or size < end:
        raise ModelError(f"{file}: has {size} bytes, but its {len(entries)} tensors end at byte {end}")
    return len(entries)
