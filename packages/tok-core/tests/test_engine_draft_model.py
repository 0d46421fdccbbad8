"""A draft model changes no answer: with `batch_invariant`, tokens and log-probabilities are the same bits without it.

The noisy draft model is the target model with noise in its weights: some of its tokens are accepted, and some are not.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import stats

from support.drafting import (
    NEW,
    PARAMS,
    PLAIN,
    PROMPTS,
    SETTINGS,
    STEM,
    Answer,
    answer,
    answers,
    make_cheap,
    pad_passes,
    refused,
)
from support.engines import assert_all_given_back, cpu_engine, manager_of
from support.grouping import group_eagerly
from support.tiny_models import change_weights, make_model, reference_greedy, reference_logits
from tok_core import AsyncEngine, Engine, EngineConfig, InvalidField, SamplingParams
from tok_core.manager.output_processor import Reported
from tok_core.manager.speculation import HostSpeculator
from tok_core.manager.speculation.ngram_index import NO_TOKEN
from tok_core.manager.speculation.step_costs import DraftCandidate
from tok_core.messages import StepOutput

pytestmark = pytest.mark.usefixtures("forked_children")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama3", tmp_path_factory.mktemp("target") / "tiny", max_positions=256)


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the target model with noise."""
    directory = make_model("llama3", tmp_path_factory.mktemp("noisy") / "tiny", max_positions=256)

    def add_noise(weights: dict[str, torch.Tensor]) -> None:
        source = torch.Generator().manual_seed(1)
        for weight in weights.values():
            weight += 0.02 * weight.std() * torch.randn(weight.shape, generator=source)

    return change_weights(directory, add_noise)


@pytest.fixture(scope="module")
def expected(path: Path) -> list[Answer]:
    """Return the answers without speculation."""
    with cpu_engine(path, batch_invariant=True) as engine:
        return answers(engine)


@pytest.mark.parametrize(("speculate", "options"), SETTINGS)
def test_draft_model_changes_no_bit_of_any_answer(
    path: Path, noisy: Path, expected: list[Answer], speculate: int, options: dict[str, Any]
) -> None:
    settings = {"batch_invariant": True, "max_model_len": 128, **options}
    with cpu_engine(path, speculate=speculate, draft=str(noisy), **settings) as engine:
        make_cheap(engine)
        group_eagerly(manager_of(engine))
        assert answers(engine) == expected
        found = engine.stats()
    assert found["model_drafted_tokens"] > found["model_accepted_tokens"] > 400
    assert found["accepted_tokens"] >= found["model_accepted_tokens"]
    assert found["preemptions"] > 0 or "kv_cache_tokens" not in options


def test_rows_padded_to_the_size_of_graphs_change_no_bit(path: Path, noisy: Path, expected: list[Answer]) -> None:
    """On a CPU, the passes run as they are captured on a GPU, without a graph."""
    options: dict[str, Any] = {"batch_invariant": True, "max_model_len": 128, "max_running": 256}
    found = []
    for sizes in ((), (1, 2, 4, 24)):
        with cpu_engine(path, speculate=4, draft=str(noisy), **options) as engine:
            make_cheap(engine)
            replays = pad_passes(engine, sizes) if sizes else None
            assert answers(engine) == expected
            found.append(engine.stats()["model_accepted_tokens"])
    assert replays is not None
    assert len(replays) > 2
    assert min(found) > 0.7 * max(found) > 400  # how many are drafted depends on when requests arrive


def test_drafts_of_any_source_and_size_change_no_bit(path: Path, noisy: Path, expected: list[Answer]) -> None:
    rng = np.random.default_rng(0)

    def choose_among(sequences: int, candidates: Sequence[DraftCandidate]) -> tuple[int, int]:
        number = int(rng.integers(0, len(candidates)))
        return number, int(rng.integers(0, len(candidates[number].probability) + 1))

    with cpu_engine(
        path, batch_invariant=True, speculate="auto", draft=str(noisy), max_model_len=128, max_running=256
    ) as engine:
        speculator = manager_of(engine).speculator
        assert isinstance(speculator, HostSpeculator)
        setattr(speculator.costs, "choose_among", choose_among)  # noqa: B010
        setattr(speculator.costs, "allows", lambda sequences: True)  # noqa: B010
        assert answers(engine) == expected
        found = engine.stats()
    assert found["model_accepted_tokens"] > 20
    assert found["accepted_tokens"] > found["model_accepted_tokens"]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_model_that_drafts_for_itself_has_every_token_accepted(path: Path, temperature: float) -> None:
    params = msgspec.structs.replace(PLAIN, temperature=temperature, n=3)
    with cpu_engine(path, batch_invariant=True, speculate=4, draft=str(path)) as engine:
        make_cheap(engine)
        engine.generate(PROMPTS, params)
        found = engine.stats()
    assert found["model_accepted_tokens"] == found["model_drafted_tokens"] > 300
    assert found["steps"] < NEW / 3


@pytest.mark.parametrize(("kind", "draft_kind"), [("qwen3", "qwen2"), ("mistral", "qwen3-moe"), ("mixtral", "mistral")])
def test_greedy_tokens_equal_transformers_whatever_model_drafts(kind: str, draft_kind: str, tmp_path: Path) -> None:
    path = make_model(kind, tmp_path / "target")
    draft = make_model(draft_kind, tmp_path / "draft", seed=1, layers=1, max_positions=70)
    with cpu_engine(path, speculate=4, draft=str(draft)) as engine:
        make_cheap(engine)
        outputs = engine.generate(PROMPTS, PARAMS["greedy"])
        assert engine.stats()["model_drafted_tokens"] > 0
    for output, (tokens, _) in zip(outputs, reference_greedy(path, PROMPTS, NEW), strict=True):
        assert output.outputs[0].token_ids == tokens


def test_distribution_of_samples_is_that_of_transformers(path: Path, noisy: Path) -> None:
    """Compare the third tokens of samples with transformers' probabilities, for each common pair before them."""
    params = SamplingParams(n=10, temperature=1.0, max_tokens=3, ignore_eos=True)
    outputs = []
    with cpu_engine(path, speculate=2, draft=str(noisy), run_ahead=1) as engine:
        make_cheap(engine)
        speculator = manager_of(engine).speculator
        assert isinstance(speculator, HostSpeculator)
        none = np.full((512, 2), NO_TOKEN, np.int32), np.zeros((512, 2))
        setattr(speculator, "propose", lambda slots, count: tuple(one[: len(slots), :count].copy() for one in none))  # noqa: B010
        some = [msgspec.structs.replace(params, seed=seed) for seed in range(400)]
        for output in engine.generate([STEM] * len(some), some):
            outputs += output.outputs
        found = engine.stats()
    assert 0.2 < found["model_accepted_tokens"] / found["model_drafted_tokens"] < 0.95
    assert found["model_drafted_tokens"] > 1000
    samples = [tuple(one.token_ids) for one in outputs]
    pairs = [pair for pair, count in Counter(one[:2] for one in samples).items() if count >= 100]
    assert len(pairs) >= 2
    for pair in pairs:
        third = [one[2] for one in samples if one[:2] == pair]
        wanted = reference_logits(path, [*STEM, *pair])[-1].double().softmax(-1).numpy() * len(third)
        cells = np.append(np.flatnonzero(wanted >= 5), -1)  # the last cell has all other tokens
        cell_of = {token: cell for cell, token in enumerate(cells[:-1].tolist())}
        seen = np.bincount([cell_of.get(token, len(cell_of)) for token in third], minlength=len(cells))
        likely = np.append(wanted[cells[:-1]], len(third) - wanted[cells[:-1]].sum())
        assert likely.min() >= 2
        assert len(cells) > 4
        assert stats.chisquare(seen, likely).pvalue > 1e-3


def test_sample_ends_at_a_stop_string_within_a_draft(path: Path) -> None:
    with cpu_engine(path, speculate=8, draft=str(path)) as engine:
        make_cheap(engine)
        (whole,) = engine.generate([STEM], PLAIN)[0].outputs
        text, half = whole.text, range(NEW // 2, NEW)
        stop = next(text[i : i + 2] for i in half if text[i : i + 2].isascii() and text.find(text[i : i + 2]) == i)
        (cut,) = engine.generate([STEM], msgspec.structs.replace(PLAIN, stop=(stop,)))[0].outputs
        assert engine.stats()["model_accepted_tokens"] > NEW / 2
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.text == text[: text.index(stop)]


async def test_streamed_tokens_of_a_draft_model_come_in_order(path: Path, noisy: Path) -> None:
    config = EngineConfig(
        model=str(path), dtype="float32", device="cpu", kv_cache_tokens=4096, speculate=8, draft=str(noisy)
    )
    with cpu_engine(path) as plain:
        (wanted,) = plain.generate([STEM], PLAIN)[0].outputs
    engine = AsyncEngine(config, in_process=True)
    await engine.start()
    make_cheap(engine)
    streamed = list[int]()
    async for delta in engine.generate(STEM, PLAIN):
        streamed += delta.token_ids
    assert streamed == wanted.token_ids
    assert engine.stats()["model_accepted_tokens"] > 0
    assert_all_given_back(manager_of(engine))
    await engine.close()


def test_tensor_parallel_ranks_draft_alike(path: Path, tmp_path: Path) -> None:
    draft = make_model("llama3", tmp_path / "draft", hidden_size=32, layers=1, max_positions=256)
    config = EngineConfig(
        model=str(path), device="cpu", dtype="float32", tp=2, batch_invariant=True, kv_cache_tokens=8192
    )
    params, found = [PARAMS["samples"], PARAMS["penalties"], PARAMS["grammar"], PARAMS["plain"]], []
    for options in ({}, {"speculate": 4, "draft": str(draft)}):
        with Engine(msgspec.structs.replace(config, **options)) as engine:
            found.append([answer(output) for output in engine.generate(PROMPTS, params)])
            assert (engine.stats()["model_drafted_tokens"] > 0) == bool(options)
    assert found[0] == found[1]


def test_weights_may_change_and_memory_sleep_beside_a_draft_model(path: Path, noisy: Path) -> None:
    with cpu_engine(noisy, batch_invariant=True) as engine:
        wanted = [answer(output) for output in engine.generate(PROMPTS, PLAIN)]
    options: dict[str, Any] = {"batch_invariant": True, "enable_sleep_mode": True}
    with cpu_engine(path, speculate=4, draft=str(path), **options) as engine:
        make_cheap(engine)
        before = [answer(output) for output in engine.generate(PROMPTS, PLAIN)]
        engine.sleep()
        engine.wake_up()
        assert [answer(output) for output in engine.generate(PROMPTS, PLAIN)] == before
        accepted = engine.stats()["model_accepted_tokens"]
        engine.update_weights(str(noisy))
        assert [answer(output) for output in engine.generate(PROMPTS, PLAIN)] == wanted
        assert engine.stats()["model_accepted_tokens"] > accepted > 0


def test_draft_model_without_speculate_is_refused_by_name() -> None:
    with pytest.raises(InvalidField, match=r"draft is 'd'; allowed: only together with speculate"):
        EngineConfig(model="m", draft="d")
    with pytest.raises(InvalidField, match="draft is ''"):
        EngineConfig(model="m", draft="", speculate=1)


def test_draft_model_of_other_tokens_is_refused(path: Path, tmp_path: Path) -> None:
    larger = make_model("llama", tmp_path / "larger", vocab_size=600)
    (larger / "tokenizer.json").unlink()
    assert "the same tokens: 512, not 600" in refused(path, larger)
    other = make_model("llama", tmp_path / "other")
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab, added = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    first, second = list(vocab)[300:302]
    file.write_text(json.dumps({**tokenizer, "added_tokens": [{**added[0], "id": 1}, *added[1:]]}))
    error = refused(path, other)
    assert error.startswith(f"draft is '{other}'; allowed: a model with the same tokens")
    assert f"{added[0]['content']!r} is 1 in its tokenizer.json and {added[0]['id']} in the model's" in error
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(tokenizer))
    assert f"the same tokens ({first!r} is {vocab[first]}" in refused(path, other)


def test_padded_vocabulary_of_a_draft_model_is_no_other_vocabulary(path: Path, tmp_path: Path) -> None:
    draft = make_model("llama", tmp_path / "draft")

    def pad(weights: dict[str, torch.Tensor]) -> None:
        embedding = weights["model.embed_tokens.weight"]
        padding = 10 * torch.randn((64, embedding.shape[1]), generator=torch.Generator().manual_seed(0))
        weights["model.embed_tokens.weight"] = torch.cat((embedding, padding))

    change_weights(draft, pad)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "vocab_size": 576}))
    with cpu_engine(path, speculate=4, draft=str(draft)) as engine:
        make_cheap(engine)
        outputs = engine.generate(PROMPTS, PARAMS["greedy"])
        assert engine.stats()["model_drafted_tokens"] > 0
    for output, (tokens, _) in zip(outputs, reference_greedy(path, PROMPTS, NEW), strict=True):
        assert output.outputs[0].token_ids == tokens


def test_draft_model_of_unknown_architecture_is_refused(path: Path, tmp_path: Path) -> None:
    draft = make_model("llama", tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "architectures": ["MedusaForCausalLM"]}))
    error = refused(path, draft)
    assert error.startswith(f"draft is '{draft}'; allowed: a model that tok serves")
    assert "MedusaForCausalLM" in error


def test_draft_model_with_missing_tensors_is_refused(path: Path, tmp_path: Path) -> None:
    draft = make_model("llama", tmp_path / "draft")
    file = draft / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    error = refused(path, draft)
    assert error.startswith(f"draft model: {draft}")
    assert "model.layers.1.mlp.down_proj.weight" in error


def test_draft_model_that_is_no_directory_is_refused(path: Path, tmp_path: Path) -> None:
    assert refused(path, str(tmp_path / "nothing")).startswith(f"draft '{tmp_path / 'nothing'}': is no directory")


def test_draft_model_that_does_not_fit_is_refused(path: Path, noisy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())
    monkeypatch.setattr("tok_core.worker.startup.memory.available_memory", lambda: int(weights * 1.7))
    assert refused(path, noisy).startswith(f"{path} with the draft model {noisy} does not fit: it needs")
    monkeypatch.undo()
    with cpu_engine(path, speculate=2, draft=str(noisy)):
        pass


@pytest.mark.parametrize("tp", [4])
def test_draft_model_that_cannot_be_sharded_is_refused(path: Path, tmp_path: Path, tp: int) -> None:
    draft = make_model("llama", tmp_path / "draft", head_dim=8)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "num_attention_heads": 6, "num_key_value_heads": 6}))
    with pytest.raises(InvalidField, match=r"draft is .*fits the engine's other settings \(tp"):
        read_draft_of(path, draft, tp)


def read_draft_of(path: Path, draft: Path, tp: int) -> None:
    from tok_core.config import RankCoordinates
    from tok_core.model_config import read_config
    from tok_core.worker.startup.draft import read_draft

    config = EngineConfig(model=str(path), draft=str(draft), speculate=1, tp=tp)
    read_draft(config, read_config(path), RankCoordinates(rank=1, ranks=tp))


def test_draft_rows_without_finite_logits_are_computed_again(path: Path) -> None:
    params = SamplingParams(n=2, temperature=0, max_tokens=NEW, ignore_eos=True)
    with cpu_engine(path, speculate=4, draft=str(path)) as engine:
        make_cheap(engine)
        processor, speculator, broken = manager_of(engine).output_processor, manager_of(engine).speculator, list[int]()
        assert isinstance(speculator, HostSpeculator)
        take = processor.take

        def take_broken(output: StepOutput) -> Reported:
            (_, slots, _), drafted = processor.in_flight[0], speculator._in_flight
            if drafted and (drafts := drafted[0]).step == output.step and drafts.models:
                output.logprob[slots == drafts.slot[0, len(broken) % 2]] = np.nan
                broken.append(output.step)
            return take(output)

        setattr(processor, "take", take_broken)  # noqa: B010
        (output,) = engine.generate([STEM], params)
        assert [one.token_ids for one in output.outputs] == [reference_greedy(path, [STEM], NEW)[0][0]] * 2
        assert engine.stats()["accepted_tokens"] > 0
    assert len(broken) > 2
