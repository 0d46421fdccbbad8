"""Call an endpoint in a thread, and read its answer later."""

from __future__ import annotations

import threading
from collections.abc import Callable

from support.serving import Answer


class Later:
    """A request that is answered in a thread."""

    def __init__(self, call: Callable[[], Answer]) -> None:
        self.answers: list[Answer] = []
        self._thread = threading.Thread(target=lambda: self.answers.append(call()))
        self._thread.start()

    def answer(self) -> Answer:
        self._thread.join()
        return self.answers[0]
