"""Run `tok serve` of the demo model for unmodified clients, with batches and a chat template that takes tools.

`python -m support.conformance DIR` serves it until a line is entered, for clients with an environment of their own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.patience import PATIENCE
from tok_server.demo import MODEL_DIR

NAME = "demo"
SETTINGS = "tokenizer_config.json"

# The demo model's own template takes no tools, so that requests with tools are refused. This adds Hermes-style tools.
OFFERED = """
{%- if tools %}
    {{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<tool_call>{"name": ..., "arguments": ...}</tool_call><|eot_id|>' }}
{%- endif %}
"""
CALLED = """
    {%- for call in message['tool_calls'] or [] %}
        {{- '<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}
    {%- endfor %}
"""


def model_with_tools(directory: Path) -> Path:
    """Link the demo model into `directory` with a template that takes tools; return `directory`.

    Prompts without tools are unchanged.
    """
    directory.mkdir()
    for file in MODEL_DIR.iterdir():
        if file.name != SETTINGS:
            (directory / file.name).symlink_to(file)
    settings = json.loads((MODEL_DIR / SETTINGS).read_text())
    template = settings["chat_template"]
    for old, new in (
        ("{{- bos_token }}\n", "{{- bos_token }}" + OFFERED),
        ("'assistant']", "'assistant', 'tool']"),
        ("\n    {{- '<|eot_id|>' }}", CALLED + "    {{- '<|eot_id|>' }}"),
    ):
        assert template.count(old) == 1
        template = template.replace(old, new)
    (directory / SETTINGS).write_text(json.dumps(settings | {"chat_template": template}))
    return directory


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """Run a server of that model with its data in `directory`, and yield its address."""
    model = model_with_tools(directory / NAME)
    flags = ["--port", "0", "--device", "cpu", "--log-level", "error", "--data-dir", str(directory / "data")]
    command = [sys.executable, "-m", "tok_server.cli", "serve", str(model), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as popen:
        try:
            assert popen.stdout is not None
            found = re.search(r"http://127\.0\.0\.1:\d+", popen.stdout.readline())
            assert found is not None
            yield found[0]
        finally:
            popen.terminate()
            assert popen.wait(PATIENCE) == 0


if __name__ == "__main__":
    with served(Path(sys.argv[1])) as address:
        input(f"{address} serves {NAME}; press Enter to stop\n")
