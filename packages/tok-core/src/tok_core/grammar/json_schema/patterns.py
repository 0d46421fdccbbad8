"""Handle `patternProperties`: schemas that patterns demand of named properties, and names generated from patterns.

A pattern searches in a given name. Names generated from it match it as a whole, like strings under `pattern`.
"""

from __future__ import annotations

from collections.abc import Iterable

from tok_core.grammar.json_schema.keywords import Json, Schema, all_of, patterns_of
from tok_core.grammar.json_schema.strings import matching
from tok_core.grammar.regex import SURROGATES, Automaton, Unsupported
from tok_core.grammar.rules import Rules


class NamePatterns:
    """The `patternProperties` of one schema."""

    def __init__(self, schema: Schema, path: str, rules: Rules) -> None:
        self.schemas = patterns_of(schema, path)
        self._path = path
        self._rules = rules
        self._wide = {pattern: Automaton(pattern, rules.work, search=True, wide=True) for pattern in self.schemas}
        self._certain = {pattern: Automaton(pattern, rules.work, search=True) for pattern in self.schemas}

    def demanded(self, name: str, named: list[Json], further: Json) -> Json:
        """Return the schema of a property's value; `named` holds its schema in `properties`, if it has one there."""
        if self.schemas and any(SURROGATES[0] <= ord(sign) <= SURROGATES[1] for sign in name):
            raise Unsupported(f"patternProperties beside names without half a surrogate pair (at {self._path})")
        parts = [schema for pattern, schema in self.schemas.items() if self._wide[pattern].accepts(name)]
        parts += named
        if not named and not any(automaton.accepts(name) for automaton in self._certain.values()):
            parts.append(further)
        return parts[0] if len(parts) == 1 else all_of(self._path, *parts)

    def names(self, others: Iterable[str]) -> list[tuple[str, str]]:
        """Return each pattern with the expression for its names, which are not in `others` and match no second pattern.

        Raise Unsupported if that is not certain.
        """
        allowed = [pattern for pattern, schema in self.schemas.items() if schema is not False]
        return [(pattern, self._name(pattern, list(others))) for pattern in allowed]

    def _name(self, pattern: str, others: list[str]) -> str:
        made = Automaton(pattern, self._rules.work)
        for name in others:
            if made.accepts(name):
                raise Unsupported(
                    f"patternProperties of which no pattern matches the whole of a named property "
                    f"({pattern[:80]!r} matches {name[:80]!r} at {self._path})"
                )
        for more, automaton in self._wide.items():
            if more != pattern and made.overlaps(automaton):
                raise Unsupported(
                    f"patternProperties of which plainly no two match one name "
                    f"({pattern[:80]!r} and {more[:80]!r} at {self._path})"
                )
        return matching(pattern, self._rules)


def is_any(schema: Json) -> bool:
    """Return whether a schema allows any value."""
    return schema is True or schema == {}
