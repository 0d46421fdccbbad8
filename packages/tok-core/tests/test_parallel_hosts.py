"""Workers recognise others on their own host, and split its memory among themselves only."""

from __future__ import annotations

import socket
import subprocess
import sys

import psutil
import pytest
import torch

from tok_core import EngineConfig
from tok_core.parallel import tensor
from tok_core.parallel.tensor import this_host
from tok_core.worker.startup.memory import cache_tokens

PER_TOKEN = 1 << 16


def test_host_id_is_equal_across_processes_and_differs_by_name_and_boot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = "from tok_core.parallel.tensor import this_host; print(this_host())"
    elsewhere = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(elsewhere.stdout) == this_host() < 1 << 32
    name, boot = socket.gethostname(), tensor.BOOT_ID
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert int(elsewhere.stdout) != this_host()
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert int(elsewhere.stdout) == this_host()
    monkeypatch.setattr(tensor, "BOOT_ID", boot.with_name("uuid"))
    assert int(elsewhere.stdout) != this_host()


def test_host_memory_is_split_among_its_own_workers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    free = psutil.virtual_memory()._replace(available=1 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    config = EngineConfig(model="m", tp=4, dp=2)
    rooms = [
        cache_tokens(config, PER_TOKEN, 0, torch.device("cpu"), None, workers_on_host) for workers_on_host in (1, 2, 8)
    ]
    assert rooms == [4096, 2048, 512]
