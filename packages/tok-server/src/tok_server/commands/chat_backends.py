"""Back ends of a terminal chat: a model loaded into this process, or one behind a URL."""

from __future__ import annotations

import argparse
import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from functools import partial
from typing import TypeVar

import tok_client
from tok_client.types import UNSET
from tok_core import AsyncEngine, InvalidField, ModelError, SamplingParams
from tok_server.flags import CHAT_TEMPERATURE, engine_config

T = TypeVar("T")
Piece = str | Exception | None
Message = dict[str, str]


class LocalChatBackend:
    """A model in this process. The engine's event loop runs in a separate thread, so that the terminal may block."""

    def __init__(self, options: argparse.Namespace) -> None:
        config = engine_config(options)
        overrides = {} if options.temperature is None else {"temperature": options.temperature}
        SamplingParams(**overrides, max_tokens=options.max_tokens)  # raises InvalidField before the model is loaded
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-loop", daemon=True)
        self._thread.start()
        self._engine = AsyncEngine(config)
        try:
            self._run(self._engine.start())
            sampling = {"temperature": CHAT_TEMPERATURE, **self._engine.info.sampling_defaults, **overrides}
            self._params = SamplingParams(**sampling, max_tokens=options.max_tokens)
            if self._engine.chat_template is None or self._engine.tokenizer is None:
                lacking = "usable tokenizer" if self._engine.tokenizer is None else "chat template"
                raise ModelError(f"model {config.model!r}: has no {lacking}, which a chat needs")
        except BaseException:
            self.close()
            raise

    def reply(self, messages: list[Message]) -> Generator[str]:
        """Yield the answer piece by piece. Closing the generator early aborts the request.

        Errors: InvalidField, EngineError.
        """
        engine = self._engine
        assert engine.chat_template is not None
        assert engine.tokenizer is not None
        text = engine.chat_template.render(messages)
        prompt = engine.tokenizer.encode(text, add_special_tokens=False)
        pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        tasks: list[asyncio.Task[None]] = []
        # The loop's thread makes the coroutine: one made here would never be awaited if Ctrl-C came just then.
        start = partial(_start_task, partial(self._forward, prompt, pieces), tasks)
        try:
            self._loop.call_soon_threadsafe(start)
            while (piece := _next(pieces)) is not None:
                if isinstance(piece, Exception):
                    raise piece
                yield piece
        finally:
            self._loop.call_soon_threadsafe(_cancel, tasks)

    def close(self) -> None:
        """Close the engine and end its thread."""
        self._run(self._engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _forward(self, prompt: list[int], pieces: queue.SimpleQueue[Piece]) -> None:
        """Put the answer's pieces into `pieces`, then the exception that ended it, or None. Cancellation aborts it."""
        try:
            stream = self._engine.generate(prompt, self._params)
            try:
                async for delta in stream:
                    if delta.text:
                        pieces.put(delta.text)
            finally:
                stream.abort()
            pieces.put(None)
        except Exception as error:
            pieces.put(error)

    def _run(self, work: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _next(pieces: queue.SimpleQueue[Piece]) -> Piece:
    """Return the next piece.

    The wait is split into intervals of 0.5 s, because a signal that arrives just before a wait does not interrupt it.
    """
    while True:
        with suppress(queue.Empty):
            return pieces.get(timeout=0.5)


def _start_task(function: Callable[[], Coroutine[object, object, None]], tasks: list[asyncio.Task[None]]) -> None:
    tasks.append(asyncio.get_running_loop().create_task(function()))


def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()


class RemoteChatBackend:
    """The model of an OpenAI-compatible server; the first one that it lists if none is named."""

    def __init__(self, options: argparse.Namespace) -> None:
        try:
            self._client = tok_client.Client(options.url, api_key=options.api_key)
        except ValueError as error:
            if str(error).startswith("api_key"):
                raise InvalidField("api_key", "***", "printable ASCII") from None
            raise InvalidField("url", options.url, f"a URL such as http://host:port ({error})") from error
        self._temperature = UNSET if options.temperature is None else options.temperature
        self._max_tokens = options.max_tokens
        try:
            self._model = options.model or self._client.models.list().data[0].id
        except BaseException:
            self.close()
            raise

    def reply(self, messages: list[Message]) -> Generator[str]:
        """Yield the answer piece by piece. Closing the generator early disconnects. Errors: tok_client.TokError."""
        chunks = self._client.chat.completions.create(
            model=self._model,
            messages=messages,
            temperature=self._temperature,
            max_tokens=self._max_tokens,
            stream=True,
        )
        with chunks:
            for chunk in chunks:
                for choice in chunk.choices:
                    if isinstance(choice.delta.content, str) and choice.delta.content:
                        yield choice.delta.content

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
