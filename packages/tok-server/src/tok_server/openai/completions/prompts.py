"""Turn prompts into token ids. Texts that are far too long are refused without tokenising all of them."""

from __future__ import annotations

from tok_core import AsyncEngine, InvalidField
from tok_server.limits import check_prompt_size
from tok_server.wire import invalid


def tokenise_prompts(prompts: list[str | list[int]], engine: AsyncEngine, field: str) -> list[list[int]]:
    """Return each prompt's token ids; all prompts are of one kind. `field`: name of their field. Errors: ApiError."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if not texts:
        return [prompt for prompt in prompts if isinstance(prompt, list)]
    if engine.tokenizer is None:
        raise invalid(field, f"{field} is text, but the model has no tokenizer; allowed: token ids")
    try:
        for index, text in enumerate(texts):
            check_prompt_size(
                text, engine.tokenizer, engine.info.max_model_len, prompt_field_name(field, index, len(texts))
            )
        return engine.tokenizer.encode_batch(texts)
    except InvalidField as error:
        raise invalid(field, str(error)) from error


def prompt_field_name(field: str, index: int, count: int) -> str:
    """Return the name by which errors call prompt `index` of `count` in `field`."""
    return field if count == 1 else f"{field}[{index}]"
