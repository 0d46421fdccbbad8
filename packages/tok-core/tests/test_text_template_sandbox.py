"""Chat templates reach no Python internals; no request makes them take long or write much."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import pytest

from tok_core.errors import InvalidField, ModelError
from tok_core.text import ChatTemplate, sandbox

MESSAGES = [{"role": "user", "content": "hello there"}]


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
    for trace in ("class", "builtin", "object at", "function", "root:", "uid=", "module", "os.", "Limits", "code"):
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


LOOPS = {
    "long range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "nested loops that write nothing": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops that test": "{% for i in range(99999) %}{% for j in range(9999) if false %}{% endfor %}{% endfor %}",
    "loops that compare": "{% set b = 'ab' * 10**6 %}{% for i in range(99999) %}{{ 'c' in b }}{% endfor %}",
    "macro": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "macro that ends late": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for x in [[1,1],[1,1]] recursive %}{{ loop([[1,1],[1,1]]) }}{% endfor %}",
    "block": "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "what it says": "{{ raise_exception('a' * 10**7) }}",
}


@pytest.mark.parametrize("name", LOOPS)
def test_endless_template_is_rejected_soon_with_a_short_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_RENDER_SECONDS", 0.3)
    began = time.thread_time()
    with pytest.raises(InvalidField) as refused:
        render(LOOPS[name])
    assert len(str(refused.value)) < 2000
    assert time.thread_time() - began < 5


# After published templates; without limits, the first one takes minutes and the second one writes 14 GB.
JOINED_PARTS = (
    "{% macro spoken(text) %}{% set ns = namespace(text='') %}{% for part in text.split('<end>') %}"
    "{% set ns.text = ns.text + part %}{% endfor %}{{ ns.text }}{% endmacro %}"
    "{% for m in messages %}{{ spoken(m.content) }}{% endfor %}"
)
TOOLS_BESIDE_LAST = (
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages %}{% if m == users[-1] %}{{ tools | tojson }}{% endif %}{{ m.content }}{% endfor %}"
)


def test_request_of_many_parts_that_a_template_joins_takes_bounded_time() -> None:
    messages = [{"role": "user", "content": "🙂" + "xx<end>" * 1_000_000}]
    began = time.thread_time()
    with pytest.raises(InvalidField, match="takes more than 2 s of a CPU"):
        render(JOINED_PARTS, messages)
    assert time.thread_time() - began < 2 * sandbox.MAX_RENDER_SECONDS


def test_request_whose_equal_messages_repeat_the_tools_writes_bounded_text() -> None:
    messages, tools = [{"role": "user", "content": "x"}] * 13_000, [{"name": "x" * (1 << 20)}]
    template = ChatTemplate({"default": TOOLS_BESIDE_LAST}, {})
    assert len(template.render(messages[:10], tools=tools)) > 10 << 20
    with pytest.raises(InvalidField, match="writes more than 67,108,864 characters"):
        template.render(messages, tools=tools)


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
