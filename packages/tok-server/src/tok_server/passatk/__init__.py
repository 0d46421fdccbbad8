"""pass@k: how likely it is that one of k samples solves a problem, over a file of problems."""

from __future__ import annotations

from tok_server.passatk.answers import EvalTask, FinalAnswerPattern, read_tasks
from tok_server.passatk.estimator import Coverage, coverage, estimate_pass_at_k

__all__ = ["Coverage", "EvalTask", "FinalAnswerPattern", "coverage", "estimate_pass_at_k", "read_tasks"]
