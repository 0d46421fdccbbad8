"""Chat templates render as in transformers, in a sandbox; errors that a template raises keep their text."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from support.tiny_tokenizer import write_tokenizer
from tok_core.errors import InvalidField, ModelError
from tok_core.text import ChatTemplate

Messages = list[dict[str, object]]

LLAMA_LIKE = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
<|head|>system<|tail|>

Year: {{ date_string }}
{{ system }}<|eot_id|>
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception("Roles must alternate, beginning with user") }}
    {%- endif %}
    {{- '<|head|>' + message['role'] + '<|tail|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|head|>assistant<|tail|>\\n\\n' }}
{%- endif %}
"""

QWEN_LIKE = """\
{%- if tools %}
    {{- '<|open|>system\\nTools:' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|close|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" and message.content is string %}
        {%- set ns.last = messages | length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- generation %}
            {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
            {{- '<|open|>assistant\\n' + content + '<|close|>\\n' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|open|>' + message.role + '\\n' + message.content }}
        {%- if loop.index0 == ns.last %} (last){% endif %}
        {{- '<|close|>\\n' }}
    {%- endif %}
{%- endfor %}
  {% if add_generation_prompt %}
    {{- '<|open|>assistant\\n' }}
  {% endif %}
end {{ eos_token }}
"""

CONVERSATIONS: list[Messages] = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "  Be <brief> & kind. "},
        {"role": "user", "content": "naïve 🙂?\n"},
        {"role": "assistant", "content": "<think>hm</think>\n\nYes."},
        {"role": "user", "content": "{{ 7 * 7 }} {% raw %}"},
    ],
]
TOOLS: list[dict[str, object]] = [
    {"type": "function", "function": {"name": "größe", "description": "a < b & 'c'", "strict": None}}
]


def model(directory: Path, template: object) -> Path:
    write_tokenizer(directory, 512)
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    return directory


def by_transformers(directory: Path, messages: Messages, prompt: bool, tools: list[dict[str, object]] | None) -> str:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(directory))
    text = tokenizer.apply_chat_template(messages, tools, add_generation_prompt=prompt, tokenize=False)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["one", "several"])
@pytest.mark.parametrize("template", [LLAMA_LIKE, QWEN_LIKE], ids=["llama", "qwen"])
def test_chat_templates_render_as_in_transformers(tmp_path: Path, template: str, messages: Messages) -> None:
    chat = ChatTemplate.load(model(tmp_path, template))
    for prompt in (True, False):
        for tools in (None, TOOLS):
            expected = by_transformers(tmp_path, messages, prompt, tools)
            assert chat.render(messages, prompt, tools) == expected


def test_chat_template_jinja_file_overrides_tokenizer_config(tmp_path: Path) -> None:
    model(tmp_path, "configuration")
    (tmp_path / "chat_template.jinja").write_text("file of {{ bos_token }}")
    rendered = ChatTemplate.load(tmp_path).render(CONVERSATIONS[0])
    assert rendered == by_transformers(tmp_path, CONVERSATIONS[0], True, None) == "file of <|begin_of_text|>"


def test_tools_select_the_named_tool_use_template(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }}"},
    ]
    chat = ChatTemplate.load(model(tmp_path, named))
    for tools in (None, TOOLS):
        assert chat.render(CONVERSATIONS[0], tools=tools) == by_transformers(tmp_path, CONVERSATIONS[0], True, tools)


def test_templates_in_files_of_their_own_are_used_by_name(tmp_path: Path) -> None:
    model(tmp_path, "configuration")
    (tmp_path / "chat_template.jinja").write_text("plain")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | length }} é", encoding="utf-8")
    chat = ChatTemplate.load(tmp_path)
    for tools in (None, TOOLS):
        assert chat.render(CONVERSATIONS[0], tools=tools) == by_transformers(tmp_path, CONVERSATIONS[0], True, tools)


def test_a_template_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    model(tmp_path, "configuration")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja cannot be read"):
        ChatTemplate.load(tmp_path)


def test_chat_template_uses_the_given_clock(tmp_path: Path) -> None:
    chat = ChatTemplate.load(model(tmp_path, LLAMA_LIKE), now=lambda: datetime(1999, 12, 31))
    assert "Year: 1999" in chat.render(CONVERSATIONS[0])


def test_raise_exception_in_a_template_rejects_messages_with_its_text(tmp_path: Path) -> None:
    chat = ChatTemplate.load(model(tmp_path, LLAMA_LIKE))
    with pytest.raises(InvalidField, match="Roles must alternate") as caught:
        chat.render([{"role": "assistant", "content": "Hi"}])
    assert caught.value.field == "messages"
    assert chat.render(CONVERSATIONS[0])


def test_empty_messages_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match=r"messages is \[\]; allowed: at least one"):
        ChatTemplate({"default": "always this"}, {}).render([])


@pytest.mark.parametrize("messages", [[{}], [{"role": "user"}], [{"role": "user", "content": 3}]])
def test_messages_that_break_the_template_are_rejected(tmp_path: Path, messages: Messages) -> None:
    chat = ChatTemplate.load(model(tmp_path, "{{ messages[0]['role'] + '' + messages[0]['content'] }}"))
    with pytest.raises(InvalidField, match=r"^messages is"):
        chat.render(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{% include 'other' %}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(template: str) -> None:
    messages: Messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(InvalidField):
        ChatTemplate({"default": template}, {}).render(messages)
    assert messages == [{"role": "user", "content": "Hi"}]


def test_directory_without_a_chat_template_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no chat template"):
        ChatTemplate.load(model(tmp_path, None))


def test_invalid_jinja_template_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="chat template 'default' is not valid"):
        ChatTemplate.load(model(tmp_path, "{% for %}"))


def test_named_templates_without_a_default_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"\['rag'\].*'default'"):
        ChatTemplate.load(model(tmp_path, [{"name": "rag", "template": "x"}]))
