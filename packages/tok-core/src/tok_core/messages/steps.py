"""Messages between a manager and its workers: a step, and the tokens that it sampled.

Arrays of a StepInput are int32 unless said otherwise. Legend: B sequences of the step (decode rows first, then prefill
chunks), R rows that sample, G prefix groups of a level.
"""

from __future__ import annotations

import msgspec
import numpy as np

from tok_core.messages.codec import EMPTY


class NewSlots(msgspec.Struct):
    """Slots assigned to new sequences. Every array has one entry per slot, except for `bias_*` and `prefix*`.

    length             positions already in the cache
    last_token         input of the first decode row, before the slot has sampled a token: a sample that forks from a
                       prompt computed earlier feeds the prompt's last token
    eos_from_position  the first sampled position at which a model's end id ends the sample
    salt               slots of equal salt learn from each other which token follows which
    sampling           columns of sampling parameters, as `tok_core.sampling_params.DEVICE_COLUMNS` lists them
    bias_*             ragged, with a slot's entries side by side: `bias_value[i]` is added to the logit of
                       `bias_token[i]` at sampled positions below `bias_until[i]`, for slot `bias_slot[i]`
    prefix_slot        ragged as `bias_slot`: slots whose first bias entries hold only after generated tokens
    prefix             int32 `[n, K]`: these tokens, one row for each of `prefix_slot`, the last token first, then −1
    """

    slot: np.ndarray
    length: np.ndarray
    last_token: np.ndarray
    eos_from_position: np.ndarray
    prompt_len: np.ndarray
    salt: np.ndarray
    sample: np.ndarray
    sampling: dict[str, np.ndarray]
    bias_slot: np.ndarray
    bias_token: np.ndarray
    bias_value: np.ndarray
    bias_until: np.ndarray
    prefix_slot: np.ndarray
    prefix: np.ndarray


class SlotMoves(msgspec.Struct):
    """Slots that stand for a position of a sequence which the worker knows: after accepted drafts, or for a draft row.

    slot        the slots; each takes over the parameters and the page table of its source
    source      slot of the sequence: the same one for a sequence with accepted drafts
    length      positions already in the cache before the row
    last_token  input of the next decode row
    """

    slot: np.ndarray
    source: np.ndarray
    length: np.ndarray
    last_token: np.ndarray


MAX_CASCADE_LEVELS = 2
"""Cascade levels of a step: enough for a system prompt, few-shot examples, and a question sampled many times."""


class GroupLevel(msgspec.Struct):
    """Disjoint prefix groups of decode rows, at one cascade level: int32 `[G]`.

    Group `g` has the rows `start[g]` to `start[g] + count[g] - 1`. They share the positions `[kv_start[g], kv_end[g])`,
    which are whole pages, listed in the page table of `slot[g]`.
    """

    start: np.ndarray
    count: np.ndarray
    slot: np.ndarray
    kv_start: np.ndarray
    kv_end: np.ndarray


class SharedPages(msgspec.Struct):
    """Set the first k page table entries of each slot in `slot`, int32 `[n]`, to `page`, int32 `[k]`."""

    slot: np.ndarray
    page: np.ndarray


class RequestedPromptOutputs(msgspec.Struct):
    """Prompt log-probabilities and embeddings to compute in a step.

    Legend: C chunks scored, Q their rows scored, E chunks pooled.

    The first `scored_count[c]` rows of prefill chunk `scored[c]` are scored. Each row q yields the log-probability of
    the next prompt token `scored_token[q]`, and the `top_logprobs` most likely tokens. The last `pooled_count[e]`
    hidden states of chunk `pooled[e]` are summed after the final norm.
    """

    scored: np.ndarray
    scored_count: np.ndarray
    scored_token: np.ndarray
    top_logprobs: int
    pooled: np.ndarray
    pooled_count: np.ndarray


class PromptValues(msgspec.Struct):
    """Values of a step's `RequestedPromptOutputs`.

    logprob      float32 `[Q]`
    rank         int32 `[Q]`, the number of tokens that are at least as likely
    top_token    int32 `[Q, top_logprobs]`
    top_logprob  float32 `[Q, top_logprobs]`
    pooled       float32 `[E, hidden size]`, sums of hidden states
    """

    logprob: np.ndarray
    rank: np.ndarray
    top_token: np.ndarray
    top_logprob: np.ndarray
    pooled: np.ndarray


class ModelDrafts(msgspec.Struct):
    """Tokens that the draft model drafts at the start of a step, for n sequences, and what it has to read for that.

    The draft model keeps its keys and values in the pages of the sequences. It proceeds in this order:

    1. Read the chunks: `chunk_count[c]` tokens of `chunk_token` (concatenated), from position `chunk_start[c]` of slot
       `chunk_slot[c]` on.
    2. In the first pass, feed `token[r]` at `position[r]` of slot `slot[r]`, for each of R rows. The first n rows feed
       the last token of their sequence, and sample a token from the draft model.
    3. In each further pass, rows that have not reached position `end` feed the token that they have sampled last. The
       tokens sampled in pass i become the last tokens of the slots `lent[:, i]`, int32 `[n, k]`; −1: none.

    For example, a sequence has 7 positions in the cache, the last of which the draft model has not read. With
    position (7, 6) and end (9, 7), the second row only reads position 6. The first row reads position 7, samples the
    token of position 8, reads it, and samples the token of position 9: two drafted tokens.

    A draft head's row of position p feeds the token of position p + 1, and samples that of position p + 2. After the
    first pass, it reads its own output in place of the target model's hidden state.
    """

    chunk_slot: np.ndarray
    chunk_start: np.ndarray
    chunk_count: np.ndarray
    chunk_token: np.ndarray
    slot: np.ndarray
    position: np.ndarray
    token: np.ndarray
    end: np.ndarray
    lent: np.ndarray


class VerifyRows(msgspec.Struct):
    """Decode rows that verify drafted tokens, for n sequences with up to k drafted tokens each.

    The worker predicts the tokens that are not given, from its counts of which token has followed which. Row i of a
    sequence feeds its drafted token i after the sequence's last token, with the sequence's parameters and page table.
    After sampling, the worker advances the sequence past the drafted tokens that equal the token sampled before them.

    parent  slots of the sequences, `[n]`
    lent    slots of the rows, `[n, k]`; −1: none
    given   drafted tokens, `[n, k]`; −1: the worker predicts the token
    """

    parent: np.ndarray
    lent: np.ndarray
    given: np.ndarray


class StepInput(msgspec.Struct, tag=True):
    """One forward pass: the changes since the last step, then the tokens to compute. The worker proceeds in this order:

    1. In a pipeline, except for its last stage: make the tokens sampled by steps up to `sampled_upto` the last tokens
       of their slots. Drop tokens of slots that have since been given to another sequence. The last stage, and a worker
       with all layers, have recorded them when they sampled them.
    2. Set the `new` slots. Write page table entries: those of `shared`, in order, then
       `(page_slot, page_index) = page_id`. Then move the slots of `moves`.
    3. Copy pages `copy_src` to `copy_dst`, with the contents that earlier steps left. No page is a target twice.
    4. Let the draft model draft the tokens of `drafts`. Predict the tokens of `verify_rows`, and set its slots.
    5. Compute. Each slot of `decode_slot` feeds its last token at position `length`; chunk c feeds `prefill_count[c]`
       tokens of `prefill_token` (concatenated) to `prefill_slot[c]`, from position `prefill_start[c]` on. `levels[0]`
       has the prefix groups that begin at position 0. A group of `levels[k + 1]` lies within a group of `levels[k]`,
       and its positions begin where those end.
    6. Sample. For each of the R rows, the logits of sequence `sample_row` of the step yield the next token of slot
       `sample_slot`. Several slots may sample from one sequence: that is a fork.
    7. Advance the sequences of `verify_rows` past accepted tokens. Learn the tokens that were fed, those of rejected
       drafts excepted. Predict the next `predicted_tokens` tokens of each slot of `predict_slot`, and return them.

    Fields that these steps do not name:

    step         number of the step, from 1 on
    filter_row   which of the R rows have top-k, top-p or min-p filters
    penalty_row  which of the R rows have penalties
    bias_row     which of the R rows have logit biases in effect
    mask_row     which of the R rows have a mask of allowed tokens, by a grammar or by their request
    mask_index   index in `bitmask` of the mask of each entry of `mask_row`
    bitmask      int32 `[m, ⌈V/32⌉]`, the distinct masks: token t is allowed if bit t mod 32 of word t div 32 is set
    top_row      which of the R rows need top log-probabilities, of up to `top_logprobs` tokens
    all_greedy   whether all R rows sample at temperature 0
    max_kv       upper bound of the tokens of the longest sequence after the step
    prompts      requested log-probabilities and embeddings of prompts; None: none in this step
    """

    step: int
    sampled_upto: int
    new: NewSlots | None
    page_slot: np.ndarray
    page_index: np.ndarray
    page_id: np.ndarray
    decode_slot: np.ndarray
    levels: list[GroupLevel]
    prefill_slot: np.ndarray
    prefill_start: np.ndarray
    prefill_count: np.ndarray
    prefill_token: np.ndarray
    copy_src: np.ndarray
    copy_dst: np.ndarray
    sample_row: np.ndarray
    sample_slot: np.ndarray
    filter_row: np.ndarray
    penalty_row: np.ndarray
    bias_row: np.ndarray
    top_logprobs: int
    all_greedy: bool
    max_kv: int
    prompts: RequestedPromptOutputs | None = None
    shared: list[SharedPages] = msgspec.field(default_factory=list)
    mask_row: np.ndarray = msgspec.field(default_factory=lambda: EMPTY)
    mask_index: np.ndarray = msgspec.field(default_factory=lambda: EMPTY)
    bitmask: np.ndarray = msgspec.field(default_factory=lambda: EMPTY.reshape(0, 0))
    top_row: np.ndarray = msgspec.field(default_factory=lambda: EMPTY)
    drafts: ModelDrafts | None = None
    moves: SlotMoves | None = None
    verify_rows: VerifyRows | None = None
    predict_slot: np.ndarray = msgspec.field(default_factory=lambda: EMPTY)
    predicted_tokens: int = 0


class StepOutput(msgspec.Struct, tag=True):
    """The sampled tokens of one step, in the order of its R rows.

    `token` is int32 and `logprob` float32, `[R]`; `top_token` and `top_logprob` have the same types and are
    `[R, top_logprobs]`. A row whose sequence had ended before the step may return any token.

    launch_seconds   CPU time of the worker to enqueue the step
    device_seconds   time from the step's first operation on the device to its last
    expert_tokens    int32 `[layers, slots]`: tokens of each expert, or of each copy, by ranks; None: not counted
    slot_expert      int32 `[layers, slots]`: the expert of each slot; None: no expert has copies, or not counted
    draft_token      int32 `[n, k]`: the tokens of `ModelDrafts.lent`, with any value where there is no slot
    accepted         int32 `[n]`: accepted drafted tokens of each sequence of `StepInput.verify_rows`
    predictable      int32: how many of the tokens that each decode row fed the worker would have predicted; for a
                     sequence with draft rows, of all that it has advanced by
    predicted        int32 `[p, predicted_tokens]`: tokens predicted for `StepInput.predict_slot`; −1: unknown
    draft_seconds    the part of `device_seconds` that the draft model took
    capture_seconds  time of the worker to capture the step's CUDA graph before its launch; 0 for a captured one
    missing_graphs   CUDA graphs that are not captured yet: idle workers capture them, and steps that need them

    With several pipeline stages, times and counts are those of the last stage, without its wait for the previous one.
    """

    step: int
    token: np.ndarray
    logprob: np.ndarray
    top_token: np.ndarray
    top_logprob: np.ndarray
    launch_seconds: float
    device_seconds: float
    prompts: PromptValues | None = None
    expert_tokens: np.ndarray | None = None
    slot_expert: np.ndarray | None = None
    draft_token: np.ndarray = msgspec.field(default_factory=lambda: EMPTY.reshape(0, 0))
    accepted: np.ndarray = msgspec.field(default_factory=lambda: EMPTY)
    predictable: np.ndarray = msgspec.field(default_factory=lambda: EMPTY)
    predicted: np.ndarray = msgspec.field(default_factory=lambda: EMPTY.reshape(0, 0))
    draft_seconds: float = 0.0
    capture_seconds: float = 0.0
    missing_graphs: int = 0
