"""Import xgrammar without torch and transformers, which it imports but needs not here: seconds and 500 MB.

It wants torch for masks that are tensors, and transformers to read tokenizers; here masks are NumPy's, and the pieces
of a vocabulary are given. A process that has torch has paid for it already, and gets xgrammar as it is.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from types import ModuleType

UNUSED = ("torch", "transformers")


class _Names(ModuleType):
    """A module that has every name, as a class of its own that does nothing."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        found = type(name, (), {"__init__": lambda self, *args, **more: None})
        setattr(self, name, found)
        return found


def preload() -> None:
    """Imports xgrammar, for a process of the engine's own: meanwhile no other thread may import what it goes without.

    Where torch is there already, it leaves that to whoever needs xgrammar.
    """
    if "torch" in sys.modules or "xgrammar" in sys.modules:
        return
    missing = [name for name in UNUSED if name not in sys.modules]
    try:
        sys.modules["torch"] = None  # type: ignore[assignment]  # the library beneath xgrammar goes without
        with suppress(ImportError):
            import_module("tvm_ffi")
        sys.modules |= {name: _Names(name) for name in missing}
        import_module("xgrammar")
    except Exception:  # a version that does use them: whoever needs it imports it whole
        for name in [name for name in sys.modules if name.partition(".")[0] == "xgrammar"]:
            del sys.modules[name]
    finally:
        for name in missing:
            sys.modules.pop(name, None)
