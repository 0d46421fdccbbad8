"""Sandbox in which templates render, with limits on output, memory and CPU time.

A template is a program written by the model's author. The sandbox keeps it from Python, and the meter keeps it from
taking all time and memory. Each loop iteration, macro call, operator, filter and method is charged with its size.
Results that can be far larger than their inputs (a text times a number, a list written out) are charged before they are
made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from tok_core.text.meter import ELEMENT, PIECE, charge, size, weight, weights

Text = str | bytes

MAX_NUMBER_BITS = 4096  # bits of a computed integer
AMPLIFYING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "translate", "format_map", "to_bytes"})
"""Methods whose results can be large however small their arguments are. No chat template needs them."""
REMOVED_FILTERS = frozenset({"batch", "center", "slice", "sum", "wordcount", "wordwrap", "xmlattr", "urlize", "pprint"})
"""Filters of the same kind, which are removed."""
UNNEEDED_GLOBALS = ("lipsum", "cycler", "joiner")
UNCHARGED_FILTERS = frozenset({
    *("length", "count", "first", "last", "default", "d", "items", "map", "select", "reject", "selectattr"),
    *("rejectattr", "reverse", "attr", "random", "abs", "int", "float", "round", "min", "max"),
})  # fmt: skip
"""Filters that do not write out their arguments, whose weight therefore does not matter."""
_TOO_WIDE = re.compile(rb"\d{5}|\*|\{[^{}]*\{")  # a width of five digits or more, or a computed one


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, metered; see `tok_core.text.meter`."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_written, **options)
        for name in UNNEEDED_GLOBALS:
            del self.globals[name]
        self.filters = {name: made for name, made in self.filters.items() if name not in REMOVED_FILTERS}
        self.meter_filters(*self.filters)

    def meter_filters(self, *names: str) -> None:
        """Charge the named filters, which were added to the environment."""
        for name in names:
            self.filters[name] = _metered(name, self.filters[name])

    def turn(self, cost: int) -> bool:
        """Charge a loop iteration or macro call; `cost` includes the text in it. Return True, for use in conditions."""
        charge(cost)
        return True

    def joined(self, *values: object) -> str:
        """Charge and return `a ~ b`."""
        charge(weights(values))
        return "".join(map(str, values))

    def charged(self, value: object) -> object:
        """Charge a new value and return it."""
        charge(size(value))
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator; charge large results before they are made."""
        if operator in ("*", "**"):
            charge(_product(operator, left, right))
        elif operator == "%" and isinstance(left, Text):
            _charge_format(left, b"%", right if isinstance(right, tuple) else (right,))
        return self.charged(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call `obj`; charge the arguments of text methods, and the result."""
        method = getattr(obj, "__wrapped__", obj)  # `format` is wrapped by the sandbox
        owner = getattr(method, "__self__", None)
        if isinstance(owner, Text):
            args = _charge_text(method.__name__, owner, args, kwargs)
        return self.charged(super().call(context, obj, *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Also refuse the methods in AMPLIFYING."""
        return super().is_safe_attribute(obj, attr, value) and attr not in AMPLIFYING

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for one in source.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)):
            assert isinstance(one, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block)
            turn = _call("turn", nodes.Const(ELEMENT + _text_in(one)))
            one.body.insert(0, nodes.ExprStmt(turn))
            if isinstance(one, nodes.For) and one.test is not None:
                one.test = nodes.And(_call("turn", nodes.Const(ELEMENT)), one.test)
        return super()._generate(_Charges().visit(source), *args, **kwargs)


class _Charges(NodeTransformer):
    """Node transformer that replaces expressions that the sandbox does not intercept with calls of the environment."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", *node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _call("charged", node) if isinstance(node.arg, nodes.Slice) else node


def _call(method: str, *arguments: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), list(arguments), [], None, None)


def _text_in(node: nodes.Node) -> int:
    written = sum(len(one.data) for one in node.find_all(nodes.TemplateData))
    return written + sum(len(one.value) for one in node.find_all(nodes.Const) if isinstance(one.value, str))


def _written(value: Any) -> Any:
    """Charge a value that is about to be written, and return it: for `finalize`."""
    charge(weight(value))
    return value


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter with charges, and with the attributes that Jinja has set on it."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        own = args[hasattr(function, "jinja_pass_arg") :]  # without the environment or context
        value, more = (own[0], own[1:]) if own else (None, ())
        if isinstance(value, Iterator):
            value = list(value)
            charge(size(value))
            args = (*args[: len(args) - len(own)], value, *more)
        if name not in UNCHARGED_FILTERS:
            _charge_filter(name, value, (*more, *kwargs.values()))
        result = function(*args, **kwargs)
        charge(size(result))
        return result

    return run


def _charge_filter(name: str, value: Any, more: tuple[Any, ...]) -> None:
    charge(weight(value) + weights(more))
    if name == "list" and isinstance(value, Text):
        charge(PIECE * len(value))
    elif name == "format" and isinstance(value, Text):
        _charge_format(value, b"%", more)
    elif name == "replace" and len(more) >= 2:
        charge(str(value).count(str(more[0])) * len(str(more[1])))
    elif name == "join" and more:
        charge(size(value) * len(str(more[0])))
    elif name in ("indent", "tojson"):
        widest = max((one if isinstance(one, int) else weight(one) for one in more), default=0)
        charge(widest * (str(value).count("\n") + 1 if name == "indent" else weight(value)))


def _charge_text(name: str, owner: Text, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Charge a method of a text. Return its arguments, with iterators read into lists."""
    args = tuple(list(one) if isinstance(one, Iterator) else one for one in args)
    charge(len(owner) + weights(args) + weights(kwargs.values()))
    if name == "format":
        _charge_format(owner, b"{", (*args, *kwargs.values()))
    elif name == "join" and args:
        charge(size(args[0]) * len(owner))
    elif name == "replace" and len(args) >= 2 and isinstance(args[0], Text):
        charge(_count(owner, args[0]) * size(args[1]))
    elif name in ("split", "rsplit"):
        separator = args[0] if args else kwargs.get("sep")
        pieces = len(owner) // 2 if separator is None else _count(owner, separator)
        charge(PIECE * pieces)
    elif name == "splitlines":
        charge(PIECE * len(owner) // 4)
    return args


def _count(owner: Any, part: Any) -> int:
    """Return how often `part` occurs in `owner`; the empty text occurs at every position."""
    return int(owner.count(part)) if type(owner) is type(part) else 0


def _charge_format(form: Text, mark: bytes, given: tuple[Any, ...]) -> None:
    """Charge for each mark the weight of all arguments, because each may write all of them out.

    Raise SecurityError if a width has more than four digits or is computed.
    """
    raw = form if isinstance(form, bytes) else form.encode(errors="replace")
    if mark in raw and _TOO_WIDE.search(raw):
        raise SecurityError("the template formats with a width that is too large, or computed")
    charge((raw.count(mark) + 1) * (weights(given) + 10_000 * bool(re.search(rb"\d{3}", raw))))


def _product(operator: str, left: Any, right: Any) -> int:
    """Return the size of a product, from its factors. Raise SecurityError for numbers beyond MAX_NUMBER_BITS."""
    for one, other in ((left, right), (right, left)):
        if isinstance(one, Text | list | tuple) and isinstance(other, int):
            return size(one) * max(other, 0)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_NUMBER_BITS:
            raise SecurityError("the template computes a number that is too large")
    return 1
