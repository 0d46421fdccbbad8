"""Functions that ranks of a parallel model run; tests compare the results with those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor

from support.sequences import Sequences
from tok_core.config import RankCoordinates
from tok_core.model_config import read_config
from tok_core.models import CausalLM, build, load_checkpoint
from tok_core.parallel.process_groups import ProcessGroups
from tok_core.parallel.tensor import TensorParallel
from tok_core.quantization import QuantizationConfig
from tok_core.worker.sampling import MAX_GATHERED_ROWS, sample_tokens, sampling_arrays
from tok_core.worker.startup.dummy_steps import dummy_step
from tok_core.worker.startup.warmup import warm_up_gemms
from tok_core.worker.state import WorkerState
from tok_kernels import choose

Draws = list[NDArray[np.float64]]  # of a step: tokens, log-probabilities, top-k tokens, their log-probabilities
Logits = list[NDArray[np.float32]]  # one array a step; torch tensors would share memory with ended processes

CPU = torch.device("cpu")
ROWS = 2 * MAX_GATHERED_ROWS + 8  # sampling rows
PROMPT = 37  # tokens; not divisible by any number of ranks


def tokens_of(count: int, seed: int = 1) -> list[int]:
    tokens: list[int] = torch.randint(0, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens


def model_of(
    path: Path,
    coordinates: RankCoordinates = RankCoordinates(),
    tensor: TensorParallel | None = None,
    dtype: torch.dtype = torch.float32,
    quantization: QuantizationConfig = QuantizationConfig(),
) -> CausalLM:
    """Return one worker's shard of the model at `path`."""
    model = build(read_config(path), choose(CPU), CPU, dtype, coordinates, tensor, quantization)
    load_checkpoint(model, path)
    return model


def logits_of(model: CausalLM) -> Logits:
    """Return unsharded logits of a chunked prompt, of a second sequence, and of decode and prefill steps of both."""
    sequences = Sequences(model, 2, 4)
    first, second = tokens_of(PROMPT), tokens_of(PROMPT + 4, seed=2)
    found = [
        sequences.feed([(0, first[:20])]),
        sequences.feed([(0, first[20:])], [3, 16]),
        sequences.feed([(1, second)], range(PROMPT)),
        sequences.feed([(0, [5]), (1, [7])]),
        sequences.feed([(0, [6])], [0]),
        sequences.feed([(0, tokens_of(13, seed=3))], []),
    ]
    return [whole(model, logits).numpy() for logits in found]


def chained_logits(stages: Sequence[CausalLM]) -> Logits:
    """Return logits of chunks of a sequence that pass through one pipeline stage after another."""
    chain = [Sequences(stage, 1, 4) for stage in stages]
    found = []
    for chunk, rows in [(tokens_of(20), None), (tokens_of(17, 2), [3, 16]), ([5], [0])]:
        stream: Tensor | None = None
        for stage in chain[:-1]:
            stream = stage.forward([(0, chunk)], rows, stream)
            assert stream.shape == (stage.model.stream_rows(len(chunk)), stage.model.config.hidden_size)
        with torch.inference_mode():
            logits = stages[-1].logits(chain[-1].forward([(0, chunk)], rows, stream))
        found.append(whole(stages[-1], logits).numpy())
    return found


def whole(model: CausalLM, logits: Tensor) -> Tensor:
    """Return the logits of the whole vocabulary."""
    return logits if model.shards is None else model.shards.whole(logits)


def draws_of(model: CausalLM) -> list[Draws]:
    """Return the samples of steps from the same hidden states: plain steps, and steps that need unsharded logits."""
    state = WorkerState(model.local, CPU, torch.float32, slots=ROWS, num_pages=1, page_size=16, pages_per_slot=2)
    source = torch.Generator().manual_seed(3)
    state.columns.length.fill_(9)
    state.columns.token_of.random_(0, 512, generator=source)
    columns = state.sampling
    columns["seed"].random_(generator=source)
    columns["temperature"].uniform_(0, 2, generator=source).masked_fill_(columns["seed"] % 5 == 0, 0.0)
    columns["top_k"].random_(0, 40, generator=source)
    for name in ("top_p", "min_p", "presence_penalty", "frequency_penalty"):
        columns[name].uniform_(0, 1, generator=source)
    columns["repetition_penalty"].uniform_(1, 2, generator=source)
    state.biases.token = torch.arange(ROWS).unsqueeze(1) % 512
    state.biases.value, state.biases.until = torch.full((ROWS, 1), 50.0), torch.full((ROWS, 1), 99)
    plain = dummy_step(decode=ROWS)
    masked = np.arange(3, ROWS, 2, dtype=np.int32)
    masks = np.random.default_rng(5).integers(-(2**31), 2**31, (9, -(-model.config.vocab_size // 32)), np.int32)
    index = masked % len(masks)
    steps = [
        plain,
        dummy_step(decode=ROWS, greedy=True),
        dummy_step(decode=ROWS, filtered=MAX_GATHERED_ROWS + 9),
        dummy_step(decode=ROWS, penalised=5),
        dummy_step(decode=ROWS, top_logprobs=3),
        structs.replace(plain, bias_row=np.arange(MAX_GATHERED_ROWS - 1, MAX_GATHERED_ROWS + 1, dtype=np.int32)),
        structs.replace(plain, mask_row=masked, mask_index=index, bitmask=masks),
        structs.replace(
            plain,
            mask_row=masked,
            mask_index=index,
            bitmask=masks,
            filter_row=masked[:9],
            top_logprobs=2,
            top_row=masked[4:],
        ),
    ]
    hidden = torch.randn((ROWS, model.config.hidden_size), generator=source)
    found = []
    for step in steps:
        put = {name: torch.from_numpy(array) for name, array in sampling_arrays(step).items()}
        with torch.inference_mode():
            sampled = sample_tokens(model, choose(CPU), state, step, put, hidden)
        found.append(
            [x.double().numpy() for x in (sampled.token, sampled.logprob, sampled.top_token, sampled.top_logprob)]
        )
    return found


def greedy(model: CausalLM, prompt: Sequence[int], count: int) -> list[int]:
    """Return greedy tokens, by one process or by all ranks."""
    sequences, found = Sequences(model, 1, 16), list[int]()
    rows: list[int] = [len(prompt) - 1]
    chunk = list(prompt)
    for _ in range(count):
        found.append(int(whole(model, sequences.feed([(0, chunk)], rows))[0].argmax()))
        chunk, rows = found[-1:], [0]
    return found


def compute(
    peers: ProcessGroups,
    paths: Sequence[Path],
    max_all_reduce_tokens: Sequence[int],
    count: int,
    quantization: QuantizationConfig = QuantizationConfig(),
) -> list[tuple[list[Logits], list[Logits], list[int], list[Draws]]]:
    """Return logits, two-stage logits, greedy tokens and samples of each model.

    Logits are computed for each of `max_all_reduce_tokens`, greedy tokens for the first of them. Samples are computed
    only if the vocabulary size is not divisible by the number of ranks.
    """
    assert peers.tensor is not None
    coordinates, tensor, found = peers.coordinates, TensorParallel(peers.tensor, CPU), []
    for path in paths:
        model = model_of(path, coordinates, tensor, quantization=quantization)
        places = [RankCoordinates(stage, 2, coordinates.rank, coordinates.ranks, coordinates.ep) for stage in range(2)]
        stages = [model_of(path, place, tensor, quantization=quantization) for place in places]
        logits, chained = [], []
        for few in max_all_reduce_tokens:
            tensor.max_all_reduce_tokens = few
            for one in stages:  # the warm-up must leave the ranks in step
                warm_up_gemms(one, PROMPT, coordinates.ranks)
            logits.append(logits_of(model))
            chained.append(chained_logits(stages))
        tensor.max_all_reduce_tokens = max_all_reduce_tokens[0]
        draws = draws_of(model) if model.config.vocab_size % coordinates.ranks else []
        found.append((logits, chained, greedy(model, tokens_of(PROMPT), count), draws))
    return found


def greedy_of_shards(
    peers: ProcessGroups, models: Sequence[tuple[Path, QuantizationConfig]], prompt: Sequence[int], count: int
) -> list[tuple[list[int], list[int]]]:
    """Return each model's greedy tokens after a prompt: by the ranks alone, and by two pipeline stages of them."""
    assert peers.tensor is not None
    coordinates, tensor, found = peers.coordinates, TensorParallel(peers.tensor, CPU), []
    for path, quantization in models:
        model = model_of(path, coordinates, tensor, quantization=quantization)
        places = [RankCoordinates(stage, 2, coordinates.rank, coordinates.ranks, coordinates.ep) for stage in range(2)]
        first, last = (Sequences(model_of(path, one, tensor, quantization=quantization), 1, 16) for one in places)
        staged, chunk = list[int](), list(prompt)
        for _ in range(count):
            rows = [len(chunk) - 1]
            hidden = last.forward([(0, chunk)], rows, first.forward([(0, chunk)], rows))
            staged.append(int(whole(last.model, last.model.logits(hidden))[0].argmax()))
            chunk = staged[-1:]
        found.append((greedy(model, prompt, count), staged))
    return found


def held_by_ranks(peers: ProcessGroups, path: Path) -> tuple[list[str], NDArray[np.float32], NDArray[np.float32]]:
    """Return the QKV dtype of each layer of a bfloat16 model, and logits with and without sequence parallelism."""
    assert peers.tensor is not None
    tensor = TensorParallel(peers.tensor, CPU)
    model = model_of(path, peers.coordinates, tensor, torch.bfloat16)
    names = [name for name, _ in model.named_parameters() if name.endswith("qkv_proj.weight")]
    dtypes = [str(model.get_parameter(name).dtype).removeprefix("torch.") for name in names]
    found = []
    for tensor.max_all_reduce_tokens in (0, 1000):
        logits = Sequences(model, 1, 64).feed([(0, tokens_of(40))])
        found.append(whole(model, logits).float().numpy())
    return dtypes, found[0], found[1]
