"""Speculative decoding: draft tokens, by n-grams or by a draft model, and verify several in one step."""

from __future__ import annotations

from tok_core.manager.speculation.device_speculator import DeviceSpeculator
from tok_core.manager.speculation.drafts import NO_ROWS, Drafts, Speculation
from tok_core.manager.speculation.host_speculator import HostSpeculator

__all__ = ["NO_ROWS", "DeviceSpeculator", "Drafts", "HostSpeculator", "Speculation"]
