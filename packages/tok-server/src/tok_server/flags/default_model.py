"""The default model: the demo model within this package."""

from __future__ import annotations

from pathlib import Path

DEMO_NAME = "tok-demo"
DEMO_MODEL = Path(__file__).parent.parent / "demo" / "model"


def model_and_name(model: str | None) -> tuple[str, str]:
    """Return the model that the engine loads, and the name under which it is served."""
    if model is None:
        return str(DEMO_MODEL), DEMO_NAME
    directory = Path(model).expanduser()
    return model, directory.resolve().name if directory.is_dir() else model
