"""An OpenAI-compatible server for the tok inference engine, and the `tok` command."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from tok_server.settings import Settings

if TYPE_CHECKING:
    from tok_server.app import make_app

__all__ = ["Settings", "__version__", "make_app"]

__version__ = version("tok-server")


def __getattr__(name: str) -> object:
    # Imported on first use, so that the command line answers --help without loading the web stack.
    if name == "make_app":
        from tok_server.app import make_app

        return make_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
