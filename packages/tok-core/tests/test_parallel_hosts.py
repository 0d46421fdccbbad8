"""Workers of several hosts: who can reach whose memory, and how much of a host's each may take."""

from __future__ import annotations

import socket
import subprocess
import sys

import psutil
import pytest
import torch

from tok_core import EngineConfig
from tok_core.parallel import host
from tok_core.parallel.host import this_host
from tok_core.worker.startup.memory import cache_tokens

PER_TOKEN = 1 << 16


def test_processes_of_a_host_know_it_for_the_same_and_one_of_another_name_or_start_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = "from tok_core.parallel.host import this_host; print(this_host())"
    elsewhere = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(elsewhere.stdout) == this_host() < 1 << 32
    name, boot = socket.gethostname(), host.BOOT
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert int(elsewhere.stdout) != this_host()
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert int(elsewhere.stdout) == this_host()
    monkeypatch.setattr(host, "BOOT", boot.with_name("uuid"))
    assert int(elsewhere.stdout) != this_host()


def test_the_memory_of_a_host_is_cut_among_its_own_workers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    free = psutil.virtual_memory()._replace(available=1 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    config = EngineConfig(model="m", tp=4, dp=2)
    rooms = [
        cache_tokens(config, PER_TOKEN, 0, torch.device("cpu"), None, workers_on_host) for workers_on_host in (1, 2, 8)
    ]
    assert rooms == [4096, 2048, 512]
