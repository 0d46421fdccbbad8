"""Constraints on the text of an answer: OpenAI's response_format, and the structured outputs of other servers."""

from __future__ import annotations

from typing import ClassVar, Literal

from tok_client.types.base import UNSET, JSONObject, Maybe, Wire


class TextFormat(Wire, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Any text."""

    type: ClassVar[Literal["text"]] = "text"


class JsonObjectFormat(Wire, frozen=True, kw_only=True, tag_field="type", tag="json_object"):
    """Any JSON object."""

    type: ClassVar[Literal["json_object"]] = "json_object"


class JsonSchema(Wire, frozen=True, kw_only=True):
    """A JSON schema with a name. `strict` requests an answer that always follows it."""

    name: str
    schema: Maybe[JSONObject] = UNSET
    description: Maybe[str] = UNSET
    strict: Maybe[bool] = UNSET


class JsonSchemaFormat(Wire, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    """JSON that follows a schema."""

    type: ClassVar[Literal["json_schema"]] = "json_schema"
    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(Wire, frozen=True, kw_only=True):
    """A constraint on the text beyond OpenAI's reference; exactly one field is set.

    json         JSON schema, as an object or as text
    regex        regular expression that the whole text matches
    choice       texts to choose from
    grammar      grammar in EBNF, whose `root` is the whole text
    json_object  any JSON object
    """

    json: Maybe[JSONObject | str] = UNSET
    regex: Maybe[str] = UNSET
    choice: Maybe[list[str]] = UNSET
    grammar: Maybe[str] = UNSET
    json_object: Maybe[bool] = UNSET
