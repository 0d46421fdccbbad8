"""Compiler: grammars for one model's vocabulary, by xgrammar.

Importing this takes seconds, and is done only where a grammar is asked for; see `tok_core.grammar.xgrammar_imports`.
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
from tok_core.grammar.text import ebnf
from tok_core.sampling_params import Grammar
from tok_core.text import Tokenizer

Masks = NDArray[np.int32]
"""Packed sets of tokens, [n, ⌈V/32⌉]: token t is in it where bit t mod 32 of word t div 32 is set."""

MAX_COMPILE_THREADS = 8
MAX_LEAD_TOKENS = 16_384
_BEFORE = re.compile(r"^\[[^\]]*\] [^ ]*:\d+: |Check failed: \([^)]*\) is false: ")


class Compiler:
    """Compiles for a vocabulary of `vocab_size` ids.

    pieces    bytes of each id, b"" for those that are no text; missing ones are none
    end_ids   what may follow a text that is complete; at least one
    encode    the ids that the tokenizer makes of a text, without any of its own
    threads   that compile; None: one a CPU, MAX_COMPILE_THREADS at most
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
        self.lead = lru_cache(MAX_LEAD_TOKENS)(self._lead)
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
        """For the tokenizer of a model directory, loaded unless it is given. Errors: ModelError."""
        tokenizer = tokenizer or Tokenizer.load(model)
        pieces = [b"" if token in tokenizer.special_ids else piece for token, piece in enumerate(tokenizer.pieces)]
        return cls(pieces, vocab_size, end_ids, lambda text: tokenizer.encode(text, add_special_tokens=False), threads)

    def _lead(self, text: str) -> tuple[int, ...]:
        """The ids by which the text begins, whatever follows it: all but the last of its own, which might be another.

        Kept for the texts asked for last, as `lead`. No ids where these do not spell the text.
        """
        ids = self._encode(text)
        spelt = b"".join(self._pieces[token] for token in ids)
        return tuple(ids[:-1]) if spelt == text.encode() else ()

    def compile(self, grammar: Grammar) -> Compiled:
        """Takes its time, without the interpreter's lock. Errors: InvalidField("grammar"), MemoryError."""
        try:
            rules = ebnf(grammar)
        except Unsupported as error:
            raise InvalidField("grammar", grammar.value, str(error)) from None
        try:
            compiled = Compiled(self._compiler.compile_grammar(rules), self.words, self.lead, self._begin)
        except RuntimeError as error:
            if "bad_alloc" in str(error):
                raise MemoryError from None
            reason = _BEFORE.sub("", str(error)).strip()[:500]
            raise InvalidField("grammar", grammar.value, f"rules that xgrammar understands ({reason})") from None
        if not compiled.first.any():
            raise InvalidField("grammar", grammar.value, "what some text of this vocabulary satisfies")
        return compiled


class Compiled:
    """A grammar ready to follow texts by.

    first  the tokens that may begin one, one packed set [⌈V/32⌉]
    lead   see `Compiler.lead`
    begin  the byte that the text of each token begins with, int16 [V]; −1 for those that are no text
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

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return int(self._grammar.memory_size_bytes)

    def matcher(self) -> xgrammar.GrammarMatcher:
        """At the beginning of a text."""
        return xgrammar.GrammarMatcher(self._grammar)
