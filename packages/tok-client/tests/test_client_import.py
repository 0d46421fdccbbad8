"""Tests of the package's import cost, dependencies and public names."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import requires

import pytest

import tok_client
from support.patience import PATIENCE
from tok_client import types

IMPORT = "import sys; before = set(sys.modules); import tok_client; print(*set(sys.modules) - before)"
MAX_MODULES = 260  # modules; 194 on Python 3.11, mostly of asyncio and ssl; one more heavy library adds about 100


def test_importing_tok_client_loads_neither_torch_nor_aiohttp() -> None:
    shown = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    modules = shown.stdout.split()
    assert len(modules) < MAX_MODULES
    loaded = {name.partition(".")[0] for name in modules}
    assert "tok_client" in loaded
    heavy = {"torch", "numpy", "tok_core", "tok_kernels", "tok_server", "aiohttp", "yarl", "pydantic"}
    assert not loaded & heavy


def test_tok_client_depends_only_on_aiohttp_and_msgspec() -> None:
    assert sorted(line.partition(">")[0] for line in requires("tok-client") or []) == ["aiohttp", "msgspec"]


@pytest.mark.parametrize("module", [tok_client, types])
def test_every_public_name_exists_and_is_listed_once(module: object) -> None:
    names = getattr(module, "__all__")  # noqa: B009 - a module is an object to the type checker here
    assert len(set(names)) == len(names)
    assert all(hasattr(module, name) for name in names)


def test_a_program_with_an_unclosed_client_exits_without_warnings() -> None:
    code = (
        "from tok_client import APIConnectionError, Client\n"
        "client = Client('http://127.0.0.1:1/v1', max_retries=0)\n"
        "try: client.models.list()\n"
        "except APIConnectionError: print('refused')\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert (run.stdout, run.stderr) == ("refused\n", "")
