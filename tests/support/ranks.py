"""Run a function in several processes joined by gloo, like the workers of one replica, and return the results."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch

from support.fork_server import fork_server
from tok_core.config import RankCoordinates
from tok_core.parallel.process_groups import ProcessGroups, join

P = ParamSpec("P")
R = TypeVar("R")

PATIENCE = 240.0  # seconds for all ranks to finish


def run_ranks(
    coordinates_of_ranks: Iterable[RankCoordinates],
    function: Callable[Concatenate[ProcessGroups, P], R],
    *args: P.args,
    **kwargs: P.kwargs,
) -> list[R]:
    """Run `function(peers, *args, **kwargs)` in a process for each of these coordinates; return the results in order.

    The function must be importable by name, like the functions in `support`. Raise AssertionError with the tracebacks
    of failed processes; all processes end with the first failure, and with this process.
    """
    context = fork_server()
    results: dict[int, R] = {}
    with tempfile.TemporaryDirectory() as directory:
        pipes, children = {}, []
        for number, coordinates in enumerate(coordinates_of_ranks):
            here, there = context.Pipe(duplex=False)
            target = (there, coordinates, Path(directory) / "rendezvous", function, args, kwargs)
            children.append(context.Process(target=_run, args=target, daemon=True))
            children[-1].start()
            there.close()
            pipes[here] = number
        try:
            failures = _collect(dict(pipes), results)
            assert not failures, "\n".join(failures)
        finally:
            for child in children:
                child.kill()
            for child in children:
                child.join()
    return [results[number] for number in range(len(results))]


def _collect(pipes: dict[connection.Connection, int], results: dict[int, R]) -> list[str]:
    """Receive results into `results`; return the failures of processes."""
    deadline, failures = time.monotonic() + PATIENCE, list[str]()
    while pipes and not failures:
        ready = connection.wait(list(pipes), max(0.0, deadline - time.monotonic()))
        if not ready:
            return [f"no result within {PATIENCE:g} s of processes {sorted(pipes.values())}"]
        for pipe in ready:
            assert isinstance(pipe, connection.Connection)
            number = pipes.pop(pipe)
            try:
                good, value = pipe.recv()
            except EOFError:
                good, value = False, "the process ended"
            if good:
                results[number] = value
            else:
                failures.append(f"process {number}: {value}")
    return failures


def _run(
    pipe: connection.Connection,
    coordinates: RankCoordinates,
    rendezvous: Path,
    function: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send((True, function(join(coordinates, rendezvous, torch.device("cpu")), *args, **kwargs)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise
    # Stay alive until killed: data sent to other ranks may not have arrived, and would be lost with this process.
    parent = parent_process()
    assert parent is not None
    parent.join()
