"""Turn a request's `stop_when` into a StopWhenRule: checked, with a compiled pattern."""

from __future__ import annotations

from tok_client.types import CompletionRequest, Distinct, Majority, UnsetType
from tok_core.text import Tokenizer
from tok_server.openai.generation.params import Request, value_or_none
from tok_server.parsing import NO_MARKUP, AnswerPattern, Markup, StopWhenRule
from tok_server.wire import invalid


def parse_stop_when(
    request: Request, *, n: int, prompts: int, tokenizer: Tokenizer | None, markup: Markup = NO_MARKUP
) -> StopWhenRule | None:
    """Return the request's rule, if it has one. Errors: ApiError."""
    condition = None if isinstance(request.stop_when, UnsetType) else request.stop_when
    if condition is None:
        return None
    _check_request(request, n, prompts, tokenizer)
    if isinstance(condition, Distinct):
        _check_number("stop_when.count", condition.count, n)
    if isinstance(condition, Majority):
        _check_number("stop_when.margin", condition.margin, n)
    return StopWhenRule(condition, AnswerPattern(condition.pattern), n, markup)


def _check_request(request: Request, n: int, prompts: int, tokenizer: Tokenizer | None) -> None:
    if n < 2:
        raise invalid("stop_when", f"stop_when needs several samples, but n is {n}; allowed: at least 2")
    if prompts > 1:
        raise invalid("stop_when", f"stop_when needs a single prompt, but the request has {prompts}")
    best_of = value_or_none(request.best_of) if isinstance(request, CompletionRequest) else None
    if best_of not in (None, n):
        raise invalid("stop_when", f"stop_when and best_of ({best_of}) exclude each other; allowed: one of them")
    if tokenizer is None:
        raise invalid("stop_when", "stop_when needs text, but the model has no tokenizer")


def _check_number(name: str, value: int, n: int) -> None:
    if not 1 <= value <= n:
        raise invalid(name, f"{name} is {value}; allowed: integers from 1 to n ({n})")
