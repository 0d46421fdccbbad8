"""With nested prefix groups each sequence reads exactly its own context, whatever the schedule."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from support.schedules import assert_all_given_back, drive, engine_info, expected, make_manager, submit
from support.simulated_worker import collect
from tok_core import SamplingParams
from tok_core.manager.loop import Manager
from tok_core.manager.prefix_groups.cascade import CascadeCosts
from tok_core.manager.prefix_groups.grouping import Grouping, MostPagesSaved
from tok_core.messages import StepInput, Submit

SYSTEM, EXAMPLES = list(range(40)), [[40 + i] * 24 for i in range(3)]


def nest(manager: Manager, member: float = 0.01, group: float = 0.02) -> None:
    """Set the cost of a level to zero, so that prompts as short as these are nested."""
    manager.scheduler.groupings = [Grouping(manager.paging.tree, MostPagesSaved(CascadeCosts(member, group, 0)))]


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    prompt = SYSTEM[: draw(st.sampled_from([3, 17, 40, 40]))] + draw(st.sampled_from(EXAMPLES))
    return prompt[: draw(st.integers(1, 64))] + draw(st.lists(st.integers(0, 3), min_size=1, max_size=8))


@settings(max_examples=40)
@given(
    st.lists(st.tuples(prompts(), st.integers(1, 6), st.integers(1, 24), st.integers(0, 20)), min_size=1, max_size=9),
    st.sampled_from([1, 4, 16]),
    st.integers(40, 400),
    st.sampled_from([(0, 0), (0.01, 0), (0.01, 2), (1, 0), (1, 5)]),
)
def test_nested_groups_change_no_token(
    asked: list[tuple[list[int], int, int, int]],
    page_size: int,
    room: int,
    costs: tuple[float, float],
) -> None:
    info = engine_info(
        max_model_len=96,
        page_size=page_size,
        num_pages=-(-96 // page_size) + room // page_size,
        max_running=24,
        max_step_tokens=80,
    )
    manager, ports = make_manager(info)
    nest(manager, *costs)
    arrivals: dict[int, list[Submit]] = {}
    wanted: dict[tuple[int, int], list[int]] = {}
    for rid, (prompt, n, tokens, turn) in enumerate(asked):
        params = SamplingParams(n=n, max_tokens=tokens, seed=1)
        arrivals.setdefault(turn, []).append(submit(rid, prompt, params))
        wanted |= {(rid, sample): expected(prompt, sample, params) for sample in range(n)}
    drive(manager, ports, arrivals)
    assert collect(ports.reports)[0] == wanted
    assert_all_given_back(manager)


def test_a_system_prompt_examples_and_questions_are_read_in_two_levels() -> None:
    info = engine_info(max_model_len=96, num_pages=2000, max_running=36, max_step_tokens=500)
    manager, ports = make_manager(info)
    nest(manager)
    params = SamplingParams(n=4, max_tokens=20, ignore_eos=True, seed=1)
    questions = [SYSTEM + EXAMPLES[i % 3] + [i] * 8 + [0] for i in range(9)]
    drive(manager, ports, {0: [submit(i, question, params) for i, question in enumerate(questions)]})
    full = [step for step in ports.steps if len(step.decode_slot) == 36]
    assert len(full) > 10
    assert [shape(step) for step in full] == [[(3, 36, 64), (9, 36, 8)]] * len(full)
    assert manager.scheduler.group_rows >= 36 * len(full)
    tokens, _ = collect(ports.reports)
    for rid, question in enumerate(questions):
        assert [tokens[rid, i] for i in range(4)] == [expected(question, i, params) for i in range(4)]


def shape(step: StepInput) -> list[tuple[int, int, int]]:
    """Return for each level its groups, the rows in them, and the most positions that a group reads."""
    return [
        (len(level.start), int(level.count.sum()), int((level.kv_end - level.kv_start).max())) for level in step.levels
    ]
