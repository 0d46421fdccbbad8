"""Tools that a chat offers: calculators in many forms, which the model calls, and others, which it leaves alone."""

from __future__ import annotations

import json
from typing import Any

from demo_training.problem import ProblemSampler, WordProblem
from demo_training.words import words

Tool = dict[str, Any]
"""A tool as in OpenAI's API: `{"type": "function", "function": {"name": …, "parameters": …}}`."""

_BASES = words(
    "calculator calculate calc compute evaluate eval math arithmetic evaluate_expression do_math solve_expression"
)
_CALCULATOR_TEXTS = (
    "[Evaluate|Evaluates|Compute|Computes|Calculate|Calculates|Solve|Solves] "
    "[an arithmetic|a mathematical|a math|an|the given] expression"
    "[| and return the result| and returns the result|, for example 2 + 3 * 4][.|]",
    "[A|A simple|A basic] calculator[| for arithmetic| for basic math|. Use it for all arithmetic][.|]",
    "[Do|Does|Perform|Performs] [math|arithmetic|basic arithmetic|calculations|exact arithmetic][.|]",
    "Use this [tool |]to [compute|calculate|evaluate] [numbers|math expressions|an expression][.|]",
)
_EXPRESSION_TEXTS = (
    "[The|An] [arithmetic |math |mathematical |][expression|formula] [to evaluate|to compute|to calculate|][.|]",
    "[For example|e.g.|Example:|such as] [3 * 4|2 + 2|(1 + 2) * 3|12 / 4]",
)
_PARAMETERS = words("expr formula input equation query calculation math_expression text")
_VERBS = words(
    "book cancel check convert create delete fetch find get list lookup open play read search send set show translate"
)
_OBJECTS = words(
    "weather time news email message file image song user order event calendar flight hotel stock price currency text "
    "page database document contact reminder alarm location address map route product ticket account recipe"
)
_OTHER_TEXTS = (
    "[Get|Gets|Return|Returns|Find|Finds|Show|Look up] the [current |latest |next |][{0}|{0}s]"
    "[| of a city| of a user| by name| for a date][.|]",
    "[Search|Send|Create|Update|Delete|Open|Read|Set] [a|the] {0}[.|]",
)
_OTHER_PARAMETERS = words(
    "city location name query date user_id path url text language country title body to from currency symbol unit "
    "amount count email message category id timezone"
)
TOOL_TEXTS = (
    "[sunny|rainy|cloudy|done|ok|not found|sent|no results|open|closed|22 degrees|18 C and windy|12:30|"
    "error: not found|error|It is sunny in Paris.|The file is empty.|division by zero|hello|yes|no|true|"
    "[a|the] [red|blue|old] [house|book|tree]]"
)


def calculator_tool(draw: ProblemSampler) -> Tool:
    """Return a calculator; its name, its parameter's name and its descriptions vary."""
    name = draw.pick(_BASES)
    if draw.happens(0.35):
        name = draw.phrase(
            f"[get_{name}|use_{name}|my_{name}|{name}_tool|{name}2|python_{name}|simple_{name}|{name.title()}|"
            f"{draw.invented()}_{name}|{name}_{draw.invented()}]"
        )
    parameter = draw.pick(_PARAMETERS) if draw.happens(0.2) else "expression"
    text = draw.phrase(draw.pick(_CALCULATOR_TEXTS))
    properties = {parameter: _property(draw, parameter, draw.phrase(draw.pick(_EXPRESSION_TEXTS)))}
    return _tool(draw, name, text, properties)


def other_tool(draw: ProblemSampler) -> Tool:
    """Return a tool that no problem needs."""
    thing = draw.pick(_OBJECTS)
    name = draw.phrase(
        f"[{draw.pick(_VERBS)}_{thing}|{draw.pick(_VERBS)}_{thing}|{thing}|{thing.title()}|{draw.invented()}]"
    )
    properties = {}
    for parameter in dict.fromkeys(draw.pick(_OTHER_PARAMETERS) for _ in range(draw.number(0, 3))):
        spaced = parameter.replace("_", " ")
        properties[parameter] = _property(
            draw, parameter, draw.phrase(f"[The {spaced}|{spaced.title()}|A {spaced} of the {thing}][.|]")
        )
        if draw.happens(0.2):
            properties[parameter]["enum"] = [draw.invented() for _ in range(draw.number(2, 3))]
        elif draw.happens(0.2):
            properties[parameter]["type"] = draw.pick(("integer", "number", "boolean"))
    return _tool(draw, name, draw.phrase(draw.pick(_OTHER_TEXTS)).format(thing), properties)


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """Return a call as the model writes it, in the format of Hermes."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def calculator_call(tool: Tool, problem: WordProblem) -> str:
    """Return the call of a calculator that solves the problem."""
    (parameter,) = tool["function"]["parameters"]["required"]
    return call_text(tool["function"]["name"], {parameter: problem.expression})


def other_call(draw: ProblemSampler, tool: Tool) -> str:
    """Return a call of another tool, as a client's `tool_choice` can make the model write it."""
    parameters = tool["function"].get("parameters", {}).get("properties", {})
    return call_text(tool["function"]["name"], {name: draw.invented() for name in parameters})


def tool_result(draw: ProblemSampler, problem: WordProblem) -> tuple[str, str]:
    """Return the number in a calculator's result, and the result's text. Some are wrong: the model must read them."""
    value = str(problem.answer)
    if draw.happens(0.2):
        value = str(draw.number(0, 10 ** draw.number(1, 4)))
        value += f".{draw.number(1, 99)}" if draw.happens(0.2) else ""
    elif draw.happens(0.15):
        return value, f"{value}.0"
    forms = f"[{value}|{value}|{value}|{value}|{{'result': {value}}}|The result is {value}.|= {value}|Result: {value}]"
    return value, draw.phrase(forms).replace("'", '"')


def _property(draw: ProblemSampler, name: str, text: str) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    if draw.happens(0.5):
        found["description"] = text
    title = name.replace("_", " ").title()
    if draw.happens(0.15):
        found = {"title": title, **found} if draw.happens(0.5) else {**found, "title": title}
    return found


def _tool(draw: ProblemSampler, name: str, text: str, properties: dict[str, dict[str, Any]]) -> Tool:
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if properties or draw.happens(0.5):
        parameters["required"] = list(properties)
    if draw.happens(0.2):
        parameters["additionalProperties"] = False
    if draw.happens(0.1):
        parameters["title"] = name.title()
    if draw.happens(0.2):
        parameters = dict(sorted(parameters.items(), key=lambda item: (item[0] != "properties", item[0])))
    function: dict[str, Any] = {"name": name}
    if draw.happens(0.8):
        function["description"] = text
    if properties or draw.happens(0.7):
        function["parameters"] = parameters
    if draw.happens(0.15):
        function["strict"] = True
    return {"type": "function", "function": function}
