"""Record which prompts an earlier run has answered, in eight bytes per prompt."""

from __future__ import annotations

from array import array


class AnsweredPrompts:
    """The answered prompts of an output file, by index, or by key if the run has keys (which takes more memory).

    A digest of each request is kept, so that a run with other prompts or parameters is refused.
    """

    def __init__(self, name: str, *, keyed: bool) -> None:
        self._name = name
        self._keyed = keyed
        self._by_index = array("Q")  # digests; 0: not answered
        self._by_key: dict[str, int] = {}
        self._seen_keys: set[str] = set()

    def add(self, index: int, key: str | None, digest: int) -> None:
        """Record a line of the file. ValueError: the run has keys and the line has none."""
        if self._keyed:
            if key is None:
                raise ValueError(
                    f"{self._name} has no keys: the run that wrote it had none; allowed: resuming without `key`"
                )
            self._by_key[key] = digest
            return
        if index >= len(self._by_index):
            self._by_index.frombytes(bytes(self._by_index.itemsize * (index + 1 - len(self._by_index))))
        self._by_index[index] = digest

    def has(self, index: int, key: str | None, digest: int) -> bool:
        """Return whether the prompt is answered. ValueError: another request was answered, or the key is not unique."""
        saved_digest = self._look_up(index, key)
        if saved_digest and saved_digest != digest:
            prompt_name = f"prompt {index}" if key is None else f"the prompt with key {key!r}"
            raise ValueError(
                f"{self._name} has the answer to another request for {prompt_name}; allowed: resuming with the same "
                "prompts and parameters, or another output"
            )
        return bool(saved_digest)

    def _look_up(self, index: int, key: str | None) -> int:
        if key is None:
            return self._by_index[index] if index < len(self._by_index) else 0
        if key in self._seen_keys:
            raise ValueError(f"key {key!r} belongs to several prompts, including prompt {index}; allowed: one")
        self._seen_keys.add(key)
        return self._by_key.get(key, 0)
