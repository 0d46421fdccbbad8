"""Sandbox in which chat templates render, with limits on CPU time and written text.

The operator chooses a template with its model; Jinja's sandbox keeps it from Python. Messages, tools and variables come
from requests: with some of them, published templates take time or write text that grows with the request's square.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDER_SECONDS = 2.0  # CPU seconds of one rendering; 14,000 messages, as many as a body may hold, take 0.1
MAX_RENDER_CHARS = 1 << 26  # characters that one rendering writes


class _Limits:
    """Time at which one rendering must have ended, and characters that it may still write."""

    def __init__(self) -> None:
        self.deadline = time.thread_time() + MAX_RENDER_SECONDS
        self.chars = MAX_RENDER_CHARS


_LIMITS: ContextVar[_Limits | None] = ContextVar("limits", default=None)


@contextmanager
def limited() -> Iterator[None]:
    """Limit the rendering within this context. Outside, where Jinja folds constants, nothing is limited."""
    token = _LIMITS.set(_Limits())
    try:
        yield
    finally:
        _LIMITS.reset(token)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox. It checks the time in each loop iteration and macro call, and counts written text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_count_chars, **options)
        self.filters["check_time"] = _check_time

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for one in source.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)):
            assert isinstance(one, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block)
            # A filter, because the sandbox examines each call.
            one.body.insert(0, nodes.ExprStmt(nodes.Filter(nodes.Const(None), "check_time", [], [], None, None)))
        return super()._generate(source, *args, **kwargs)


@pass_context  # so that Jinja does not take the result for a constant
def _check_time(context: Context, value: None) -> None:
    limits = _LIMITS.get()
    if limits is not None and time.thread_time() > limits.deadline:
        raise SecurityError(f"the template takes more than {MAX_RENDER_SECONDS:g} s of a CPU for this request")


def _count_chars(value: object) -> str:
    """Return a value that is about to be written as text."""
    text, limits = str(value), _LIMITS.get()
    if limits is not None:
        limits.chars -= len(text)
        if limits.chars < 0:
            raise SecurityError(f"the template writes more than {MAX_RENDER_CHARS:,} characters for this request")
    return text
