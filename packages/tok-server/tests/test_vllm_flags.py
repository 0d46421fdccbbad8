"""vLLM's flags of `tok serve`: other names of the same flags, switches that always hold, refusals in one line."""

from __future__ import annotations

import argparse
import shlex

import pytest

from tok_server.cli import make_parser
from tok_server.flags import engine_config, server_settings
from tok_server.flags.vllm_flags import ALWAYS_TRUE, REFUSED, SAME_FLAGS

VALUES = {
    "--gpu-memory-fraction": ["0.5"],
    "--no-cuda-graphs": [],
    "--ep": [],
    "--tls-cert": ["c"],
    "--tls-key": ["k"],
    "--quantization": ["fp8"],
}


def parse(*words: str) -> argparse.Namespace:
    return make_parser(["serve"]).parse_args(["serve", "m", *words])


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        make_parser(words[:1]).parse_args(words)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error.rstrip("\n")


@pytest.mark.parametrize(("name", "flag"), [(name, flag) for names, flag in SAME_FLAGS.items() for name in names])
def test_name_of_vllm_has_the_effect_of_the_flag(name: str, flag: str) -> None:
    values = VALUES.get(flag, ["2"])
    assert vars(parse(name, *values)) == vars(parse(flag, *values)) != vars(parse())


def test_names_of_vllm_reach_engine_and_server() -> None:
    sizes = "--tensor-parallel-size 2 --max-num-seqs 8 --max-num-batched-tokens 64 --gpu-memory-utilization 0.5"
    words = "-q awq_marlin --enforce-eager --dtype half --generation-config vllm --load-format safetensors"
    words += " --kv-cache-dtype int8_per_token_head"
    options = parse(*shlex.split(f"{sizes} {words} --tool-call-parser llama3_json --served-model-name a b"))
    config, settings = engine_config(options), server_settings(options)
    assert (config.tp, config.max_running, config.max_step_tokens, config.gpu_memory_fraction) == (2, 8, 64, 0.5)
    assert (config.cuda_graphs, config.dtype, config.generation_config) == (False, "float16", "none")
    assert (config.quantization, config.kv_cache_dtype) == ("awq", "int8")
    assert (config.load_format, settings.formats.tool_calls, settings.model_names) == ("auto", "llama3", ("a", "b"))


def test_switches_that_always_hold_change_nothing() -> None:
    assert vars(parse(*ALWAYS_TRUE)) == vars(parse())


@pytest.mark.parametrize("flag", REFUSED)
def test_refused_flag_says_why_in_one_line(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(capsys, "serve", "m", flag, "a", "b")
    assert error == f"tok serve: error: {flag} is not supported: {REFUSED[flag]} (see tok serve --help)"


def test_help_lists_names_of_vllm_in_one_group_without_refused_flags() -> None:
    parser = make_parser(["serve"])._subparsers
    assert parser is not None
    (commands,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    serve = commands.choices["serve"]
    *_, last = serve._action_groups
    assert last.title == "names used by vLLM"
    names = [name for action in last._group_actions for name in action.option_strings if action.help != "==SUPPRESS=="]
    assert names == [*(name for names in SAME_FLAGS for name in names), *ALWAYS_TRUE]
    assert not any(flag in serve.format_help().split() for flag in REFUSED)


def test_other_commands_have_no_names_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("batch", "a", "-o", "b", "--tensor-parallel-size", "2")
    assert "unknown flag --tensor-parallel-size" in refusal(capsys, *words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["serve", "--max-modellen", "5"],
            "tok serve: error: unknown flag --max-modellen; did you mean --max-model-len?",
        ),
        (["serve", "--max-num-seq=5"], "tok serve: error: unknown flag --max-num-seq=5; did you mean --max-num-seqs?"),
        (["serve", "--xyzzy"], "tok serve: error: unknown flag --xyzzy (see tok serve --help)"),
        (["serve", "a", "b"], "tok serve: error: unknown argument b (see tok serve --help)"),
        (["serve", "--port", "x"], "tok serve: error: --port is 'x'; allowed: integers (see tok serve --help)"),
        (
            ["serve", "--dtype", "int8"],
            "tok serve: error: --dtype is 'int8'; allowed: auto, bfloat16, float16, float32 (s",
        ),
        (["serve", "--port"], "tok serve: error: --port: expected one argument (see tok serve --help)"),
        (
            ["serv"],
            "tok: error: COMMAND is 'serv'; "
            "allowed: serve, batch, chat, models, quantize, warm, kernels, pass-at-k, bench; ",
        ),
        (
            ["batch"],
            "tok batch: error: the following arguments are required: FILE.jsonl, -o/--output (see tok batch --he",
        ),
        (["bench", "serve", "--concurency", "1"], "tok bench serve: error: "),
    ],
)
def test_mistyped_arguments_get_one_line(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, *words).startswith(expected)
