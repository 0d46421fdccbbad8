"""Support the `generation` tag of chat templates, which marks the assistant's text for training: render its body."""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class GenerationTag(Extension):
    """Jinja extension for `{% generation %}...{% endgeneration %}`: renders the body in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the tag and return its node."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
