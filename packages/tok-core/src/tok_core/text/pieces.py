"""Derive the bytes that each vocabulary entry contributes to the text from the tokenizer's decoder.

Two families are supported: byte-level BPE (GPT-2's byte alphabet) and sentencepiece-like vocabularies (Metaspace or
Replace, with ByteFallback). In both, text is the concatenation of pieces, whatever their neighbours are. Only the very
first piece may lose the space that encoding put in front of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from tok_core.errors import ModelError

_SUPPORTED = "ByteLevel, Metaspace, or a Sequence of Replace, Metaspace, ByteFallback, Fuse and Strip"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class PieceDecoder:
    """Decoder of tokens to bytes.

    A whole text drops up to `lead` leading spaces or, with `bare_first`, the spaces of its first piece.
    """

    to_bytes: Callable[[str], bytes]
    lead: int = 0
    bare_first: bool = False

    def own_text(self, pieces: Sequence[bytes]) -> list[bytes]:
        """Return what each piece adds to a text of its own, as opposed to one that continues another."""
        shown, lead = list(pieces), self.lead
        if self.bare_first:
            first = next((index for index, piece in enumerate(pieces) if piece), 0)
            shown[first : first + 1] = [piece.replace(b" ", b"") for piece in pieces[first : first + 1]]
        for index, piece in enumerate(shown):
            spaces = min(lead, len(piece) - len(piece.lstrip(b" ")))
            shown[index] = piece[spaces:]
            lead -= spaces
            if shown[index] or not lead:
                break
        return shown


def piece_decoder(decoder: Mapping[str, object] | None) -> PieceDecoder:
    """Return the decoder for the "decoder" entry of tokenizer.json. Raise ModelError, naming an unsupported decoder."""
    steps = _steps(decoder)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return PieceDecoder(_byte_level)
    return _sentencepiece(steps)


def _steps(decoder: Mapping[str, object] | None) -> list[Mapping[str, object]]:
    if decoder is None:
        raise ModelError(f"tokenizer.json has no decoder; supported: {_SUPPORTED}")
    if decoder.get("type") == "Sequence":
        inner = cast("list[Mapping[str, object]]", decoder.get("decoders") or [])
        return [step for one in inner for step in _steps(one)]
    return [decoder]


def _alphabet() -> dict[int, int]:
    """Return GPT-2's byte alphabet: printable Latin-1 as itself, other bytes from U+0100 on (Radford 2019)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    # A character outside the alphabet must not be taken for the byte of the same number.
    table = dict.fromkeys(others, 0xFFFF) | {byte: byte for byte in plain}
    return table | {0x100 + index: byte for index, byte in enumerate(others)}


_ALPHABET = _alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _sentencepiece(steps: list[Mapping[str, object]]) -> PieceDecoder:
    swaps: list[tuple[str, str]] = []
    lead, bare_first, fallback, fused = 0, False, False, False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not fused:
                swaps.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)} if not fused:
                swaps.append((old, " "))
                bare_first = step.get("prepend_scheme", "always") != "never"
            case {"type": "ByteFallback"}:
                fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": int(lead), "stop": 0} if fused:
                pass
            case _:
                raise ModelError(f"tokenizer.json has decoder {step!r}; supported: {_SUPPORTED}")
    return PieceDecoder(_swapper(tuple(swaps), fallback), lead, bare_first)


def _swapper(swaps: tuple[tuple[str, str], ...], fallback: bool) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        byte = _BYTE.fullmatch(token) if fallback else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        for old, new in swaps:
            token = token.replace(old, new)
        return token.encode()

    return to_bytes
