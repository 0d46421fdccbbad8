"""Configure logging alike in all processes: as text, or as one JSON object per line (`JsonFormatter`)."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import msgspec

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
EXTRA_FIELDS = "fields"
"""Name of the attribute of a log record that holds extra fields, as a dict."""

_encode = msgspec.json.Encoder(enc_hook=str).encode


class JsonFormatter(logging.Formatter):
    """Formatter of records as `{"time": …, "level": …, "logger": …, "message": …}` plus the record's `EXTRA_FIELDS`.

    role  role of the process, added as "process"; None: not added
    """

    def __init__(self, role: str | None = None) -> None:
        super().__init__()
        self._own = {} if role is None else {"process": role}

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line; JSON escapes line breaks within it."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields: dict[str, object] = {
            "time": time,
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._own,
            "message": record.getMessage(),
            **getattr(record, EXTRA_FIELDS, {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return _encode(_escaped(fields)).decode()


def configure_logging(role: str, level: int, *, json: bool) -> None:
    """Configure logging of a process that an engine has started."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(role) if json else logging.Formatter(TEXT_FORMAT.replace("%(name)s", role)))
    logging.basicConfig(level=level, handlers=[handler], force=True)  # Ray has handlers of its own


def logs_json() -> bool:
    """Return whether this process logs as JSON, so that processes it starts do the same."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def _escaped(fields: dict[str, object]) -> dict[str, object]:
    """Escape lone surrogates, which JSON cannot hold."""
    return {
        name: value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
        for name, value in fields.items()
    }
