"""The `tok` command: flags, exit codes, one-line errors, and help without heavy imports."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from support.patience import PATIENCE
from tok_core import EngineConfig, InvalidField
from tok_core.config import BackendName, Device, DType, KVCacheDType, LoadFormat, Quantization
from tok_core.sampling_params import MAX_N
from tok_server.cli import main, make_parser
from tok_server.demo import MODEL_DIR
from tok_server.flags.engine_flags import (
    DEMO_MODEL,
    DEMO_NAME,
    ENGINE_FLAGS,
    engine_config,
    model_and_name,
    server_settings,
)
from tok_server.flags.server_flags import LIMITS

SERVE_FLAGS = {
    "--host": "127.0.0.1",
    "--port": 10210,
    "--device": "auto",
    "--dtype": "auto",
    "--backend": "auto",
    "--load-format": "auto",
    "--generation-config": "auto",
    "--logprobs-mode": "raw_logprobs",
    "--quantization": "auto",
    "--ignore-config-keys": None,
    "--page-size": 16,
    "--kv-cache-tokens": None,
    "--gpu-memory-fraction": 0.9,
    "--max-running": None,
    "--max-step-tokens": None,
    "--max-model-len": None,
    "--dp": 1,
    "--tp": 1,
    "--pp": 1,
    "--ep": False,
    "--redundant-experts": 0,
    "--expert-rebalance-steps": EngineConfig(model="m").expert_rebalance_steps,
    "--async-tp-threshold": None,
    "--ray": None,
    "--kv-cache-dtype": "auto",
    "--batch-invariant": False,
    "--no-prefix-groups": True,
    "--admission": "forecast",
    "--no-cuda-graphs": True,
    "--enable-sleep-mode": False,
    "--run-ahead": EngineConfig(model="m").run_ahead,
    "--speculate": "off",
    "--draft": None,
    "--seed": 0,
    "--step-timeout": 600.0,
    "--start-timeout": 600.0,
    "--max-restarts": 3,
    "--restart-window": 300.0,
    "--eos-probability": None,
    "--markov-probability": None,
    "--moe-skew": 0.0,
    "--api-key": None,
    "--served-model-name": None,
    "--cache-dir": None,
    "--data-dir": None,
    "--no-batches": True,
    "--log-level": "info",
    "--api-key-file": None,
    "--share-prefixes": False,
    "--enable-rl": False,
    "--admin-key": None,
    "--tls-cert": None,
    "--tls-key": None,
    "--allow-origin": None,
    "--allowed-host": None,
    "--log-format": "text",
    "--otlp-endpoint": None,
    "--tool-call-parser": "auto",
    "--reasoning-parser": "auto",
    "--trust-request-chat-template": False,
    "--revision": None,
    "--tokenizer": None,
    "--chat-template": None,
    "--max-connections": 16_384,
    "--max-header": 16_384,
    "--max-body": 8 << 20,
    "--max-bodies": 2 << 30,
    "--max-unread": 1 << 20,
    "--data-quota": None,
    "--max-file": 8 << 30,
    "--max-n": MAX_N,
    "--min-client-priority": 0,
    "--max-queued": 65_536,
    "--rate-limit-requests": None,
    "--rate-limit-tokens": None,
    "--header-timeout": 20.0,
    "--body-timeout": 60.0,
    "--write-timeout": 60.0,
    "--idle-timeout": 300.0,
    "--request-timeout": 3600.0,
    "--drain-timeout": 30.0,
}
LIMIT_FLAGS = {"--" + name.replace("_", "-") for name in LIMITS}


def subparser(name: str) -> argparse.ArgumentParser:
    found = next(a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    parser = found.choices[name]
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


def flags(name: str) -> dict[str, object]:
    actions = [action for action in subparser(name)._actions if action.dest != "help"]
    return {
        action.option_strings[0]: action.default
        for action in actions
        if action.option_strings and action.default != argparse.SUPPRESS  # not another name, used by vLLM
    }


def test_serve_has_exactly_the_listed_flags_and_defaults() -> None:
    assert flags("serve") == SERVE_FLAGS


def test_chat_has_exactly_the_listed_flags() -> None:
    assert set(flags("chat")) == {
        "--url", "--api-key", "--system", "--temperature", "--max-tokens", "--device", "--dtype"
    }  # fmt: skip


def test_serve_defaults_equal_engine_config_defaults() -> None:
    options = make_parser().parse_args(["serve", "some/model"])
    assert engine_config(options) == EngineConfig(model="some/model")


def test_every_flag_of_serve_reaches_the_engine_or_the_server() -> None:
    given = {
        "--host": "::1", "--port": 1, "--device": "cpu", "--dtype": "float16", "--load-format": "dummy",
        "--quantization": "fp8",
        "--generation-config": "none", "--logprobs-mode": "processed_logprobs",
        "--revision": "v1", "--tokenizer": "o/t", "--chat-template": "t.jinja",
        "--backend": "reference", "--admission": "watermark",
        "--page-size": 32, "--kv-cache-tokens": 64, "--gpu-memory-fraction": 0.5, "--max-running": 3,
        "--max-step-tokens": 5, "--max-model-len": 7, "--admin-key": "k",
        "--tls-cert": "c", "--tls-key": "t", "--otlp-endpoint": "http://o",
        "--data-dir": "somewhere", "--cache-dir": "kernels", "--kv-cache-dtype": "fp8", "--run-ahead": 4, "--seed": 6,
        "--dp": 2, "--tp": 4, "--pp": 3, "--async-tp-threshold": 512, "--redundant-experts": 4,
        "--expert-rebalance-steps": 100, "--ray": "10.0.0.1:6379",
        "--step-timeout": 2.5, "--start-timeout": 3.5, "--max-restarts": 0,
        "--restart-window": 1.5, "--eos-probability": 0.25, "--moe-skew": 1.5,
        "--markov-probability": 0.5,
    }  # fmt: skip
    words = [*(str(word) for pair in given.items() for word in pair), "--no-prefix-groups", "--no-cuda-graphs"]
    words += [
        "--ignore-config-keys",
        "one,two",
        "--share-prefixes",
        "--enable-rl",
        "--enable-sleep-mode",
        "--ep",
        "--served-model-name",
        "a",
        "b",
        "a",
    ]
    options = make_parser().parse_args(["serve", "m/n", *words])
    config, settings = engine_config(options), server_settings(options)
    for flag, value in given.items():
        name = flag[2:].replace("-", "_")
        assert getattr(config if name in ENGINE_FLAGS else settings, name) == value, flag
    assert (config.prefix_groups, config.cuda_graphs, config.enable_sleep_mode, config.ep) == (False, False, True, True)
    assert (settings.share_prefixes, settings.enable_rl) == (True, True)
    assert config.ignore_config_keys == ("one", "two")
    assert (settings.model_name, settings.model_names) == ("a", ("a", "b"))
    left = {
        "--ignore-config-keys",
        "--served-model-name",
        "--share-prefixes",
        "--enable-rl",
        "--enable-sleep-mode",
        "--ep",
        "--log-level",
        "--log-format",
        "--no-batches",
        "--batch-invariant",
        "--speculate",
        "--draft",
        "--no-prefix-groups",
        "--no-cuda-graphs",
    }  # asserted above or in other tests
    elsewhere = {
        "--api-key",
        "--api-key-file",
        "--allow-origin",
        "--allowed-host",
        "--tool-call-parser",
        "--reasoning-parser",
        "--trust-request-chat-template",
    }
    assert given.keys() | left | elsewhere | LIMIT_FLAGS == SERVE_FLAGS.keys()


def test_speculate_is_a_word_or_a_number() -> None:
    parse = make_parser().parse_args
    for text, value in (("off", "off"), ("auto", "auto"), ("4", 4)):
        assert engine_config(parse(["serve", "m", "--speculate", text])).speculate == value
    assert engine_config(parse(["serve", "m", "--speculate", "auto", "--draft", "small"])).draft == "small"
    with pytest.raises(InvalidField, match="speculate is 'on'; allowed: off, auto, or integers"):
        engine_config(parse(["serve", "m", "--speculate", "on"]))


def test_batch_invariant_is_a_flag_without_a_value() -> None:
    parse = make_parser().parse_args
    assert not engine_config(parse(["serve", "m"])).batch_invariant
    assert engine_config(parse(["serve", "m", "--batch-invariant"])).batch_invariant


MEASURING = {"eos_temperature", "trace", "trace_from", "trace_steps"}


def test_every_engine_config_field_has_a_flag_except_measuring_fields() -> None:
    fields = {field.name for field in msgspec.structs.fields(EngineConfig)}
    assert set(ENGINE_FLAGS) | MEASURING | {"model"} == fields
    assert {"--" + name.replace("_", "-") for name in ENGINE_FLAGS} <= {
        flag.replace("--no-", "--") for flag in flags("serve")
    }


@pytest.mark.parametrize(
    ("field", "allowed"),
    [
        ("device", Device),
        ("dtype", DType),
        ("backend", BackendName),
        ("load_format", LoadFormat),
        ("kv_cache_dtype", KVCacheDType),
        ("quantization", Quantization),
    ],
)
def test_flag_choices_equal_those_of_the_engine_config(field: str, allowed: object) -> None:
    choices = {action.dest: action.choices for action in subparser("serve")._actions}
    assert tuple(choices[field] or ()) == get_args(allowed)


def test_served_name_is_demo_model_by_default_else_id_or_directory_name(tmp_path: Path) -> None:
    assert model_and_name(None) == (str(DEMO_MODEL), DEMO_NAME)
    assert model_and_name("owner/name") == ("owner/name", "owner/name")
    (tmp_path / "my-model").mkdir()
    path = str(tmp_path / "my-model")
    assert model_and_name(path) == (path, "my-model")
    assert model_and_name(path + "/") == (path + "/", "my-model")


@pytest.mark.parametrize("command", [[], ["serve"], ["batch"], ["chat"], ["models"]])
def test_help_loads_no_torch_and_no_web_stack(command: list[str]) -> None:
    code = (
        "import sys\nfrom tok_server.cli import main\n"
        f"try: main({[*command, '--help']!r})\nexcept SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'numpy', 'aiohttp', 'zmq', 'transformers'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: tok" in done.stdout


def test_tok_without_a_command_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "tok COMMAND --help" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--page-size", "3"], "--page-size is 3; allowed: powers of two"),
        (["--port", "65536"], "--port is 65536; allowed: integers from 0"),
        (["--gpu-memory-fraction", "1.5"], "--gpu-memory-fraction is 1.5; allowed: above 0"),
        (["--max-running", "0"], "--max-running is 0; allowed: integers from 1"),
        (["--run-ahead", "0"], "--run-ahead is 0; allowed: integers from 1"),
        (["--step-timeout", "0"], "--step-timeout is 0.0; allowed: seconds above 0"),
        (["--speculate", "AUTO"], "--speculate is 'AUTO'; allowed: off, auto, or integers from 1 to 16"),
        (["--speculate", "17"], "--speculate is 17; allowed: off, auto, or integers from 1 to 16"),
        (["--draft", "small"], "--draft is 'small'; allowed: only together with speculate"),
        (["--dp", "65"], "--dp is 65; allowed: integers from 1 to 64"),
        (["--api-key", " "], "--api-key is"),
        (["--allow-origin", "example.org"], "--allow-origin is 'example.org'; allowed: *, or an origin such as"),
        (["--allow-origin", "http://a/b"], "--allow-origin is 'http://a/b'; allowed: *, or an origin such as"),
        (["--allowed-host", "http://a"], "--allowed-host is 'http://a'; allowed: *, or a host name"),
    ],
)
def test_serve_reports_an_invalid_flag_value_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tok serve: error: {message}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [["serve", "--port", "x"], ["serve", "--no-such-flag"], ["nonsense"]])
def test_unparsable_arguments_exit_with_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["batch", "/no/such/file", "-o", "out"], "FILE.jsonl is '/no/such/file'; allowed: an existing file"),
        (["batch", __file__, "-o", ""], "--output is '.'; allowed: the name of a file"),
        (["quantize", str(MODEL_DIR), "/"], "OUT is '/'; allowed: a directory that does not exist yet"),
    ],
)
def test_error_names_the_argument_as_it_is_given(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"tok {arguments[0]}: error: {message}\n"


def test_pass_at_k_reports_an_output_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = tmp_path / "file"
    taken.touch()
    assert main(["pass-at-k", "--samples", "1", "--limit", "1", "--max-tokens", "1", "--out", str(taken)]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"tok pass-at-k: error: {taken}: File exists"


def test_output_into_a_closed_pipe_ends_without_a_traceback() -> None:
    code = "import sys; from tok_server.cli import main; sys.exit(main(['models']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait() == 1


def test_help_prints_question_marks_for_what_the_encoding_lacks() -> None:
    command = [sys.executable, "-m", "tok_server.cli", "quantize", "--help"]
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    ran = subprocess.run(command, env=ascii_only, capture_output=True, check=False, timeout=PATIENCE)
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert b"each block of 128 ? 128" in b" ".join(ran.stdout.split())


def test_serve_reports_a_port_in_use_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"tok serve: error: cannot listen on 127.0.0.1 port {port}: ")
    assert error.count("\n") == 1


def test_serve_reports_an_unknown_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--host", "no.such.host.invalid"]) == 1
    assert "cannot listen on host 'no.such.host.invalid'" in capsys.readouterr().err


def test_serve_reports_a_missing_model_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/no/such/model", "--port", "0"]) == 1
    error = capsys.readouterr().err
    assert "tok serve: error: model '/no/such/model': is no directory" in error
    assert "Traceback" not in error


def test_models_lists_supported_architectures_and_the_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    told = capsys.readouterr().out
    for name in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", DEMO_NAME):
        assert name in told


def test_models_describes_a_model_directory(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", str(tiny_model)]) == 0
    told = capsys.readouterr().out
    assert "architecture   LlamaForCausalLM" in told
    assert "chat template  yes" in told
    assert re.search(r"weights +\d+ tensors\n", told)
    memory = r"on a GPU +([\d.]+) MiB of weights; ([\d.]+) MiB with --quantization fp8; [\d,]+ bytes of KV cache"
    found = re.search(memory, told)
    assert found is not None
    assert float(found[2]) < float(found[1])
    (empty := tiny_model.parent / "empty").mkdir(exist_ok=True)
    assert main(["models", str(empty)]) == 1
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["gone", "cut", "no header", "empty"])
def test_models_reports_missing_or_truncated_weights(
    tiny_model: Path, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    file = copy / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes({"cut": whole[:-1], "no header": b"\xff" * 64}.get(damage, b""))
    if damage == "gone":
        file.unlink()
    assert main(["models", str(copy)]) == 1
    told = capsys.readouterr().out
    assert re.search(r"weights +none \(.*model\.safetensors", told)
    assert "tokenizer      yes" in told


@pytest.mark.parametrize("content", ["[]", "{", '{"added_tokens_decoder": {"x": 1}, "chat_template": [1]}'])
def test_models_reports_a_malformed_tokenizer_config_in_one_line(
    tiny_model: Path, tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    (copy / "tokenizer_config.json").write_text(content)
    assert main(["models", str(copy)]) == 0
    told = capsys.readouterr().out
    assert re.search(r"tokenizer +none \(.*tokenizer_config\.json", told)
    assert re.search(r"chat template +none \(.*tokenizer_config\.json", told)


@pytest.mark.parametrize(("flag", "value"), [("--device", "cpu"), ("--dtype", "float16")])
def test_chat_with_url_refuses_device_and_dtype(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9/v1", flag, value]) == 2
    assert capsys.readouterr().err.startswith(
        f"tok chat: error: {flag} is {value!r}; allowed: auto together with --url"
    )


def test_help_of_dp_tp_and_pp_names_replicas_ranks_and_stages() -> None:
    told = {
        action.option_strings[0][2:]: str(action.help)
        for action in subparser("serve")._actions[1:-1]
        if action.option_strings
    }
    assert [word in told[name] for name, word in (("dp", "replicas"), ("tp", "ranks"), ("pp", "stages"))] == [True] * 3
