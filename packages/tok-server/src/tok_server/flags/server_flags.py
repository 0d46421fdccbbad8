"""Flags of `tok serve` that make its `Settings`: address, access, limits, logging."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import get_args

import msgspec

from tok_core import InvalidField
from tok_server.settings import Formats, Limits, ReasoningParser, Settings, ToolCallParser

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")

API_KEYS = "TOK_API_KEY"
"""Environment variable with API keys, separated by commas."""
ADMIN_KEY = "TOK_ADMIN_KEY"
"""Environment variable with the key for /admin/."""

LIMITS = {
    "max_connections": ("N", "connections open at once"),
    "max_header": ("BYTES", "most bytes of the request line and of each header line"),
    "max_body": (
        "BYTES",
        "most bytes of a JSON body, or of a line of a batch; while a larger one is decoded all others wait",
    ),
    "max_bodies": ("BYTES", "most bytes of all bodies held at once"),
    "max_file": ("BYTES", "most bytes of an uploaded file"),
    "data_quota": ("BYTES", "most bytes of all files and batches below --data-dir; uploads beyond get 507"),
    "max_unread": ("BYTES", "most bytes held for a client that does not read its stream; beyond, the stream is ended"),
    "max_n": ("N", "most samples of one prompt"),
    "min_client_priority": (
        "N",
        "smallest `priority` that requests may ask for; those of a smaller one preempt those of a greater one",
    ),
    "max_queued": ("N", "most prompts that wait for the engine at once, batches aside; requests beyond get 429"),
    "rate_limit_requests": (
        "N",
        "most requests a minute of each API key; more get 429; what batches compute does not count",
    ),
    "rate_limit_tokens": (
        "N",
        "most tokens a minute, prompts and answers, of each API key; more get 429; batches do not count",
    ),
    "header_timeout": ("S", "seconds in which a request's headers must arrive"),
    "body_timeout": ("S", "seconds in which a request's body must arrive"),
    "write_timeout": ("S", "seconds after which a client that reads nothing of its answer is cut off"),
    "idle_timeout": ("S", "seconds after which a connection without a request is closed"),
    "request_timeout": ("S", "seconds in which a request must be answered"),
    "drain_timeout": ("S", "seconds that open requests are given to end when the server stops"),
}
COUNTED = {"N", "BYTES"}
DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Limits)}


def add_server(group: argparse._ActionsContainer) -> None:
    """Add the flags for the address, access and logging."""
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s, this machine only; 0.0.0.0: all addresses)",
    )
    group.add_argument(
        "--port", type=int, default=10210, help="port to listen on (default: %(default)s; 0: any free one)"
    )
    _several(group, "--api-key", "KEY", f"serve only clients that send this key; may be repeated (also: {API_KEYS})")
    group.add_argument("--api-key-file", metavar="FILE", help="file with such keys, one a line")
    text = "let requests of different keys share cached prefixes; then cached_tokens tell one what another has sent"
    group.add_argument("--share-prefixes", action="store_true", help=text)
    group.add_argument("--admin-key", metavar="KEY", help=f"serve /admin/ to who sends this key (also: {ADMIN_KEY})")
    group.add_argument("--tls-cert", metavar="FILE", help="serve HTTPS with this certificate (PEM)")
    group.add_argument("--tls-key", metavar="FILE", help="the certificate's key (PEM; default: in the same file)")
    _several(group, "--allow-origin", "URL", "let web pages of this origin use the server; may be repeated; *: all")
    text = "answer to this host name, too; may be repeated; *: to any (default: on loopback localhost and addresses)"
    _several(group, "--allowed-host", "NAME", text)
    group.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="what to log (default: %(default)s)")
    group.add_argument(
        "--log-format", choices=LOG_FORMATS, default="text", help="json: an object a line (default: %(default)s)"
    )
    group.add_argument("--otlp-endpoint", metavar="URL", help="send spans to this OpenTelemetry collector (OTLP/HTTP)")


def add_formats(group: argparse._ActionsContainer) -> None:
    """Add the flags for tool calls and reasoning in the model's answers."""
    text = "how the model writes {}; auto: as its chat template shows (default: auto)"
    for flag, kind, what in (
        ("--tool-call-parser", ToolCallParser, "tool calls"),
        ("--reasoning-parser", ReasoningParser, "reasoning"),
    ):
        group.add_argument(flag, choices=get_args(kind), default="auto", help=text.format(what))


def add_limits(group: argparse._ActionsContainer) -> None:
    """Add the flags for limits and timeouts."""
    for name, (metavar, text) in LIMITS.items():
        default = DEFAULTS[name]
        shown = "none" if default is None else f"{default:g}" if isinstance(default, float) else default
        kind = int if metavar in COUNTED else float
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, default=default, metavar=metavar, help=f"{text} (default: {shown})")


def settings_of(options: argparse.Namespace, model_name: str) -> Settings:
    """Return the settings from the flags of `tok serve` and the environment. Errors: InvalidField."""
    same = ("host", "port", "data_dir", "tls_cert", "tls_key", "otlp_endpoint", "share_prefixes", *LIMITS)
    return Settings(
        model_name=model_name,
        api_keys=_api_keys(options),
        admin_key=options.admin_key or os.environ.get(ADMIN_KEY) or None,
        allow_origins=tuple(options.allow_origin or ()),
        allowed_hosts=tuple(options.allowed_host or ()),
        formats=Formats(options.tool_call_parser, options.reasoning_parser),
        **{name: getattr(options, name) for name in same},
    )


def _several(group: argparse._ActionsContainer, flag: str, metavar: str, text: str) -> None:
    group.add_argument(flag, action="append", metavar=metavar, help=text)


def _api_keys(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the keys of the flags, the environment and the file, each once."""
    keys = list(options.api_key or ())
    keys += filter(None, (key.strip() for key in os.environ.get(API_KEYS, "").split(",")))
    if options.api_key_file is not None:
        keys += _keys_of_file(options.api_key_file)
    return tuple(dict.fromkeys(keys))


def _keys_of_file(name: str) -> list[str]:
    """Return the keys of a file, one per line; empty lines and lines that begin with # are skipped."""
    try:
        lines = [line.strip() for line in Path(name).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidField("api_key_file", name, f"a text file that can be read ({error})") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:  # with no key at all, the server would serve everyone
        raise InvalidField("api_key_file", name, "a file with at least one key")
    return keys
