"""pass@k: how likely it is that one of k samples solves a problem, over a file of problems."""

from __future__ import annotations

from tok_server.passatk.answers import AnswerPattern, Task, read_tasks
from tok_server.passatk.estimator import Coverage, coverage, estimate_pass_at_k

__all__ = ["AnswerPattern", "Coverage", "Task", "coverage", "estimate_pass_at_k", "read_tasks"]
