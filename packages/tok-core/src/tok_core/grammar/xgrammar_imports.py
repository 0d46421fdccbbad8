"""Import xgrammar without torch and transformers, which it imports but does not need here: seconds and 500 MB.

xgrammar uses torch for mask tensors and transformers to read tokenizers. Here masks are NumPy arrays, and the compiler
passes the vocabulary's pieces itself. A process that has imported torch already imports xgrammar unchanged.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from types import ModuleType

UNUSED = ("torch", "transformers")


class _Names(ModuleType):
    """Stub module in which every name is a class that does nothing."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        found = type(name, (), {"__init__": lambda self, *args, **more: None})
        setattr(self, name, found)
        return found


def preload() -> None:
    """Import xgrammar with stubs for torch and transformers, in a process of the engine's own.

    No other thread may import these modules meanwhile. If torch is already loaded, do nothing: a later import loads
    xgrammar unchanged.
    """
    if "torch" in sys.modules or "xgrammar" in sys.modules:
        return
    missing = [name for name in UNUSED if name not in sys.modules]
    try:
        sys.modules["torch"] = None  # type: ignore[assignment]  # tvm_ffi, which xgrammar imports, works without torch
        with suppress(ImportError):
            import_module("tvm_ffi")
        sys.modules |= {name: _Names(name) for name in missing}
        import_module("xgrammar")
    except Exception:  # an xgrammar version that does use them: a later import loads it unchanged
        for name in [name for name in sys.modules if name.partition(".")[0] == "xgrammar"]:
            del sys.modules[name]
    finally:
        for name in missing:
            sys.modules.pop(name, None)
