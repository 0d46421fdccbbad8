"""Parse the code blocks of a documentation page and run them as a reader would."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import msgspec

from support.serving import serving
from tok_server.cli import make_parser
from tok_server.flags.engine_flags import engine_config, server_settings

PORT = "10210"
"""The port that documents name."""
RUN = ("bash", "python")
SHOWN = ("text", "json")
"""Languages of a block that shows the output of the block before it."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_VARIES = (  # (pattern, placeholder) of values that differ from run to run
    (re.compile(r"\b(chatcmpl|cmpl|rerank|req|file|batch_req|batch)([-_])[0-9a-f]{24}\b"), r"\1\g<2>ID"),
    (re.compile(r"\b1[6-9]\d{8}\b|\b2\d{9}\b"), "TIME"),
    (re.compile(r"-?\b\d+\.\d+(?:e-?\d+)?"), "NUMBER"),
)


@dataclass(frozen=True, slots=True)
class Block:
    """A block to run, and the output shown for it; None: none is shown."""

    language: str
    code: str
    output: str | None


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of `page` to run, in order."""
    text = page.read_text(encoding="utf-8")
    fences = list(_FENCE.finditer(text))
    found = []
    for fence, after in zip(fences, [*fences[1:], None], strict=True):
        if fence[1] not in RUN:
            continue
        tells = after is not None and after[1] in SHOWN and not text[fence.end() : after.start()].strip()
        found.append(Block(fence[1], fence[2], after[2] if tells and after is not None else None))
    return found


def indented_commands(page: Path) -> list[str]:
    """Return the indented `tok` commands of `page`, which a test machine cannot run, such as those for GPUs."""
    found = re.findall(r"^    (tok .*?)(?:\s{2,}#.*|\s+#\s.*)?$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [str(command) for command in found]


def same_every_time(output: str) -> str:
    """Return the output with placeholders for values that differ from run to run."""
    for pattern, name in _VARIES:
        output = pattern.sub(name, output)
    return output.strip()


class Reader:
    """Runs a page's blocks in a directory of its own. A context manager.

    A block that begins with `tok serve` starts that server with its settings in a thread, in place of the server before
    it, and on a free port instead of `PORT`. Other blocks run in bash or as Python; neighbouring Python blocks form one
    script.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._server = ExitStack()
        self._port = PORT

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def read(self, blocks: Sequence[Block]) -> Iterator[tuple[Block, str]]:
        """Run the blocks; yield each block and its output."""
        for language, group in groupby(blocks, lambda block: block.language):
            if language == "python":
                yield from self._script(group)
            else:
                for block in group:
                    yield block, self._shell(block.code)

    def _shell(self, code: str) -> str:
        if code.startswith("tok serve") and "&" not in code:
            self._serve(code)
            return ""
        return self._run(self._here(code))

    def _script(self, blocks: Iterable[Block]) -> Iterator[tuple[Block, str]]:
        names: dict[str, object] = {"__name__": "__main__"}
        for block in blocks:
            with redirect_stdout(io.StringIO()) as printed:
                exec(compile(self._here(block.code), "block", "exec"), names)
            yield block, printed.getvalue()

    def _here(self, code: str) -> str:
        return code.replace(f":{PORT}", f":{self._port}")

    def _run(self, code: str) -> str:
        mine = {name: value for name, value in os.environ.items() if not name.startswith("TOK_")}
        # Commands of the tested environment come first.
        path = os.pathsep.join([str(Path(sys.executable).parent), mine.get("PATH", "")])
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", code],
            cwd=self._directory,
            env=mine | {"PATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _serve(self, code: str) -> None:
        self._server.close()
        words = shlex.split(code.replace("\\\n", " "), comments=True)
        options = make_parser(["serve"]).parse_args(words[1:])
        config, settings = engine_config(options), server_settings(options)
        told = {name: getattr(settings, name) for name in settings.__struct_fields__ if name != "model_name"}
        engine = msgspec.structs.asdict(config)
        model = Path(engine.pop("model"))
        del engine["device"]  # `serving` uses the CPU, even if the machine has a GPU
        server = serving(model, name=settings.model_name, engine_options=engine, **told)
        self._port = str(self._server.enter_context(server).port)
