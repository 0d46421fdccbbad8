"""Start servers with batches, and `tok batch`, on a tiny model in processes that tests can kill."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from support.fork_server import fork_server
from support.patience import PATIENCE
from support.serving import serving
from tok_core import AsyncEngine, EngineConfig
from tok_server import Settings
from tok_server import serve as serve_module
from tok_server.batch.offline.offline import OfflineBatch


def killed_server(model: Path, data_dir: Path) -> AbstractContextManager[tuple[ForkServerProcess, int]]:
    """Start a server process and yield it with its port once it answers; kill it when the context ends."""
    return _server_process(_serve, model, data_dir)


def told_server(model: Path, data_dir: Path) -> AbstractContextManager[tuple[ForkServerProcess, int]]:
    """Like `killed_server`, but the process runs `serve`, which handles signals."""
    return _server_process(_serve_until_told, model, data_dir)


@contextmanager
def _server_process(
    work: Callable[[Path, Path, Connection], None], model: Path, data_dir: Path
) -> Iterator[tuple[ForkServerProcess, int]]:
    ours, theirs = fork_server().Pipe()
    process = fork_server().Process(target=work, args=(model, data_dir, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(PATIENCE), "the server did not start"
        yield process, ours.recv()
    finally:
        process.kill()
        process.join(PATIENCE)
        ours.close()


def _serve(model: Path, data_dir: Path, port: Connection) -> None:
    with serving(model, data_dir=str(data_dir)) as server:
        port.send(server.port)
        signal.pause()


def _serve_until_told(model: Path, data_dir: Path, port: Connection) -> None:
    # The engine runs in threads, since daemon processes may not have children.
    serve_module.AsyncEngine = partial(AsyncEngine, in_process=True)  # type: ignore[assignment,attr-defined]
    config = EngineConfig(model=str(model), device="cpu", kv_cache_tokens=16_384, max_running=64)
    settings = Settings(model_name="tiny", port=0, data_dir=str(data_dir), drain_timeout=PATIENCE)
    asyncio.run(serve_module.serve(config, settings, lambda _, number: port.send(number)))


def answer_file(model: Path, file: Path, output: Path, *, stops: bool = False) -> tuple[ForkServerProcess, Connection]:
    """Start `tok batch` with its engine in-process; return it and a connection that is readable after the first answer.

    stops  the process then sends itself SIGSTOP in the middle of its work
    """
    ours, theirs = fork_server().Pipe()
    process = fork_server().Process(target=_answer, args=(model, file, output, theirs, stops), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _answer(model: Path, file: Path, output: Path, committed: Connection, stops: bool) -> None:
    async def tell(work: OfflineBatch) -> None:
        while not work.totals.completed:
            await asyncio.sleep(0.001)
        committed.send(True)
        if stops:
            os.kill(os.getpid(), signal.SIGSTOP)

    async def answer(work: OfflineBatch) -> None:
        config = EngineConfig(model=str(model), device="cpu", kv_cache_tokens=16_384, max_running=64)
        engine = AsyncEngine(config, in_process=True)
        await work.check()
        await engine.start()
        telling = asyncio.create_task(tell(work))
        try:
            await work.answer(engine)
        finally:
            telling.cancel()
            await engine.close()

    with OfflineBatch(file, output, "tiny") as work:
        asyncio.run(answer(work))
