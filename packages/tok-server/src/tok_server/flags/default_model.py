"""The model that is served when none is named: the demo model within this package."""

from __future__ import annotations

from pathlib import Path

DEMO_NAME = "tok-demo"
DEMO_MODEL = Path(__file__).parent.parent / "demo" / "model"


def model_and_name(model: str | None) -> tuple[str, str]:
    """What the engine shall load, and the name under which it is served."""
    if model is None:
        return str(DEMO_MODEL), DEMO_NAME
    directory = Path(model).expanduser()
    return model, directory.resolve().name if directory.is_dir() else model
