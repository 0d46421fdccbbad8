"""Compile grammars for one model's vocabulary with xgrammar.

Importing this module takes seconds, so it is imported only when a request has a grammar; see
`tok_core.grammar.xgrammar_imports`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Self

import numpy as np
import xgrammar
from numpy.typing import NDArray

from tok_core.errors import InvalidField
from tok_core.grammar.regex import Unsupported
from tok_core.grammar.text import rules_of
from tok_core.sampling_params import Grammar
from tok_core.text import Tokenizer

Masks = NDArray[np.int32]
"""Packed sets of tokens, [n, ⌈V/32⌉]: token t is in a set if bit t mod 32 of word t div 32 is set."""

MAX_COMPILE_THREADS = 8
MAX_CACHED_PREFIXES = 16_384  # texts for which `Compiler.lead` is cached
_BEFORE = re.compile(r"^\[[^\]]*\] [^ ]*:\d+: |Check failed: \([^)]*\) is false: ")


class Compiler:
    """Grammar compiler for a vocabulary of `vocab_size` ids.

    pieces    bytes of each id, b"" for ids without text; ids beyond the list have no text
    end_ids   ids that may follow a complete text; at least one
    encode    returns the tokenizer's ids of a text, without special tokens
    threads   number of compiler threads; None: one per CPU, MAX_COMPILE_THREADS at most
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        vocab_size: int,
        end_ids: Sequence[int],
        encode: Callable[[str], Sequence[int]] = lambda text: (),
        threads: int | None = None,
    ) -> None:
        self.words = -(-vocab_size // 32)
        self._pieces = pieces
        self._encode = encode
        self.lead = lru_cache(MAX_CACHED_PREFIXES)(self._lead)
        known = [*pieces[:vocab_size], *[b""] * (vocab_size - len(pieces))]
        self._begin = np.array([piece[0] if piece else -1 for piece in known], np.int16)
        ends = [token for token in end_ids if token < vocab_size]
        info = xgrammar.TokenizerInfo(known, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=ends)
        threads = threads or min(MAX_COMPILE_THREADS, os.cpu_count() or 1)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=threads, cache_enabled=False)

    @classmethod
    def load(
        cls,
        model: str,
        vocab_size: int,
        end_ids: Sequence[int],
        tokenizer: Tokenizer | None = None,
        threads: int | None = None,
    ) -> Self:
        """Return a compiler for a model directory. Load its tokenizer unless given. Raise ModelError if that fails."""
        tokenizer = tokenizer or Tokenizer.load(model)
        pieces = [b"" if token in tokenizer.special_ids else piece for token, piece in enumerate(tokenizer.pieces)]
        return cls(pieces, vocab_size, end_ids, lambda text: tokenizer.encode(text, add_special_tokens=False), threads)

    def _lead(self, text: str) -> tuple[int, ...]:
        """Return the ids that begin the encoding of `text` whatever follows it: all but the last, which may change.

        Return no ids if they do not spell the text. `lead` caches the results of the latest calls.
        """
        ids = self._encode(text)
        spelt = b"".join(self._pieces[token] for token in ids)
        return tuple(ids[:-1]) if spelt == text.encode() else ()

    def compile(self, grammar: Grammar) -> Compiled:
        """Compile a grammar; slow, without holding the GIL. Raise InvalidField("grammar") or MemoryError."""
        try:
            text = rules_of(grammar)
        except Unsupported as error:
            raise InvalidField("grammar", grammar.value, str(error)) from None
        try:
            rules = xgrammar.Grammar.from_lark(text) if grammar.kind == "lark" else text
            compiled = Compiled(self._compiler.compile_grammar(rules), self.words, self.lead, self._begin)
        except RuntimeError as error:
            if "bad_alloc" in str(error):
                raise MemoryError from None
            reason = _BEFORE.sub("", str(error)).strip()[:500]
            raise InvalidField("grammar", grammar.value, f"rules that xgrammar understands ({reason})") from None
        if not compiled.first.any():
            raise InvalidField("grammar", grammar.value, "grammars that some text of the model's tokens satisfies")
        return compiled


class Compiled:
    """Compiled grammar, from which matchers are made.

    first  mask of the tokens that may begin a text, int32 [⌈V/32⌉]
    lead   see `Compiler._lead`
    begin  first byte of each token's text, int16 [V]; −1 for tokens without text
    """

    def __init__(
        self,
        grammar: xgrammar.CompiledGrammar,
        words: int,
        lead: Callable[[str], tuple[int, ...]],
        begin: NDArray[np.int16],
    ) -> None:
        self._grammar = grammar
        self.lead = lead
        self.begin = begin
        first = np.zeros((1, words), np.int32)
        self.matcher().fill_next_token_bitmask(first)
        self.first: NDArray[np.int32] = first[0]

    def matcher(self) -> xgrammar.GrammarMatcher:
        """Return a new matcher at the beginning of a text."""
        return xgrammar.GrammarMatcher(self._grammar)
