"""Which prompts an earlier run has answered, in eight bytes each."""

from __future__ import annotations

from array import array


class Done:
    """What an output file has, by index, or by key where the run makes keys (which takes more memory).

    Of each request a digest is known, so that a file of other prompts or other parameters is not gone on with.
    """

    def __init__(self, name: str, *, keyed: bool) -> None:
        self._name = name
        self._keyed = keyed
        self._by_index = array("Q")  # 0: none
        self._by_key: dict[str, int] = {}
        self._met: set[str] = set()

    def add(self, index: int, key: str | None, digest: int) -> None:
        """Notes a line of the file. ValueError: it has no key."""
        if self._keyed:
            if key is None:
                raise ValueError(f"{self._name} has no keys, for it was made without; allowed: going on without")
            self._by_key[key] = digest
            return
        if index >= len(self._by_index):
            self._by_index.frombytes(bytes(self._by_index.itemsize * (index + 1 - len(self._by_index))))
        self._by_index[index] = digest

    def has(self, index: int, key: str | None, digest: int) -> bool:
        """Whether the prompt is answered. ValueError: a different request was, or the key was there before."""
        found = self._look_up(index, key)
        if found and found != digest:
            what = f"prompt {index}" if key is None else f"the prompt with key {key!r}"
            raise ValueError(
                f"{self._name} has the answer to another request for {what}; allowed: going on with the same prompts "
                "and parameters, or another output"
            )
        return bool(found)

    def _look_up(self, index: int, key: str | None) -> int:
        if key is None:
            return self._by_index[index] if index < len(self._by_index) else 0
        if key in self._met:
            raise ValueError(f"key {key!r} belongs to several prompts, of which {index} is one; allowed: one")
        self._met.add(key)
        return self._by_key.get(key, 0)
