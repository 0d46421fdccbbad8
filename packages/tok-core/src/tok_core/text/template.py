"""Render chat messages to prompt text with the model's own Jinja template, in a sandbox.

Templates can use the names that they are written for: `messages`, `tools`, `documents`, `add_generation_prompt`, the
special tokens by role (`bos_token`, `eos_token`, ...), `raise_exception`, `strftime_now`, the `tojson` filter without
HTML escaping, loop controls, and the `generation` tag.
"""

from __future__ import annotations

import json
import re
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
NAMED_TEMPLATES = "additional_chat_templates"  # directory of templates with other names than "default"
_NULL_CONTENT = re.compile(r"content['\"\]]*\s+is\s+(not\s+)?none\b", re.IGNORECASE)
MAX_REASON_CHARS = 1000  # characters quoted from a template's error message


class ChatTemplate:
    """Chat template of a model, or several by name.

    sources  Jinja source by name; "default" is required, "tool_use" is used if there are tools
    roles    special token by role, as template variables
    now      clock for `strftime_now`

    Raises ModelError for a template that is not valid Jinja.
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
        self.sources = dict(sources)
        environment = _environment()
        self._templates = {name: _compile(environment, name, source) for name, source in sources.items()}

    @classmethod
    def load(cls, path: str | Path, now: Callable[[], datetime] = datetime.now) -> Self:
        """Load from a model directory. Raise ModelError if it has no template or an unusable one."""
        directory = Path(path)
        return cls(_sources(directory), special_tokens(directory), now)

    @cached_property
    def variables(self) -> frozenset[str]:
        """Return names that the templates read, neither set by themselves nor always given: for example `tools`."""
        from jinja2 import meta

        environment = _environment()
        read = (meta.find_undeclared_variables(environment.parse(source)) for source in self.sources.values())
        return frozenset().union(*read) - self._fixed.keys() - environment.globals.keys()

    def mentions(self, text: str) -> bool:
        """Return whether a template's source contains `text`: the model also writes markup that the template writes."""
        return any(text in source for source in self.sources.values())

    @cached_property
    def tests_null_content(self) -> bool:
        """Return whether a template treats messages whose content is None in another way than those without text."""
        return any(_NULL_CONTENT.search(source) for source in self.sources.values())

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt's text. It contains its special tokens already: encode it with add_special_tokens=False.

        variables  further variables of the template; those that it is always given take precedence

        Raise InvalidField("messages"), with the template's own message, if the template refuses them.
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
        from tok_core.text.sandbox import limited

        try:
            with limited():
                return self._templates[name](given)
        except Exception as error:  # the template is third-party code, run on the client's data
            allowed = f"messages that the model's chat template accepts; it says: {_short(error)}"
            raise InvalidField("messages", messages, allowed) from error


def _sources(directory: Path) -> dict[str, str]:
    files = {file.stem: file for file in sorted((directory / NAMED_TEMPLATES).glob("*.jinja"))}
    if (directory / TEMPLATE).is_file():
        files["default"] = directory / TEMPLATE
    if files:
        return {name: _read(file) for name, file in files.items()}
    match read_json(directory, CONFIG).get("chat_template"):
        case str(source):
            return {"default": source}
        case list(named):
            try:
                return {str(one["name"]): str(one["template"]) for one in named}
            except (KeyError, TypeError) as error:
                raise ModelError(f"{directory / CONFIG}: chat_template is malformed: {error!r}") from error
    raise ModelError(f"{directory} has no chat template: neither {TEMPLATE} nor chat_template in {CONFIG}")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _compile(environment: Environment, name: str, source: str) -> Callable[[Mapping[str, object]], str]:
    from jinja2 import TemplateError

    try:
        return environment.from_string(source).render
    except TemplateError as error:
        raise ModelError(f"chat template {name!r} is not valid: {error}") from error


@lru_cache(maxsize=1)
def _environment() -> Environment:
    # Jinja is imported on first use, so that only processes that render chats pay for it.
    from jinja2.ext import loopcontrols

    from tok_core.text.generation_tag import GenerationTag
    from tok_core.text.sandbox import LimitedEnvironment

    environment = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag])
    environment.filters["tojson"] = _tojson
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
