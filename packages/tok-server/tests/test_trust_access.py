"""Access control: API keys, rate limits per key, web origins, host names, TLS and the admin key."""

from __future__ import annotations

import asyncio
import http.client
import re
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from support.engines import manager_of
from support.patience import PATIENCE, wait_until
from support.serving import Server, serving
from tok_core import InvalidField
from tok_core.messages import Submit
from tok_server import Settings
from tok_server.cli import main, make_parser
from tok_server.flags.server_flags import make_settings
from tok_server.http.access import NO_KEY, AllowedHosts, ApiKeys, Origins
from tok_server.http.request_limits import RateLimits, TokenBucket
from tok_server.serve import server_context
from tok_server.wire.errors import ApiError

PAGE = "https://page.example"
FIRST, SECOND, ADMIN = ({"Authorization": f"Bearer {key}"} for key in ("first", "second", "root"))


@pytest.fixture(scope="module")
def keyed_server(tiny_model: Path) -> Iterator[Server]:
    with serving(
        tiny_model,
        api_keys=("first", "second"),
        admin_key="root",
        allow_origins=(PAGE,),
        rate_limit_requests=600,
        rate_limit_tokens=600,
    ) as running:
        yield running


def ask(server: Server, headers: dict[str, str], **fields: object) -> tuple[int, dict[str, str]]:
    answer = server.call("POST", "/v1/completions", {"prompt": "one", "max_tokens": 1, **fields}, headers)
    return answer.status, answer.headers


def test_each_api_key_is_served_and_other_keys_get_401(keyed_server: Server) -> None:
    assert [ask(keyed_server, headers)[0] for headers in (FIRST, SECOND, ADMIN, {})] == [200, 200, 401, 401]


def test_engine_requests_carry_a_tenant_name_instead_of_the_api_key(
    keyed_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    intake, seen = manager_of(keyed_server.engine).intake, list[str]()
    submit = intake.submit

    def note(message: Submit) -> None:
        seen.append(message.tenant)
        submit(message)

    monkeypatch.setattr(intake, "submit", note)
    for headers in (FIRST, SECOND, FIRST):
        assert ask(keyed_server, headers)[0] == 200
        assert keyed_server.call("POST", "/v1/embeddings", {"input": [1, 2]}, headers).status == 200
    first, second = seen[0], seen[2]
    assert seen == [first, first, second, second, first, first]
    assert first != second
    assert not {"", "first", "second"} & set(seen)  # the engine need not know the keys themselves


def test_tenant_name_depends_only_on_the_key() -> None:
    keys, other = ApiKeys(("a", "b")), ApiKeys(("b",))
    assert keys.tenant(1) == other.tenant(0) != keys.tenant(0)
    assert keys.tenant(NO_KEY) == ""


def test_admin_key_opens_admin_paths_only() -> None:
    keys = ApiKeys(("a",), "b")
    assert keys.check("/admin/x", {"Authorization": "Bearer b"}) == NO_KEY
    for headers in ({"Authorization": "bearer a"}, {"x-api-key": "a"}, {"Authorization": "Basic x", "api-key": "a"}):
        assert keys.check("/v1/x", headers) == 0
    for path, sent, status in (("/admin/x", "a", 401), ("/admin/x", "", 401), ("/v1/x", "b", 401)):
        with pytest.raises(ApiError) as refused:
            keys.check(path, {"Authorization": f"Bearer {sent}", "x-api-key": "a" if path == "/v1/x" else "b"})
        assert refused.value.status == status
    with pytest.raises(ApiError, match="--admin-key") as closed:
        ApiKeys().check("/admin/x", {})
    assert closed.value.status == 403


def test_api_keys_come_from_flags_file_and_environment_deduplicated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nthree\n\n  four \none\n")
    monkeypatch.setenv("TOK_API_KEY", "five, six,")
    monkeypatch.setenv("TOK_ADMIN_KEY", "seven")
    words = ["serve", "m", "--api-key", "one", "--api-key", "two", "--api-key-file", str(file)]
    settings = make_settings(make_parser().parse_args(words), "m")
    assert settings.api_keys == ("one", "two", "five", "six", "three", "four")
    assert settings.admin_key == "seven"


@pytest.mark.parametrize("content", [None, "", "# only this\n"])
def test_a_key_file_without_a_key_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    options = make_parser().parse_args(["serve", "m", "--api-key-file", str(file)])
    with pytest.raises(InvalidField, match=r"^api_key_file is "):
        make_settings(options, "m")


@pytest.mark.parametrize("key", ["", " ", "a\n", "ü", "a b\x00", " a"])
def test_api_key_invalid_in_a_header_is_refused_and_not_printed(key: str) -> None:
    with pytest.raises(InvalidField, match=r"^api_key is '\*\*\*'; allowed: "):
        Settings(model_name="m", api_keys=("good", key))


def test_requests_above_a_keys_rate_limit_get_429_but_other_keys_do_not(keyed_server: Server) -> None:
    status, headers = ask(keyed_server, FIRST)
    assert status == 200
    assert headers["x-ratelimit-limit-requests"] == "600"
    assert 0 < int(headers["x-ratelimit-remaining-requests"]) < 600
    assert re.fullmatch(r"\d+\.\d{3}s", headers["x-ratelimit-reset-requests"])
    status, headers = ask(keyed_server, FIRST, max_tokens=60, n=16, ignore_eos=True)
    assert status == 200
    wait_until(lambda: keyed_server.context.open_requests == 0)  # a request's tokens are counted when it has ended
    refused = keyed_server.call("POST", "/v1/completions", {"prompt": "one"}, FIRST)
    assert refused.status == 429
    assert refused.error()["type"] == "tokens"
    assert refused.error()["code"] == "rate_limit_exceeded"
    assert "--rate-limit-tokens" in str(refused.error()["message"])
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
    assert keyed_server.context.metrics.refused.labels("rate_limit_tokens")._value.get() == 1
    assert ask(keyed_server, SECOND)[0] == 200
    assert keyed_server.call("GET", "/v1/models", None, FIRST).status == 200


def test_token_bucket_refills_over_time_and_repays_its_debt_first() -> None:
    now = [0.0]
    bucket = TokenBucket(60, lambda: now[0])
    assert bucket.wait(PATIENCE) == 0
    bucket.spend(90)
    assert (bucket.remaining, bucket.wait(1)) == (-30, 31)
    now[0] = 31
    assert bucket.wait(1) == 0
    now[0] = 10_000
    assert bucket.remaining == 60
    now[0] = 0  # a clock that steps back fills nothing
    assert bucket.remaining == 60


def test_rate_limits_admit_again_after_the_retry_after_time() -> None:
    now = [0.0]
    rates = RateLimits(2, 100, lambda: now[0])
    rates.admit(0)
    rates.admit(0)
    with pytest.raises(ApiError) as refused:
        rates.admit(0)
    assert (refused.value.status, refused.value.kind, refused.value.headers["Retry-After"]) == (429, "requests", "30")
    rates.admit(1)
    now[0] = 30
    rates.admit(0)
    assert RateLimits(None, None).headers(0) == {}


def test_web_page_is_served_only_if_its_origin_is_allowed(keyed_server: Server) -> None:
    body = {"prompt": "one", "max_tokens": 1}
    allowed = keyed_server.call("POST", "/v1/completions", body, {**SECOND, "Origin": PAGE})
    assert allowed.status == 200
    assert allowed.headers["access-control-allow-origin"] == PAGE
    assert "x-request-id" in allowed.headers["access-control-expose-headers"]
    streamed = keyed_server.call("POST", "/v1/completions", {**body, "stream": True}, {**SECOND, "Origin": PAGE})
    assert streamed.headers["access-control-allow-origin"] == PAGE
    for origin in ("https://other.example", "null", PAGE + ".evil.example", "http://page.example", "]["):
        refused = keyed_server.call("POST", "/v1/completions", body, {**SECOND, "Origin": origin})
        assert refused.status == 403
        assert refused.error()["code"] == "origin_not_allowed"
        assert "access-control-allow-origin" not in refused.headers
    same = {**SECOND, "Origin": f"http://127.0.0.1:{keyed_server.port}"}
    assert keyed_server.call("POST", "/v1/completions", body, same).status == 200


def test_cors_preflight_is_answered_without_an_api_key(keyed_server: Server) -> None:
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}
    answer = keyed_server.call("OPTIONS", "/v1/completions", None, {"Origin": PAGE, **wanted})
    assert answer.status == 204
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["access-control-allow-headers"] == "authorization, content-type"
    other = keyed_server.call("OPTIONS", "/v1/completions", None, {"Origin": "https://other.example", **wanted})
    assert other.status == 401
    assert "access-control-allow-origin" not in other.headers


def test_other_origins_are_refused_without_allow_origin(server: Server) -> None:
    answer = server.call("POST", "/v1/completions", b"{}", {"Origin": PAGE, "Content-Type": ""})
    assert answer.status == 403
    assert (
        server.call("GET", "/v1/models", None, {"Origin": PAGE})
        .headers.keys()
        .isdisjoint({"access-control-allow-origin"})
    )
    assert Origins(("*",)).headers(PAGE)["Access-Control-Allow-Origin"] == PAGE


def certificate(directory: Path, name: str) -> tuple[Path, Path]:
    cert, key = directory / f"{name}.pem", directory / f"{name}.key"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*command, *subject, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


def test_tls_certificate_enables_https_and_disables_http(tiny_model: Path, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "good")
    with serving(tiny_model, tls_cert=str(cert), tls_key=str(key), header_timeout=5.0) as server:
        trusted = ssl.create_default_context(cafile=str(cert))
        url = f"https://127.0.0.1:{server.port}/health"
        with urllib.request.urlopen(url, context=trusted, timeout=PATIENCE) as answer:
            assert answer.status == 200
        with pytest.raises((OSError, http.client.HTTPException)):
            server.call("GET", "/health")


def test_invalid_tls_files_are_refused_naming_the_field(tmp_path: Path) -> None:
    cert, _ = certificate(tmp_path, "one")
    _, other = certificate(tmp_path, "two")
    junk = tmp_path / "junk"
    junk.write_text("no certificate")
    for given, key, field in (
        (tmp_path / "missing", None, "tls_cert"),
        (cert, tmp_path / "missing", "tls_key"),
        (junk, None, "tls_cert"),
        (cert, other, "tls_cert"),
        (cert, None, "tls_cert"),
    ):
        with pytest.raises(InvalidField, match=f"^{field} is "):
            server_context(str(given), None if key is None else str(key))
    with pytest.raises(InvalidField, match=r"^tls_key is "):
        Settings(model_name="m", tls_key="key")


def test_serve_names_the_flag_of_a_missing_tls_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "missing.pem")
    assert main(["serve", "--port", "0", "--tls-cert", missing]) == 2
    assert capsys.readouterr().err.startswith("tok serve: error: --tls-cert is ")


def test_loopback_server_refuses_other_host_names(server: Server) -> None:
    """DNS rebinding: a page of evil.example, resolved to 127.0.0.1, can neither read nor change anything."""
    for host in (
        "evil.example",
        f"evil.example:{server.port}",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "2130706433",
    ):
        for method, path in (("GET", "/v1/models"), ("GET", "/"), ("GET", "/health"), ("POST", "/v1/completions")):
            origin = {} if method == "GET" else {"Origin": f"http://{host}"}
            refused = server.call(method, path, b"{}", {"Host": host, **origin})
            assert refused.status == 403, (host, path)
            error = refused.error()
            assert (error["param"], error["code"]) == ("Host", "host_not_allowed")
            assert "--allowed-host" in str(error["message"])
    for host in ("localhost", "LOCALHOST:1", "localhost.", "a.localhost", "127.0.0.1", "127.0.0.2:80", "[::1]:80", ""):
        assert server.call("GET", "/v1/models", None, {"Host": host}).status == 200, host


def host_of(headers: dict[str, str], own: str) -> web.Request:
    """Return a request that came to the address `own`."""
    transport = Mock(asyncio.Transport)
    transport.get_extra_info.return_value = (own, 80)
    return make_mocked_request("GET", "/", headers, transport=transport)


@pytest.mark.parametrize(
    ("listens", "allowed", "own", "asked", "refused"),
    [
        ("127.0.0.1", (), "127.0.0.1", "evil.example", True),
        ("::1", (), "::1", "evil.example", True),
        ("127.0.0.1", ("api.example",), "127.0.0.1", "API.example:443", False),
        ("127.0.0.1", ("api.example",), "127.0.0.1", "evil.example", True),
        ("127.0.0.1", ("*",), "127.0.0.1", "evil.example", False),
        ("127.0.0.1", (), "10.0.0.5", "any.example", False),  # a program with its own event loop listens elsewhere
        ("0.0.0.0", (), "10.0.0.5", "any.example", False),
        ("0.0.0.0", ("api.example",), "10.0.0.5", "evil.example", True),
        ("0.0.0.0", ("api.example",), "10.0.0.5", "10.0.0.5", False),
        ("my.host", ("api.example",), "10.0.0.5", "my.host", False),
    ],
)
def test_allowed_hosts_accepts_and_refuses_host_names(
    listens: str, allowed: tuple[str, ...], own: str, asked: str, refused: bool
) -> None:
    hosts = AllowedHosts(listens, allowed)
    for _ in range(2):  # the cached decision is the same
        if refused:
            with pytest.raises(ApiError, match="Host is "):
                hosts.check(host_of({"Host": asked}, own))
        else:
            hosts.check(host_of({"Host": asked}, own))


def test_tokenize_and_detokenize_count_against_the_limits(tiny_model: Path) -> None:
    with serving(tiny_model, rate_limit_requests=600, rate_limit_tokens=200) as server:
        many = {"tokens": [5] * 300}
        answer = server.call("POST", "/detokenize", many)
        assert answer.status == 200
        assert answer.headers["x-ratelimit-limit-tokens"] == "200"
        wait_until(lambda: server.context.open_requests == 0)
        for path, body in (("/detokenize", many), ("/tokenize", {"prompt": "a"})):
            refused = server.call("POST", path, body)
            assert refused.status == 429
            assert refused.error()["code"] == "rate_limit_exceeded"
    with serving(tiny_model, rate_limit_tokens=200) as server:
        assert server.call("POST", "/tokenize", {"prompt": "a b c " * 100}).status == 200
        wait_until(lambda: server.context.open_requests == 0)
        assert server.call("POST", "/tokenize", {"prompt": "a"}).status == 429
    with serving(tiny_model, max_queued=0) as server:
        for path, body in (("/detokenize", many), ("/tokenize", {"prompt": "a"})):
            assert server.call("POST", path, body).error()["code"] == "max_queued"
