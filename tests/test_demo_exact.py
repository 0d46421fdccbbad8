"""The demo model through the whole engine gives the tokens of transformers, in batches, samples and small caches."""

from __future__ import annotations

import json

import numpy as np
import pytest

from support.engines import cpu_engine
from support.tiny_models import reference_greedy
from tok_core import SamplingParams
from tok_server.demo import HELD_OUT_FILE, MODEL_DIR

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=0)


@pytest.mark.parametrize("options", [{}, {"page_size": 4, "max_step_tokens": 7, "max_running": 7}])
def test_greedy_answers_of_the_demo_model_equal_those_of_transformers(options: dict[str, int]) -> None:
    questions = [json.loads(line)["question"] for line in HELD_OUT_FILE.read_text().splitlines()[:8]]
    with cpu_engine(MODEL_DIR, **options) as engine:
        assert engine.chat_template is not None
        assert engine.tokenizer is not None
        texts = [engine.chat_template.render([{"role": "user", "content": question}]) for question in questions]
        prompts = [engine.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        outputs = engine.generate(prompts, GREEDY)
    for output, (tokens, logprobs) in zip(outputs, reference_greedy(MODEL_DIR, prompts, 64), strict=True):
        sample = output.outputs[0]
        assert sample.token_ids == list(tokens)
        assert sample.logprobs is not None
        np.testing.assert_allclose([one.logprob for one in sample.logprobs], logprobs, atol=1e-4)
