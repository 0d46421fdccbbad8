"""/tokenizer_info, by which lm-eval uses the server's tokenizer, and /load."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jinja2
from lm_eval.utils import RemoteTokenizer, check_remote_tokenizer_support

from support.patience import PATIENCE, wait_until
from support.paused_engine import gated
from support.serving import Server, serving

TEXT = "the quick brown fox, naïve 日本"
USER = [{"role": "user", "content": "hi"}]


def test_tokenizer_info_has_special_tokens_and_template(server: Server) -> None:
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    found = server.call("GET", "/tokenizer_info").json()
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert found["model_max_length"] == server.engine.info.max_model_len
    assert tokenizer.bos_id is not None
    assert found["bos_token"] == tokenizer.piece(tokenizer.bos_id).decode()
    assert found["eos_token"] == tokenizer.piece(tokenizer.eos_ids[0]).decode()
    assert server.engine.chat_template is not None
    rendered = jinja2.Template(str(found["chat_template"]), trim_blocks=True, lstrip_blocks=True)
    given = {"messages": USER, "add_generation_prompt": True, "bos_token": found["bos_token"]}
    assert rendered.render(**given) == server.engine.chat_template.render(USER)


def test_lm_eval_uses_the_tokenizer_of_the_server(tiny_model: Path) -> None:
    with serving(tiny_model, api_key="secret") as server:
        url = f"{server.url}/completions"
        assert not check_remote_tokenizer_support(url, max_retries=1)  # without the key
        assert check_remote_tokenizer_support(url, auth_token="secret")
        remote, tokenizer = RemoteTokenizer(url, auth_token="secret"), server.engine.tokenizer
        assert tokenizer is not None
        ids = remote.encode(TEXT)
        assert ids == tokenizer.encode(TEXT, add_special_tokens=False)
        assert remote.decode(ids) == TEXT
        assert (remote.bos_token_id, remote.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_ids[0])
        template = server.engine.chat_template
        assert template is not None
        assert remote.apply_chat_template(USER, bos_token=remote.bos_token) == template.render(USER)


def test_model_without_tokenizer_has_no_tokenizer_info(tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.iterdir():
        if not file.name.startswith(("tokenizer", "special")):
            (tmp_path / file.name).symlink_to(file)
    with serving(tmp_path) as server:
        assert server.call("GET", "/tokenizer_info").status == 501


def test_load_counts_prompts_whose_clients_wait(tiny_model: Path) -> None:
    with serving(tiny_model) as server, gated(server.engine) as gate, ThreadPoolExecutor(1) as pool:
        assert server.call("GET", "/load").json() == {"server_load": 0}
        answer = pool.submit(server.complete, prompt=[[1, 2], [3, 4]], max_tokens=2)
        wait_until(lambda: server.call("GET", "/load").json() == {"server_load": 2})
        gate.open()
        assert answer.result(PATIENCE).status == 200
        assert server.call("GET", "/load").json() == {"server_load": 0}
