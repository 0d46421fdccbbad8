"""Write the JSON of text completions. Choice number: prompt × n + sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from tok_client.types import (
    UNSET,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Maybe,
    PromptLogprobs,
    StopWhenResult,
    Usage,
)
from tok_core import Completion as Sample
from tok_core import Delta, RequestOutput, TokenLogprob
from tok_server.openai.completions.echo import EchoedPrompt, concatenate_logprobs
from tok_server.openai.generation import (
    ChunkSerializer,
    GenerationJob,
    TextOffsets,
    TokenTexts,
    completion_logprobs,
    prompt_logprobs,
    stop_when_result,
    total_usage,
)
from tok_server.wire import encode, encode_elements, fill_lists, free_gradually, join_with_commas, pop_slices, slices


class CompletionSerializer(ChunkSerializer[CompletionChoice]):
    """Writer of the answer to one text completion request."""

    def __init__(self, job: GenerationJob, texts: TokenTexts) -> None:
        super().__init__(job, texts)
        self._echoes: dict[int, EchoedPrompt] = {}
        self._prompt_entries: dict[int, Maybe[PromptLogprobs]] = {}  # by prompt
        self._prompt_json: dict[int, list[bytes]] = {}  # by prompt: the encoded elements of its log-probabilities
        self._offsets: dict[int, TextOffsets] = {}  # by streamed choice that has begun

    def encode_answer(self, outputs: list[RequestOutput]) -> bytes:
        """Encode the answer of finished requests, one per prompt."""
        tokens = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        if self._job.best_of is not None:
            outputs = [select_best(output, self._job.params.n) for output in outputs]
        choices = [
            self._whole_choice(prompt, output, one, self._prompt_logprobs(prompt, output))
            for prompt, output in enumerate(outputs)
            for one in output.outputs
        ]
        return encode(self._chunk(choices, total_usage(outputs, tokens), stop_when_result(outputs) or UNSET))

    def encode_pieces(self, outputs: list[RequestOutput]) -> Iterator[bytes]:
        """Yield the same answer in pieces; free the log-probabilities of `outputs` along the way."""
        tokens = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        selected = outputs
        if self._job.best_of is not None:
            selected = [select_best(output, self._job.params.n) for output in outputs]
        envelope = encode(self._chunk([], total_usage(outputs, tokens), stop_when_result(outputs) or UNSET))
        choices = join_with_commas(
            self._choice_pieces(prompt, output, one) for prompt, output in enumerate(selected) for one in output.outputs
        )
        yield from fill_lists(envelope, [("choices", choices)])
        for output in outputs:
            for one in output.outputs:
                free_gradually(one.logprobs)

    def _choice_pieces(self, prompt: int, output: RequestOutput, one: Sample) -> Iterator[bytes]:
        prompt_entries: Maybe[PromptLogprobs] = [] if self._has_prompt_logprobs(output) else UNSET
        choice = self._whole_choice(prompt, output, one, prompt_entries)
        free_gradually(one.logprobs)
        lists: list[tuple[str, Iterable[bytes]]] = []
        if (logprobs := choice.logprobs) is not None:
            lists += [
                ("tokens", encode_elements(pop_slices(logprobs.tokens))),
                ("token_logprobs", encode_elements(pop_slices(logprobs.token_logprobs))),
                ("top_logprobs", encode_elements(pop_slices(logprobs.top_logprobs or []))),
                ("text_offset", encode_elements(pop_slices(logprobs.text_offset))),
            ]
            choice = msgspec.structs.replace(choice, logprobs=CompletionLogprobs(top_logprobs=[]))
        if prompt_entries is not UNSET:
            lists.append(("prompt_logprobs", self._prompt_pieces(prompt, output)))
        if one is output.outputs[-1]:  # no further choice repeats the prompt
            free_gradually(output.prompt_logprobs)
            self._echoes.pop(prompt, None)
            self._prompt_json.pop(prompt, None)
        return fill_lists(encode(choice), lists)

    def _chunk_choices(self, prompt: int, index: int, delta: Delta) -> list[CompletionChoice]:
        """Return the gain; before a choice's first one, with `echo`, its prompt."""
        begins = index not in self._offsets
        choices = self._begin_choice(prompt, index, delta)
        if delta.text or delta.finish_reason or delta.logprobs or (self._job.return_token_ids and delta.token_ids):
            choices.append(
                CompletionChoice(
                    index=index,
                    text=delta.text,
                    logprobs=self._logprobs(delta.logprobs, self._offsets[index]),
                    finish_reason=delta.finish_reason,
                    token_ids=self._token_ids(delta.token_ids),
                )
            )
        if begins and choices and self._job.return_token_ids:
            choices[0] = msgspec.structs.replace(choices[0], prompt_token_ids=self._job.prompts[prompt])
        return choices

    def _begin_choice(self, prompt: int, index: int, delta: Delta) -> list[CompletionChoice]:
        """Set up a choice that begins; return what precedes its first token: with `echo`, its prompt."""
        if index in self._offsets:
            return []
        if self._plain and delta.finish_reason is None:
            self._expect_text(index, lambda text: CompletionChoice(index=index, text=text))
        echo, self._offsets[index] = self._echo_logprobs(prompt, delta.prompt_logprobs)
        if not self._job.echo:
            return []
        return [
            CompletionChoice(index=index, text=self._echo(prompt).text, logprobs=echo, token_ids=self._token_ids([]))
        ]

    def _whole_choice(
        self, prompt: int, output: RequestOutput, one: Sample, prompt_entries: Maybe[PromptLogprobs]
    ) -> CompletionChoice:
        index = prompt * self._job.params.n + one.index
        if self._plain and not self._job.echo and self._job.prompt_logprobs is None:
            return CompletionChoice(index=index, text=one.text, finish_reason=one.finish_reason)
        echo, offsets = self._echo_logprobs(prompt, output.prompt_logprobs)
        return CompletionChoice(
            index=index,
            text=self._echo(prompt).text + one.text if self._job.echo else one.text,
            logprobs=concatenate_logprobs(echo, self._logprobs(one.logprobs, offsets)),
            finish_reason=one.finish_reason,
            token_ids=self._token_ids(one.token_ids),
            prompt_token_ids=self._token_ids(self._job.prompts[prompt]),
            prompt_logprobs=prompt_entries,
        )

    def _echo_logprobs(
        self, prompt: int, entries: Sequence[TokenLogprob | None] | None
    ) -> tuple[CompletionLogprobs | None, TextOffsets]:
        """Return the prompt's log-probabilities as choices echo them, and the offsets for a choice's own tokens."""
        if not self._job.echo:
            return None, TextOffsets()
        echo = self._echo(prompt)
        return echo.logprobs(entries), echo.offsets()

    def _echo(self, prompt: int) -> EchoedPrompt:
        if prompt not in self._echoes:
            job = self._job
            self._echoes[prompt] = EchoedPrompt(job.prompts[prompt], self._texts, job.params.logprobs)
        return self._echoes[prompt]

    def _logprobs(self, entries: list[TokenLogprob] | None, offsets: TextOffsets) -> CompletionLogprobs | None:
        if entries is None or self._job.params.logprobs is None:
            return None
        return completion_logprobs(entries, self._texts, offsets)

    def _prompt_logprobs(self, prompt: int, output: RequestOutput) -> Maybe[PromptLogprobs]:
        if not self._has_prompt_logprobs(output):
            return UNSET
        if prompt not in self._prompt_entries:  # the same for all samples
            self._prompt_entries[prompt] = self._converted(output.prompt_logprobs or [])
        return self._prompt_entries[prompt]

    def _prompt_pieces(self, prompt: int, output: RequestOutput) -> list[bytes]:
        """Return the elements of `prompt_logprobs`, encoded once for all samples. Bytes are freed at once."""
        if prompt not in self._prompt_json:
            parts = map(self._converted, slices(output.prompt_logprobs or []))
            self._prompt_json[prompt] = list(encode_elements(parts))
        return self._prompt_json[prompt]

    def _converted(self, entries: list[TokenLogprob | None]) -> PromptLogprobs:
        return prompt_logprobs(entries, self._texts, self._job.prompt_logprobs or 0)

    def _has_prompt_logprobs(self, output: RequestOutput) -> bool:
        """Return whether log-probabilities of the prompt are requested and known."""
        return self._job.prompt_logprobs is not None and output.prompt_logprobs is not None

    def _chunk(
        self, choices: list[CompletionChoice], token_usage: Maybe[Usage], stop_when: Maybe[StopWhenResult] = UNSET
    ) -> Completion:
        """Return one chunk or, with all choices, the whole answer: both have the same type."""
        return Completion(choices=choices, usage=token_usage, stop_when=stop_when, **self._envelope)


def select_best(output: RequestOutput, count: int) -> RequestOutput:
    """Keep the `count` samples of the highest log-probability per token, best first, with new indices from 0."""
    ranked = sorted(output.outputs, key=lambda one: (-_mean_logprob(one), one.index))
    chosen = [msgspec.structs.replace(one, index=index) for index, one in enumerate(ranked[:count])]
    return msgspec.structs.replace(output, outputs=chosen)


def _mean_logprob(sample: Sample) -> float:
    logprobs = sample.logprobs or []
    return sum(one.logprob for one in logprobs) / max(len(logprobs), 1)
