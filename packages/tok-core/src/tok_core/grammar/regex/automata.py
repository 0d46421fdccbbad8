"""Test whether a regular expression accepts a text, and whether two expressions accept a common text.

The automata are nondeterministic and run without backtracking, so that their cost is bounded for every text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tok_core.grammar.regex.character_sets import Spans, Unsupported
from tok_core.grammar.regex.parser import parsed

MAX_STATES = 2000

Work = Callable[[int], None]
Fragment = Callable[[int], int]
"""Adds states behind a given state and returns the state in which the fragment's text has been read."""


class Automaton:
    """Automaton for the texts that `pattern` matches as a whole or, with `search`, in part.

    search  whether a match of a part of the text is enough
    wide    whether texts on which dialects disagree are accepted; otherwise none of them is
    work    called with the number of steps taken

    Raises Unsupported for an expression that no grammar can express, or one with too many states.
    """

    def __init__(self, pattern: str, work: Work, *, search: bool = False, wide: bool = False) -> None:
        self._work = work
        self._edges: list[list[tuple[Spans, int]]] = []
        self._free: list[list[int]] = []
        self._end = parsed(pattern, self, search=search, wide=wide)(self._state())

    def accepts(self, text: str) -> bool:
        """Return whether the automaton accepts the whole text."""
        states = self._closure([0])
        for code in map(ord, text):
            self._work(4 * len(states))
            reached = [
                target
                for state in states
                for spans, target in self._edges[state]
                if any(first <= code <= last for first, last in spans)
            ]
            states = self._closure(reached)
        return self._end in states

    def overlaps(self, other: Automaton) -> bool:
        """Return whether both automata accept some common text."""
        seen, left = {(0, 0)}, [(0, 0)]
        while left:
            mine, theirs = left.pop()
            if (mine, theirs) == (self._end, other._end):
                return True
            found = [(state, theirs) for state in self._free[mine]] + [(mine, state) for state in other._free[theirs]]
            for spans, target in self._edges[mine]:
                for more, there in other._edges[theirs]:
                    self._work(len(spans) * len(more))
                    if any(a <= d and c <= b for a, b in spans for c, d in more):
                        found.append((target, there))
            self._work(5 + len(found))
            left += [pair for pair in dict.fromkeys(found) if pair not in seen]
            seen.update(found)
        return False

    def one(self, spans: Spans) -> Fragment:
        """Return a fragment for one character of the set."""

        def fragment(start: int) -> int:
            end = self._state()
            self._edges[start].append((spans, end))
            return end

        return fragment

    def sequence(self, parts: list[Fragment]) -> Fragment:
        """Return a fragment for the parts in order."""

        def fragment(start: int) -> int:
            for part in parts:
                start = part(start)
            return start

        return fragment

    def either(self, options: list[Fragment]) -> Fragment:
        """Return a fragment for any of the options."""
        return lambda start: self._joined([option(start) for option in options])

    def repeat(self, one: Fragment, least: int, most: int | None) -> Fragment:
        """Return a fragment for `one` repeated `least` to `most` times; `most` None: unbounded."""

        def fragment(start: int) -> int:
            for _ in range(least):
                start = one(start)
            if most is None:
                start = self._joined([start])
                self._free[one(start)].append(start)
                return self._joined([start])
            ends = [start]
            for _ in range(most - least):
                ends.append(one(ends[-1]))
            return self._joined(ends)

        return fragment

    def _state(self) -> int:
        if len(self._edges) >= MAX_STATES:
            raise Unsupported(f"regular expressions of names that come to at most {MAX_STATES} states")
        self._work(1)
        self._edges.append([])
        self._free.append([])
        return len(self._edges) - 1

    def _joined(self, ends: list[int]) -> int:
        found = self._state()
        for end in ends:
            self._free[end].append(found)
        return found

    def _closure(self, states: Iterable[int]) -> set[int]:
        """Return the states and those reachable from them without reading a character."""
        found = set(states)
        left = list(found)
        while left:
            new = [state for state in self._free[left.pop()] if state not in found]
            found.update(new)
            left += new
        self._work(len(found))
        return found
