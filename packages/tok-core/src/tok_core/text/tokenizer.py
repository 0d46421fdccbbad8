"""Convert text to token ids and back; the text of ids is the concatenation of their pieces.

The `tokenizers` library encodes. Decoding joins pieces (`tok_core.text.pieces`), so that whole texts, streamed texts
and the search for stop strings all use the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt
import tokenizers

from tok_core.errors import InvalidField, ModelError
from tok_core.text.files import CONFIG, other_special_tokens, read_json, special_tokens
from tok_core.text.pieces import PieceDecoder, piece_decoder

Int32 = npt.NDArray[np.int32]


class _Layout(msgspec.Struct):
    decoder: dict[str, object] | None = None


_LAYOUT = msgspec.json.Decoder(_Layout)


class Tokenizer:
    """Tokenizer of a model directory, created with `load`.

    vocab_size   greatest id plus one, added tokens included
    pieces       bytes of each id, including the content of special tokens; b"" for ids without a token
    special_ids  ids that `decode` and `Detokeniser` do not show
    roles        special tokens by role ("bos_token", "eos_token", ...)
    bos_id       id that begins a text; None if the model has none
    eos_ids      ids of the tokenizer's own end token: at most one; the model's configuration may name more
    begin_count  number of special tokens that `encode` adds before a text
    """

    def __init__(self, encoder: tokenizers.Tokenizer, decoder: PieceDecoder, roles: dict[str, str]) -> None:
        self._encoder = encoder
        self._decoder = decoder
        self.roles = roles
        added = encoder.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self.pieces = _pieces(encoder.get_vocab(with_added_tokens=True), decoder, self.special_ids)
        self.vocab_size = len(self.pieces)
        self._visible = [b"" if i in self.special_ids else piece for i, piece in enumerate(self.pieces)]
        # As arrays, whose extra last entry stands for all ids outside the vocabulary.
        self._shown = np.array([*self._visible, b""], np.object_)
        self._lengths = np.array([*map(len, self.pieces), 0], np.int64)
        self.bos_id = _role_id(encoder, roles, "bos_token")
        eos_id = _role_id(encoder, roles, "eos_token")
        self.eos_ids: tuple[int, ...] = () if eos_id is None else (eos_id,)
        self.begin_count = [*encoder.encode("a").special_tokens_mask, 0].index(0)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load from a directory with tokenizer.json. Raise ModelError, saying what is missing or unsupported."""
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ModelError(f"{directory} has no tokenizer.json: text cannot be encoded, only token ids served")
        decoder = piece_decoder(_read_layout(file).decoder)
        roles = special_tokens(directory)
        return cls(_read_encoder(file, roles), decoder, roles)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. Raise InvalidField("text") for lone surrogates."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text. Encode in parallel, without holding the GIL."""
        for text in texts:
            if not _encodable(text):
                raise InvalidField("text", text, "strings that are valid Unicode (no lone surrogates)")
        found = self._encoder.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in found]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids` as a text of its own; invalid UTF-8 becomes U+FFFD."""
        return b"".join(self.own_text(ids, skip_special_tokens)).decode(errors="replace")

    def own_text(self, ids: Sequence[int], skip_special_tokens: bool = True) -> list[bytes]:
        """Return the bytes that each id adds to the text that `decode` returns."""
        return self._decoder.own_text(self.pieces_of(ids, skip_special_tokens))

    def continuation(self, ids: Int32, keep_bytes: int | None = None, skip_special_tokens: bool = True) -> str:
        """Return the text by which generated `ids` continue their prompt: all that a Detokeniser shows of them.

        keep_bytes  number of bytes of their pieces to keep, those of special tokens included; None: all

        Raise ValueError if the pieces have fewer bytes.
        """
        if not skip_special_tokens:
            whole_text = b"".join(self.pieces_of(ids.tolist()))
            if keep_bytes is not None and not 0 <= keep_bytes <= len(whole_text):
                raise ValueError(f"keep_bytes is {keep_bytes}; the pieces have {len(whole_text)}")
            return whole_text[:keep_bytes].decode(errors="replace")
        if keep_bytes is None:
            return b"".join(self.shown(ids)).decode(errors="replace")
        known = np.minimum(ids, self.vocab_size)
        ends = np.concatenate([[0], np.cumsum(self._lengths[known])])
        if not 0 <= keep_bytes <= ends[-1]:
            raise ValueError(f"keep_bytes is {keep_bytes}; the pieces have {ends[-1]}")
        whole = int(np.searchsorted(ends, keep_bytes, side="right")) - 1  # tokens before the one that is cut
        shown = self._shown[known[: whole + 1]].tolist()
        shown[whole:] = [piece[: keep_bytes - ends[whole]] for piece in shown[whole:]]
        return b"".join(shown).decode(errors="replace")

    def shown(self, ids: Int32) -> list[bytes]:
        """Return the bytes that each generated id shows; b"" for special ids and ids outside the vocabulary."""
        pieces: list[bytes] = self._shown[np.minimum(ids, self.vocab_size)].tolist()
        return pieces

    def piece(self, token: int) -> bytes:
        """Return the bytes that `token` contributes; b"" for an id outside the vocabulary."""
        return self.pieces[token] if 0 <= token < self.vocab_size else b""

    def piece_and_shown(self, token: int) -> tuple[bytes, bytes]:
        """Return the bytes that `token` contributes, and those that are shown: all, or none for special tokens."""
        known = 0 <= token < self.vocab_size
        return (self.pieces[token], self._visible[token]) if known else (b"", b"")

    def pieces_of(self, ids: Sequence[int], skip_special_tokens: bool = False) -> list[bytes]:
        """Return the bytes that each id contributes; with `skip_special_tokens`, b"" for special ids."""
        pieces = self._visible if skip_special_tokens else self.pieces
        size = self.vocab_size
        return [pieces[token] if 0 <= token < size else b"" for token in ids]


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_layout(file: Path) -> _Layout:
    try:
        return _LAYOUT.decode(file.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, OSError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _read_encoder(file: Path, roles: dict[str, str]) -> tokenizers.Tokenizer:
    try:
        encoder = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"{file} cannot be read: {error}") from error
    encoder.no_truncation()
    encoder.no_padding()
    _add_configured(encoder, file.parent)
    _mark_special(encoder, file.parent, roles)
    return encoder


def _add_configured(encoder: tokenizers.Tokenizer, directory: Path) -> None:
    """Add the tokens that tokenizer_config.json lists, in order of id; it takes precedence over tokenizer.json."""
    entries = read_json(directory, CONFIG).get("added_tokens_decoder")
    if not isinstance(entries, dict):
        return
    try:
        configured = {int(key): tokenizers.AddedToken(**entry) for key, entry in entries.items()}
    except (TypeError, ValueError) as error:
        raise ModelError(f"{directory / CONFIG}: added_tokens_decoder is malformed: {error}") from error
    added = encoder.get_added_tokens_decoder()
    known = {token.content: encoder.token_to_id(token.content) for token in configured.values()}
    for token in configured.values():
        if (index := known[token.content]) is not None and index in added:
            token.special = token.special or added[index].special  # the library never undoes this
    encoder.add_tokens([token for _, token in sorted(configured.items())])  # each call takes time for all added tokens
    for index, token in configured.items():
        if known[token.content] is None and encoder.token_to_id(token.content) != index:
            raise ModelError(f"{directory / CONFIG}: token {token.content!r} cannot be given id {index}")


def _mark_special(encoder: tokenizers.Tokenizer, directory: Path, roles: dict[str, str]) -> None:
    """Make tokens with a role special, and others that the configuration calls special if nothing else lists them.

    They keep how they are matched in text.
    """
    added = encoder.get_added_tokens_decoder()
    special = []
    for content in (*roles.values(), *other_special_tokens(directory)):
        index = encoder.token_to_id(content)
        if index is not None and (index not in added or content in roles.values()):
            special.append(added.get(index, tokenizers.AddedToken(content, normalized=False)))
    encoder.add_special_tokens(special)


def _pieces(vocabulary: dict[str, int], decoder: PieceDecoder, special: frozenset[int]) -> list[bytes]:
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, index in vocabulary.items():
        pieces[index] = token.encode() if index in special else decoder.to_bytes(token)
    return pieces


def _role_id(encoder: tokenizers.Tokenizer, roles: dict[str, str], role: str) -> int | None:
    if role not in roles:
        return None
    found = encoder.token_to_id(roles[role])
    if found is None:
        raise ModelError(f"{CONFIG}: {role} {roles[role]!r} is not in the vocabulary of tokenizer.json")
    return found
