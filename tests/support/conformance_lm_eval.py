"""Run lm-eval as a client in a process of its own: `python -m support.conformance_lm_eval URL DIR`.

Writes local tasks of the demo model's held-out problems into DIR, runs them over /v1/completions (with a tokenizer of
its own, and with the server's) and /v1/chat/completions, and prints a JSON object: the results of each run, and its
documents with their answers.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from support.conformance import NAME
from tok_server.demo import HELD_OUT_FILE, MODEL_DIR

CHOICE, PLAIN, CHAT = "demo_choice", "demo_plain", "demo_chat"
DOCUMENTS = 2

# Two kinds of tasks: choose the right solution by log-likelihood, and generate a solution.
TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{{text}}}}}"
"""
CHOOSE = """output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
GENERATE = """output_type: generate_until
doc_to_target: "{{result}}"
generation_kwargs: {until: ["<stop>"], max_gen_toks: 160, do_sample: false}
filter_list: [{name: result, filter: [{function: regex, regex_pattern: "#### ([0-9]+)"}, {function: take_first}]}]
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
TASKS = {CHOICE: ("plain", CHOOSE), PLAIN: ("plain", GENERATE), CHAT: ("question", GENERATE)}


def main(url: str, directory: Path) -> None:
    """Print the results of all runs."""
    directory.mkdir()
    _write_tasks(directory)
    # Set before lm-eval is imported, so that nothing is downloaded.
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(directory / "hf")}
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_path=str(directory), include_defaults=False)
    runs: tuple[tuple[str, str, str, dict[str, str], list[str]], ...] = (
        ("completions", "local-completions", "completions", {"tokenizer": str(MODEL_DIR)}, [CHOICE, PLAIN]),
        ("remote", "local-completions", "completions", {"tokenizer_backend": "remote"}, [CHOICE, PLAIN]),
        ("chats", "local-chat-completions", "chat/completions", {}, [CHAT]),
    )
    found = {}
    for label, model, path, more, names in runs:
        result = simple_evaluate(
            model=model,
            model_args={"model": NAME, "base_url": f"{url}/v1/{path}", "max_length": 1024, "num_concurrent": 4, **more},
            tasks=names,
            task_manager=tasks,
            apply_chat_template=CHAT in names,
            bootstrap_iters=0,
        )
        found[label] = {"results": result["results"], "samples": result["samples"]}
    print(json.dumps(found, default=str))


def _write_tasks(directory: Path) -> None:
    data = directory / "problems.json"
    lines = HELD_OUT_FILE.read_text().splitlines()[:DOCUMENTS]
    data.write_text("".join(json.dumps(_document(json.loads(line))) + "\n" for line in lines))
    for name, (text, rest) in TASKS.items():
        (directory / f"{name}.yaml").write_text(TASK.format(name=name, data=data, text=text) + rest)


def _document(problem: dict[str, str]) -> dict[str, object]:
    solution = problem["answer"]
    steps, result = solution.split("#### ")
    choices = [steps.replace("a", "o") + f"#### {result}", solution, f"{steps}#### {int(result) + 100}"]
    plain = f"Question: {problem['question']}\nAnswer:"
    right = choices.index(solution)
    return {"plain": plain, "question": problem["question"], "result": result, "choices": choices, "label": right}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
