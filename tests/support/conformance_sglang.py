"""Run SGLang's front-end language as a client: `python tests/support/conformance_sglang.py URL`.

URL serves the demo model with --enable-rl; docs/clients.md has the commands. Each check fails with an AssertionError.
"""

from __future__ import annotations

import sys
from typing import Any

import sglang
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

QUESTION = "Tom buys 4 books for 12 dollars each and 3 pens for 5 dollars each. How much does he spend in all?"


@sglang.function  # type: ignore[untyped-decorator]
def solve(s: Any) -> None:
    """Answer the question as the model's chat template asks it."""
    s += sglang.user(QUESTION)
    s += sglang.assistant(sglang.gen("answer", temperature=0, max_tokens=100))


@sglang.function  # type: ignore[untyped-decorator]
def choose(s: Any) -> None:
    """Choose one of several continuations, and generate what a regular expression allows."""
    s += "Tom buys 4 books for 12 dollars each. The books cost 4 * 12 ="
    s += sglang.select("price", [" 48", " elephants"])
    s += " dollars. In digits: " + sglang.gen("digits", regex="[0-9]{2}", temperature=0, max_tokens=8)


def main(url: str) -> None:
    """Generate, whole and streamed; choose; clear the cache; read what the server says of itself."""
    backend = RuntimeEndpoint(url, chat_template_name="llama-3-instruct")
    sglang.set_default_backend(backend)
    whole = solve.run()["answer"]
    assert "63" in whole, whole
    parts = list(solve.run(stream=True).text_iter("answer"))
    assert len(parts) > 1
    assert "".join(parts) == whole
    state = choose.run()
    assert state["price"] == " 48", state["price"]
    assert len(state["digits"]) == 2
    assert int(state["digits"]) >= 0
    backend.flush_cache()
    assert backend.get_server_info()["tp_size"] == 1
    assert backend.get_model_name()
    print("passed")


if __name__ == "__main__":
    main(sys.argv[1])
