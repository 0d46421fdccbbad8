"""Turn a request's `stop_when` into a StopWhenRule: checked, with a compiled pattern."""

from __future__ import annotations

from tok_client.types import CompletionRequest, Distinct, Majority, UnsetType
from tok_core.text import Tokenizer
from tok_server.openai.generation.params import Request, given
from tok_server.parsing import NO_MARKUP, AnswerPattern, Markup, StopWhenRule
from tok_server.wire import invalid


def rule_of(
    request: Request, *, n: int, prompts: int, tokenizer: Tokenizer | None, markup: Markup = NO_MARKUP
) -> StopWhenRule | None:
    """Return the request's rule, if it has one. Errors: ApiError."""
    wanted = None if isinstance(request.stop_when, UnsetType) else request.stop_when
    if wanted is None:
        return None
    _check_request(request, n, prompts, tokenizer)
    if isinstance(wanted, Distinct):
        _check_number("stop_when.count", wanted.count, n)
    if isinstance(wanted, Majority):
        _check_number("stop_when.margin", wanted.margin, n)
    return StopWhenRule(wanted, AnswerPattern(wanted.pattern), n, markup)


def _check_request(request: Request, n: int, prompts: int, tokenizer: Tokenizer | None) -> None:
    if n < 2:
        raise invalid("stop_when", f"stop_when is about several samples, n is {n}; allowed with it: at least 2")
    if prompts > 1:
        raise invalid("stop_when", f"stop_when is about samples of one prompt; there are {prompts}")
    best_of = given(request.best_of) if isinstance(request, CompletionRequest) else None
    if best_of not in (None, n):
        raise invalid("stop_when", f"stop_when and best_of ({best_of}) exclude each other; allowed: one of them")
    if tokenizer is None:
        raise invalid("stop_when", "stop_when is about texts, but the model has no tokenizer")


def _check_number(name: str, value: int, n: int) -> None:
    if not 1 <= value <= n:
        raise invalid(name, f"{name} is {value}; allowed: integers from 1 to n ({n})")
