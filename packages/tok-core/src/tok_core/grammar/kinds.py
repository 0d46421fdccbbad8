"""Grammar: what the text of a sample must be, as a request says it; only its size is looked at here."""

from __future__ import annotations

from typing import Final, Literal, get_args

import msgspec

from tok_core.errors import InvalidField

Kind = Literal["json_object", "json_schema", "regex", "choice", "ebnf"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

MAX_GRAMMAR_CHARS = 256 * 1024
MAX_WRAPPER_CHARS = 4096


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the text of a sample must be, as a whole. Its kind and sizes are checked when constructed (`InvalidField`),
    the rest by the engine, before a request that asks for it is served.

    kind    what `value` is:
            "json_object"  nothing: any JSON object
            "json_schema"  a JSON Schema, as JSON (`tok_core.grammar.json_schema.schema` says which keywords)
            "regex"        a regular expression that the whole text matches (`tok_core.grammar.regex.regex`)
            "choice"       a JSON array of texts, one of which it is
            "ebnf"         rules of the form `name ::= …`, of which `root` is the whole text (xgrammar's dialect)
    prefix  text before it, part of the sample's text
    suffix  text after it, likewise
    """

    kind: Kind
    value: str = ""
    prefix: str = ""
    suffix: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidField("grammar.kind", self.kind, ", ".join(KINDS))
        _text("grammar", self.value, MAX_GRAMMAR_CHARS)
        _text("grammar.prefix", self.prefix, MAX_WRAPPER_CHARS)
        _text("grammar.suffix", self.suffix, MAX_WRAPPER_CHARS)
        if self.kind == "json_object" and self.value:
            raise InvalidField("grammar", self.value, 'nothing, where its kind is "json_object"')


def _text(field: str, value: object, most: int) -> None:
    if type(value) is not str:  # a subclass cannot be sent to the manager
        raise InvalidField(field, value, "text")
    if len(value) > most:
        raise InvalidField(field, f"{len(value)} characters", f"at most {most}")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidField(field, value, "valid Unicode, without lone surrogates")
