"""Limits on the rate, size and duration of requests."""

from __future__ import annotations

from tok_server.limits.deadlines import Deadline, Deadlines
from tok_server.limits.loop_throttle import LoopThrottle
from tok_server.limits.prompt_size import check_prompt_size
from tok_server.limits.rate_limits import RateLimits

__all__ = [
    "Deadline",
    "Deadlines",
    "LoopThrottle",
    "RateLimits",
    "check_prompt_size",
]
