"""Serve /v1/completions."""

from __future__ import annotations
