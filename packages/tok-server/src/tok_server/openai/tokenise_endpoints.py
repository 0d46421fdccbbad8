"""Serve /tokenize, /detokenize and /tokenizer_info: token ids of texts and chats, their text, special tokens."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from msgspec import Struct

from tok_client.types import (
    ChatCompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from tok_core import AsyncEngine, InvalidField
from tok_core.text import Tokenizer
from tok_server.http import CONTEXT, read_body
from tok_server.observability import COUNTS
from tok_server.openai.chat import chat_text
from tok_server.openai.generation import (
    TokenTexts,
    check_model,
    check_prompt_size,
    ignored_header,
    parse_request,
    value_or_none,
)
from tok_server.settings import Settings
from tok_server.wire import Operation, invalid, json_of, json_post, json_response, not_served

TOKENIZER_CLASS = "PreTrainedTokenizerFast"  # the class of transformers that reads any tokenizer.json
MAX_MODEL_LENGTHS = 16  # largest /detokenize request, in multiples of the model's length

_Computed = tuple[int, Struct, tuple[str, ...]]
"""Number of tokens that count against the rate limit, response, and paths of ignored fields."""


async def tokenize(request: web.Request) -> web.Response:
    """Return the tokens of a text or a chat."""
    return await _respond(request, _tokenize)


async def detokenize(request: web.Request) -> web.Response:
    """Return the text of tokens."""
    return await _respond(request, _detokenize)


async def _respond(request: web.Request, compute: Callable[[bytes, AsyncEngine, Settings], _Computed]) -> web.Response:
    """Compute the response in a thread, and return it."""
    context = request.app[CONTEXT]
    context.admit(request[COUNTS].tenant)
    body = await read_body(request, context)
    tokens, response, ignored = await context.run_in_thread(lambda: compute(body, context.engine, context.settings))
    request[COUNTS].prompt_tokens += tokens
    return json_response(response, headers=ignored_header(context, ignored))


def _tokenize(body: bytes, engine: AsyncEngine, settings: Settings) -> _Computed:
    request, ignored = parse_request(body, TokenizeRequest, ())
    check_model(value_or_none(request.model), settings.model_names)
    tokenizer = _tokenizer(engine)
    prompt, special = value_or_none(request.prompt), value_or_none(request.add_special_tokens)
    field = "messages" if prompt is None else "prompt"
    text = chat_text(_as_chat(request), engine, settings.formats) if prompt is None else prompt
    add_special_tokens = prompt is not None if special is None else special
    try:
        check_prompt_size(text, tokenizer, engine.info.max_model_len, field)
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except InvalidField as error:
        raise invalid(field, f"{field}: {error}") from error
    strings = None
    if value_or_none(request.return_token_strs):
        texts = TokenTexts(tokenizer)
        strings = [texts.text(token, "bytes:") for token in ids]
    max_model_len = engine.info.max_model_len
    response = TokenizeResponse(count=len(ids), max_model_len=max_model_len, tokens=ids, token_strs=strings)
    return len(ids), response, ignored


def _as_chat(request: TokenizeRequest) -> ChatCompletionRequest:
    return ChatCompletionRequest(
        messages=value_or_none(request.messages) or [],
        tools=request.tools,
        tool_choice=request.tool_choice,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template=request.chat_template,
        chat_template_kwargs=request.chat_template_kwargs,
    )


def _detokenize(body: bytes, engine: AsyncEngine, settings: Settings) -> _Computed:
    request, ignored = parse_request(body, DetokenizeRequest, ())
    check_model(value_or_none(request.model), settings.model_names)
    tokenizer, size = _tokenizer(engine), engine.info.vocab_size
    max_tokens = MAX_MODEL_LENGTHS * engine.info.max_model_len
    if len(request.tokens) > max_tokens:
        raise invalid("tokens", f"tokens holds {len(request.tokens)} token ids; allowed: at most {max_tokens}")
    for index, token in enumerate(request.tokens):
        if not 0 <= token < size:
            raise invalid(f"tokens[{index}]", f"tokens[{index}] is {token}; allowed: integers from 0 to {size - 1}")
    text = tokenizer.decode(request.tokens, skip_special_tokens=False)
    return len(request.tokens), DetokenizeResponse(prompt=text), ignored


async def tokenizer_info(request: web.Request) -> web.Response:
    """Return the tokenizer's special tokens and the chat template."""
    context = request.app[CONTEXT]
    context.require_started()
    engine = context.engine
    roles = _tokenizer(engine).roles
    tokens = {role: roles[role] for role in ("bos_token", "eos_token", "pad_token", "unk_token") if role in roles}
    template = None if engine.chat_template is None else engine.chat_template.sources["default"]
    max_model_len = engine.info.max_model_len
    return json_response(
        TokenizerInfo(tokenizer_class=TOKENIZER_CLASS, model_max_length=max_model_len, chat_template=template, **tokens)
    )


def _tokenizer(engine: AsyncEngine) -> Tokenizer:
    if engine.tokenizer is None:
        raise not_served("the model has no tokenizer; only token ids are served", "no_tokenizer")
    return engine.tokenizer


OPERATIONS = (
    json_post("/tokenize", tokenize, TokenizeRequest, TokenizeResponse, errors=(404, 501)),
    json_post("/detokenize", detokenize, DetokenizeRequest, DetokenizeResponse, errors=(404, 501)),
    Operation("GET", "/tokenizer_info", tokenizer_info, answers={200: json_of(TokenizerInfo)}, errors=(501,)),
)
