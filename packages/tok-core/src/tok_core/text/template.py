"""ChatTemplate: messages to prompt text, by the model's own Jinja template, in a sandbox.

What templates may use is what they were written for: `messages`, `tools`, `documents`,
`add_generation_prompt`, the special tokens by role (`bos_token`, `eos_token`, ...), `raise_exception`,
`strftime_now`, the `tojson` filter that leaves HTML alone, loop controls, and the `generation` tag.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self

from tok_core.errors import InvalidField, ModelError
from tok_core.text.files import CONFIG, read_json, special_tokens

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATE = "chat_template.jinja"
MAX_REASON_CHARS = 1000  # characters of what a template says when it refuses messages


class ChatTemplate:
    """A model's chat template, or several by name.

    sources  name to Jinja source; "default" is required, "tool_use" taken when there are tools
    roles    role to special token, as variables of the template
    now      the clock behind `strftime_now`
    Errors: ModelError for a template that is not valid Jinja.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        roles: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        if "default" not in sources:
            raise ModelError(f"chat templates are {sorted(sources)}; one must be named 'default'")
        self._fixed: dict[str, object] = {
            **roles,
            "documents": None,
            "strftime_now": lambda form: now().strftime(form),
        }
        self._sources = dict(sources)
        environment = _environment()
        self._templates = {name: _compile(environment, name, source) for name, source in sources.items()}

    @classmethod
    def load(cls, path: str | Path, now: Callable[[], datetime] = datetime.now) -> Self:
        """Of a model directory. Errors: ModelError if there is none, or it cannot be used."""
        directory = Path(path)
        return cls(_sources(directory), special_tokens(directory), now)

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that the templates read and do not set themselves: `tools` and such, where they know of them."""
        from jinja2 import meta

        environment = _environment()
        read = (meta.find_undeclared_variables(environment.parse(source)) for source in self._sources.values())
        return frozenset().union(*read) - self._fixed.keys() - environment.globals.keys()

    def mentions(self, text: str) -> bool:
        """Whether `text` stands in a template's source: markup that it writes, the model writes too."""
        return any(text in source for source in self._sources.values())

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt's text; it holds its special tokens already, so encode it with add_special_tokens=False.

        variables  more of what the template reads, beside what it is always given, which goes first

        Errors: InvalidField("messages") with the template's own words where it refuses them.
        """
        if not messages:
            raise InvalidField("messages", messages, "at least one message")
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        given: dict[str, object] = {
            **(variables or {}),
            **self._fixed,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        from tok_core.text.meter import metered

        try:
            with metered():
                return self._templates[name](given)
        except Exception as error:  # the template is a program of others, run on the client's data
            allowed = f"messages that the model's chat template accepts; it says: {_short(error)}"
            raise InvalidField("messages", messages, allowed) from error


def _sources(directory: Path) -> dict[str, str]:
    file = directory / TEMPLATE
    if file.is_file():
        return {"default": file.read_text(encoding="utf-8")}
    match read_json(directory, CONFIG).get("chat_template"):
        case str(source):
            return {"default": source}
        case list(named):
            try:
                return {str(one["name"]): str(one["template"]) for one in named}
            except (KeyError, TypeError) as error:
                raise ModelError(f"{directory / CONFIG}: chat_template is malformed: {error!r}") from error
    raise ModelError(f"{directory} has no chat template: neither {TEMPLATE} nor chat_template in {CONFIG}")


def _compile(environment: Environment, name: str, source: str) -> Callable[[Mapping[str, object]], str]:
    from jinja2 import TemplateError

    try:
        return environment.from_string(source).render
    except TemplateError as error:
        raise ModelError(f"chat template {name!r} is not valid: {error}") from error


@lru_cache(maxsize=1)
def _environment() -> Environment:
    # Imported on first use: only processes that render chats pay for it.
    from jinja2.ext import loopcontrols

    from tok_core.text.generation_tag import GenerationTag
    from tok_core.text.metered import MeteredEnvironment

    environment = MeteredEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag])
    environment.filters["tojson"] = _tojson
    environment.meter_filters("tojson")
    environment.globals["raise_exception"] = _refuse
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _short(error: Exception) -> str:
    words = str(error)
    return words if len(words) <= MAX_REASON_CHARS else words[:MAX_REASON_CHARS] + "..."


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
