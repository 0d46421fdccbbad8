"""Hostile chat templates reach no Python internals, take bounded time and memory, and get a short error."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import psutil
import pytest

from tok_core.errors import InvalidField, ModelError
from tok_core.text import ChatTemplate, meter

MESSAGES = [{"role": "user", "content": "hello there"}]
MAX_MEMORY_BYTES = 2 << 30  # bytes that a template may take for a moment


def render(source: str, messages: Sequence[Mapping[str, object]] | None = None, **roles: str) -> str:
    return ChatTemplate({"default": source}, roles).render(messages or MESSAGES)


ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['__builtins__'] }}",
    "{{ strftime_now.__globals__ }}",
    "{{ strftime_now.__code__.co_consts }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ (messages|attr('__class__')) }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ ('%s'|format)('__class__') }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ '{0.__init__.__globals__}'.format(raise_exception) }}",
    "{{ ['{0.__class__}']|map('format', messages)|list }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ range.__class__.__base__ }}",
    "{{ dict.mro() }}",
    "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}{{ m._func.__code__ }}",
    "{% set x = cycler('a') %}{{ x.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__.os.system('id') }}",
    "{{ joiner.__init__.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as p %}",
    "{% extends '/etc/passwd' %}",
    "{{ get_flashed_messages.__globals__ }}",
    "{{ environment.from_string('x') }}",
    "{{ loop.__class__ }}",
    "{% for x in [1] %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{{ caller.__class__ }}",
    "{{ (messages|map('attr', '__class__')|list)[0].__name__ }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_hostile_template_cannot_reach_python_internals(source: str) -> None:
    try:
        text = render(source)
    except (InvalidField, ModelError):  # and nothing else
        return
    for trace in ("class", "builtin", "object at", "function", "root:", "uid=", "module", "os.", "Meter", "code"):
        assert trace not in text, text


CHANGES = [
    "{% set _ = messages.append(1) %}",
    "{% set _ = messages.clear() %}",
    "{% set _ = messages[0].update({'role': 'system'}) %}",
    "{% set _ = messages[0].pop('role') %}",
]


@pytest.mark.parametrize("source", CHANGES)
def test_template_cannot_modify_the_messages(source: str) -> None:
    with pytest.raises(InvalidField):
        render(source)
    assert MESSAGES == [{"role": "user", "content": "hello there"}]


DOUBLING = "{% set ns = namespace(x=FIRST) %}{% for i in range(60) %}{% set ns.x = NEXT %}{% endfor %}{{ ns.x }}"


def doubled(first: str, following: str) -> str:
    return DOUBLING.replace("FIRST", first).replace("NEXT", following)


BOMBS = {
    "long range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "nested loops that write nothing": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops that test": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "loops that compare": "{% set b = 'ab' * 10**6 %}{% for i in range(99999) %}{{ 'c' in b }}{% endfor %}",
    "text times a number": "{{ 'a' * 10**9 }}",
    "number times text": "{{ 10**9 * 'a' }}",
    "list times a number": "{{ [0] * 10**9 }}",
    "power": "{{ 10**(10**9) }}",
    "power of powers": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "+": doubled("'ab'", "ns.x + ns.x"),
    "~": doubled("'ab'", "ns.x ~ ns.x"),
    "list +": doubled("[1]", "ns.x + ns.x"),
    "lists within lists": doubled("[1]", "[ns.x, ns.x]"),
    "dicts within dicts": doubled("{}", "{'a': ns.x, 'b': ns.x}"),
    "lists as JSON": doubled("[1]", "[ns.x, ns.x]").replace("{{ ns.x }}", "{{ ns.x|tojson }}"),
    "lists as text": doubled("[1]", "[ns.x, ns.x]").replace("{{ ns.x }}", "{{ ns.x|string|length }}"),
    "lists in a format": doubled("[1]", "[ns.x, ns.x]").replace("{{ ns.x }}", "{{ '%s' % ns.x }}"),
    "lists in a method": doubled("[1]", "[ns.x, ns.x]").replace("{{ ns.x }}", "{{ '{}'.format(ns.x) }}"),
    "blocks of text": "{% set a %}xxxxxxxx{% endset %}"
    + "{% set b %}{{ a }}{{ a }}{% endset %}{% set a %}{{ b }}{{ b }}{% endset %}" * 20,
    "slices kept": "{% set b = 'ab' * 10**6 %}{% set ns = namespace(l=[]) %}"
    "{% for i in range(99999) %}{% set ns.l = ns.l + [b[1:]] %}{% endfor %}",
    "static text": "{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}",
    "macro": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "macro that ends late": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for x in [[1,1],[1,1]] recursive %}{{ loop([[1,1],[1,1]]) }}{% endfor %}",
    "block": "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "replace": "{% set b = 'a' * 10**6 %}{{ b.replace('a', b) }}",
    "replace of nothing": "{% set b = 'a' * 10**6 %}{{ b|replace('', b) }}",
    "join": "{% set b = 'a' * 10**6 %}{{ range(99999)|join(b) }}",
    "join of a method": "{% set b = 'a' * 10**6 %}{{ b.join(b) }}",
    "split": "{{ ('\u4e00x' * 3 * 10**7).split('x')|length }}",
    "list of a text": "{{ ('\u4e00x' * 3 * 10**7)|list|length }}",
    "width": "{{ '%1000000000d' % 1 }}",
    "computed width": "{{ '%*d' % (10**9, 1) }}",
    "width of a filter": "{{ '%1000000000d'|format(1) }}",
    "width of a method": "{{ '{:>1000000000}'.format(1) }}",
    "computed width of a method": "{{ '{:>{w}}'.format(1, w=10**9) }}",
    "many in a format": "{% set b = 'a' * 10**6 %}{{ ('{0}' * 10000).format(b) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "center": "{{ 'a'|center(10**9) }}",
    "indent": "{% set b = '\n' * 10**6 %}{{ b|indent(10**6) }}",
    "indent of JSON": "{{ [1, [2]]|tojson(indent=10**9) }}",
    "separators of JSON": "{% set b = 'a' * 10**6 %}{{ (range(9999)|list)|tojson(separators=(b, b)) }}",
    "batch": "{{ [1]|batch(10**9, 0)|list }}",
    "slice": "{{ [1]|slice(10**9)|list }}",
    "sum": "{{ [[1]]|sum(start=[]) }}",
    "lipsum": "{{ lipsum(10**6) }}",
    "bytes": "{{ (1).to_bytes(10**9, 'big') }}",
    "what it says": "{{ raise_exception('a' * 10**7) }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_expensive_template_is_rejected_soon_with_a_short_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "MAX_RENDER_SECONDS", 0.3)
    before, began = psutil.Process().memory_info().rss, time.thread_time()
    watch = Watch()
    with watch, pytest.raises((InvalidField, ModelError)) as refused:
        render(BOMBS[name])
    assert len(str(refused.value)) < 2000
    assert time.thread_time() - began < 5
    assert watch.peak - before < MAX_MEMORY_BYTES


class Watch:
    """Sampler of the process's peak memory inside a `with` block."""

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        process = psutil.Process()
        while True:
            self.peak = max(self.peak, process.memory_info().rss)
            if self._stop.wait(0.02):
                return


def test_usual_template_renders_long_conversations() -> None:
    source = (
        "{% for m in messages if m.role != 'x' %}{% if loop.index0 < messages|length - 1 %}"
        "{{ '<|' ~ m.role ~ '|>' + m.content|trim + m['content'].split('</think>')[-1].replace('a', 'b') }}"
        "{% set rest = messages[loop.index:] %}{{ '%02d' % (rest|length % 60) }}{{ m|tojson(indent=2) }}{% endif %}"
        "{% endfor %}{{ ['a', 'b']|join(', ') }}{{ '{}: {:>8}'.format('x', 3) }}"
        "{{ messages|map(attribute='role')|list|length }}"
    )
    short = [{"role": "user", "content": "a b"}] * 1000
    assert len(render(source, short)) > 1000 * len("<|user|>a bb b")
    long = [{"role": "user", "content": "word " * 400_000}] * 2
    joined = "{% for m in messages %}{{ m.content|trim ~ eos_token }}{% endfor %}"
    assert len(render(joined, long, eos_token="</s>")) > 1 << 21


def test_message_content_is_never_rendered_as_a_template() -> None:
    hostile = "{{ 1 + 1 }}{% for i in range(9) %}x{% endfor %}{{ ''.__class__ }}{# #}"
    assert render("{{ messages[0].content }}", [{"role": "user", "content": hostile}]) == hostile
