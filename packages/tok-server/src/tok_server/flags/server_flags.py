"""Flags of `tok serve` that make its `Settings`: address, access, limits, logging."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal, get_args, get_origin

import msgspec

from tok_core import InvalidField
from tok_server.settings import Formats, ReasoningParser, Settings, ToolCallParser

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")

API_KEYS_VARIABLE = "TOK_API_KEY"
"""Environment variable with API keys, separated by commas."""
ADMIN_KEY_VARIABLE = "TOK_ADMIN_KEY"
"""Environment variable with the key for /admin/."""

MAX_NAME_CHARS = 60  # characters of a model's name in a directory's name: at most 240 of 255 bytes
LIMITS = {
    "max_connections": ("N", "maximum number of open connections"),
    "max_header": ("BYTES", "maximum size of the request line and of each header line"),
    "max_body": (
        "BYTES",
        "maximum size of a JSON body or batch line; other requests wait while a large body is decoded",
    ),
    "max_bodies": ("BYTES", "maximum total size of the request bodies held at once"),
    "max_file": ("BYTES", "maximum size of an uploaded file"),
    "data_quota": ("BYTES", "maximum total size of files and batch outputs in --data-dir; uploads beyond it get 507"),
    "max_unread": ("BYTES", "maximum output buffered for a client that does not read; beyond it, its stream ends"),
    "max_n": ("N", "maximum number of samples per prompt"),
    "min_client_priority": ("N", "smallest `priority` that clients may request; smaller values preempt larger ones"),
    "max_queued": ("N", "maximum number of prompts waiting for the engine, batches excluded; further requests get 429"),
    "rate_limit_requests": ("N", "maximum requests per minute and API key, batch lines excluded; more get 429"),
    "rate_limit_tokens": (
        "N",
        "maximum prompt and output tokens per minute and API key, batches excluded; more get 429",
    ),
    "header_timeout": ("S", "seconds in which the headers of a request must arrive"),
    "body_timeout": ("S", "seconds in which the body of a request must arrive"),
    "write_timeout": ("S", "seconds after which a client that does not read its response is disconnected"),
    "idle_timeout": ("S", "seconds after which an idle connection is closed"),
    "request_timeout": ("S", "maximum seconds to answer a request"),
    "drain_timeout": ("S", "seconds that open requests get to finish when the server stops"),
}


def add_server(group: argparse._ActionsContainer) -> None:
    """Add the flags for the address, access and logging."""
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s, this machine only; 0.0.0.0: all addresses)",
    )
    group.add_argument(
        "--port", type=int, default=10210, help="port to listen on (default: %(default)s; 0: any free port)"
    )
    _repeatable_flag(
        group, "--api-key", "KEY", f"API key that clients must send; may be repeated (also: ${API_KEYS_VARIABLE})"
    )
    group.add_argument("--api-key-file", metavar="FILE", help="file with API keys, one per line")
    group.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names of the model; answers show the first, requests may use any (default: its directory or hub id)",
    )
    text = "share cached prefixes between API keys; cached_tokens then reveals what other keys have sent"
    group.add_argument("--share-prefixes", action="store_true", help=text)
    group.add_argument(
        "--admin-key",
        metavar="KEY",
        help=f"key for /admin/, which is not served without it (also: ${ADMIN_KEY_VARIABLE})",
    )
    text = "serve the endpoints of trainers: pause, resume, load other weights; any client with an API key can use them"
    group.add_argument("--enable-rl", action="store_true", help=text)
    group.add_argument("--tls-cert", metavar="FILE", help="certificate (PEM); the server then speaks HTTPS")
    group.add_argument("--tls-key", metavar="FILE", help="private key of --tls-cert (PEM; default: same file)")
    _repeatable_flag(group, "--allow-origin", "URL", "allow web pages of this origin (CORS); may be repeated; *: any")
    text = "accept this name in the Host header; may be repeated; *: any (default: on loopback, only localhost and IPs)"
    _repeatable_flag(group, "--allowed-host", "NAME", text)
    text = "minimum level of log lines (default: %(default)s)"
    group.add_argument("--log-level", choices=LOG_LEVELS, default="info", help=text)
    group.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default="text",
        help="log format; json: one object per line (default: %(default)s)",
    )
    group.add_argument(
        "--otlp-endpoint", metavar="URL", help="OpenTelemetry collector (OTLP/HTTP) that gets a span per request"
    )


def add_formats(group: argparse._ActionsContainer) -> None:
    """Add the flags for tool calls and reasoning in the model's answers."""
    text = "format of {} in the model's output; auto: detected from the chat template (default: auto)"
    for flag, kind, what in (
        ("--tool-call-parser", ToolCallParser, "tool calls"),
        ("--reasoning-parser", ReasoningParser, "reasoning"),
    ):
        group.add_argument(flag, choices=get_args(kind), default="auto", help=text.format(what))
    text = "let requests carry their own `chat_template`; only for trusted clients: it can take much time and memory"
    group.add_argument("--trust-request-chat-template", action="store_true", help=text)


def formats_of(options: argparse.Namespace) -> Formats:
    """Return the formats from the flags of `add_formats`."""
    return Formats(options.tool_call_parser, options.reasoning_parser, options.trust_request_chat_template)


def add_field_flags(
    group: argparse._ActionsContainer, config: type[msgspec.Struct], texts: Mapping[str, tuple[str, str]]
) -> None:
    """Add a flag for each field of `config` in `texts`: its metavar and its help, to which a number's default is added.

    A field that holds one of several words becomes a flag with choices, a bool a flag that changes it (--no-… if true).
    """
    fields = {field.name: field for field in msgspec.structs.fields(config)}
    for name, (metavar, text) in texts.items():
        kind, default, flag = fields[name].type, fields[name].default, name.replace("_", "-")
        if kind is bool:
            action = "store_false" if default else "store_true"
            group.add_argument(f"--no-{flag}" if default else f"--{flag}", dest=name, action=action, help=text)
        elif get_origin(kind) is Literal:
            group.add_argument(f"--{flag}", choices=get_args(kind), default=default, help=text)
        else:
            shown = "none" if default is None else f"{default:g}" if isinstance(default, float) else default
            help = text if "(default: " in text else f"{text} (default: {shown})"
            group.add_argument(f"--{flag}", type=_parser_of(kind), default=default, metavar=metavar, help=help)


def _parser_of(kind: object) -> Callable[[str], object]:
    """Return the function that parses a flag's value for a field of this type, which may be optional."""
    kinds = {kind, *get_args(kind)}
    words = {word for one in kinds if get_origin(one) is Literal for word in get_args(one)}
    if words:
        number = next(one for one in (int, float) if one in kinds)
        return partial(_word_or_number, number)
    if tuple[str, ...] in kinds:
        return lambda text: tuple(text.split(","))
    return next(one for one in (int, float, str) if one in kinds)


def _word_or_number(number: Callable[[str], object], text: str) -> object:
    """Return the number that the text states, or else the text, which the field's own check allows or refuses."""
    try:
        return number(text)
    except ValueError:
        return text


def make_settings(options: argparse.Namespace, model_name: str) -> Settings:
    """Return the settings from the flags of `tok serve` and the environment. Errors: InvalidField.

    model_name  name of the model unless --served-model-name gives others
    """
    name, *aliases = options.served_model_name or (model_name,)
    same_names = ("host", "port", "tls_cert", "tls_key", "otlp_endpoint", "share_prefixes", "enable_rl", *LIMITS)
    return Settings(
        model_name=name,
        model_aliases=tuple(aliases),
        api_keys=_api_keys(options),
        admin_key=options.admin_key or os.environ.get(ADMIN_KEY_VARIABLE) or None,
        allow_origins=tuple(options.allow_origin or ()),
        allowed_hosts=tuple(options.allowed_host or ()),
        data_dir=(options.data_dir or default_data_directory(name)) if options.batches else None,
        require_data_dir=options.data_dir is not None,
        formats=formats_of(options),
        **{name: getattr(options, name) for name in same_names},
    )


def default_data_directory(model_name: str) -> str | None:
    """Return the directory in the user's data directory for the model's files and batches; None if there is no home.

    Each model has its own, so that no model continues the batches of another.
    """
    home = "~/Library/Application Support" if sys.platform == "darwin" else "~/.local/share"
    base = Path(os.environ.get("XDG_DATA_HOME") or os.path.expanduser(home))
    if not base.is_absolute():
        return None
    return str(base / "tok" / f"batches--{model_name.replace(os.sep, '--')[:MAX_NAME_CHARS]}")


def _repeatable_flag(group: argparse._ActionsContainer, flag: str, metavar: str, text: str) -> None:
    group.add_argument(flag, action="append", metavar=metavar, help=text)


def _api_keys(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the keys of the flags, the environment and the file, each once."""
    keys = list(options.api_key or ())
    keys += filter(None, (key.strip() for key in os.environ.get(API_KEYS_VARIABLE, "").split(",")))
    if options.api_key_file is not None:
        keys += _read_key_file(options.api_key_file)
    return tuple(dict.fromkeys(keys))


def _read_key_file(name: str) -> list[str]:
    """Return the keys of a file, one per line; empty lines and lines that begin with # are skipped."""
    try:
        lines = [line.strip() for line in Path(name).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidField("api_key_file", name, f"a readable text file ({error})") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:  # with no key at all, the server would serve everyone
        raise InvalidField("api_key_file", name, "a file with at least one key")
    return keys
