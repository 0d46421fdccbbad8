"""Check the weights of a model directory by reading only the headers of its safetensors files."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tok_core.errors import ModelError


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
