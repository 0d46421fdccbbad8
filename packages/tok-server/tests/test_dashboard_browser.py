"""The dashboard in headless Chromium, on a real server of two replicas that requires a key."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from support.patience import wait_until
from support.serving import NAME, Server, serving

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]

ALONE = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync"
KEY = {"Authorization": "Bearer secret"}
PATIENCE = 60_000  # ms


@pytest.fixture(scope="module")
def keyed_server(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, api_key="secret", max_n=64, engine_options={"dp": 2}) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=[*ALONE.split(), "--no-first-run"])
        yield launched
        launched.close()


def opened(browser: Browser, server: Server, *, key: str | None = "secret", **options: Any) -> Page:
    """Open the dashboard in a window of its own, and record its requests, errors and warnings."""
    page = browser.new_page(**options)
    page.set_default_timeout(PATIENCE)
    page.asked, page.complaints = [], []
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("console", lambda said: page.complaints.append(said.text) if said.type in ("error", "warning") else None)
    if key is not None:
        page.add_init_script(f"sessionStorage.setItem('tok-api-key', '{key}')")
    page.goto(f"http://127.0.0.1:{server.port}/")
    return page


@pytest.fixture(scope="module")
def page(browser: Browser, keyed_server: Server) -> Iterator[Page]:
    """A page for tests that restore its state; it may log no errors and request no other host."""
    found = opened(browser, keyed_server, viewport={"width": 1400, "height": 950}, color_scheme="light")
    becomes(found, "document.getElementById('state').textContent === 'ready'")
    yield found
    assert found.complaints == []
    assert found.asked
    assert all(url.startswith(f"http://127.0.0.1:{keyed_server.port}/") for url in found.asked)
    found.close()


def becomes(page: Page, condition: str) -> None:
    """Wait until `condition` holds. Playwright's own wait evaluates text in the page, which its policy forbids."""
    wait_until(lambda: bool(page.evaluate(condition)))


def text(page: Page, selector: str) -> str:
    return str(page.locator(selector).first.inner_text())


def test_dashboard_shows_model_device_charts_and_replicas(page: Page, keyed_server: Server) -> None:
    assert text(page, "#model") == NAME
    assert NAME in page.title()
    assert "cpu" in text(page, "#facts")
    assert f"context {keyed_server.engine.info.max_model_len:,} tokens" in text(page, "#facts")
    assert page.locator("svg.chart").count() == 16
    assert page.locator("#replicas tr").count() == 2


def test_dashboard_figures_change_under_load(page: Page, keyed_server: Server) -> None:
    over = threading.Event()

    def load() -> None:
        while not over.is_set():
            body = {"model": NAME, "prompt": "one two three", "n": 8, "max_tokens": 100, "ignore_eos": True}
            assert keyed_server.call("POST", "/v1/completions", body, KEY).status == 200

    workers = [threading.Thread(target=load) for _ in range(4)]
    for worker in workers:
        worker.start()
    try:
        for figure in ("output", "input", "requests", "busy"):
            becomes(page, f"parseFloat(document.getElementById('figure-{figure}').textContent) > 0")
        for figure in ("queue_p50", "ttft_p50", "token_p90", "e2e_p99"):
            becomes(page, f"/^\\d.* m?s$/.test(document.getElementById('figure-{figure}').textContent)")
    finally:
        over.set()
        for worker in workers:
            worker.join()
    assert "M" in str(page.locator("#load path.curve").first.get_attribute("d"))


def test_dashboard_can_show_a_single_replica(page: Page) -> None:
    page.select_option("#scope", "2")
    assert page.evaluate("document.getElementById('scope').selectedOptions[0].textContent") == "replica 1"
    becomes(
        page,
        "document.querySelectorAll('#replicas tr')[1].cells[6].textContent"
        " === document.getElementById('figure-pages').textContent",
    )
    page.select_option("#scope", "0")


def test_dashboard_shows_an_hour_and_arrow_keys_show_earlier_values(page: Page) -> None:
    page.click("[data-window=hour]")
    assert page.get_attribute("[data-window=hour]", "aria-pressed") == "true"
    assert page.locator("#load text", has_text="1 h ago").count() == 4
    assert "in the last hour" in text(page, "#latency-of")
    assert text(page, "#problems-of") == "in the last hour"
    chart = page.locator("#load svg").first
    chart.focus()
    chart.press("ArrowLeft")
    assert re.match(r"\d\d:\d\d:\d\d", text(page, "#load .tip"))
    chart.press("Escape")
    assert page.locator("#load .tip").first.is_hidden()
    page.click("[data-window=seconds]")
    assert "in the last 2 minutes" in text(page, "#latency-of")


def test_dashboard_charts_show_values_with_their_names_under_the_pointer(page: Page) -> None:
    plot = page.locator("#latency .plot").first
    plot.locator("svg").hover()
    tip = plot.locator(".tip")
    assert re.match(r"\d\d:\d\d:\d\d\np50 .+\np90 .+\np99 .+", tip.inner_text())
    outer, inner = plot.bounding_box(), tip.bounding_box()
    assert outer is not None
    assert inner is not None
    assert outer["x"] <= inner["x"]
    assert inner["x"] + inner["width"] <= outer["x"] + outer["width"] + 1
    page.mouse.move(0, 0)
    assert tip.is_hidden()


def test_dashboard_explains_its_figures(page: Page) -> None:
    button = page.get_by_role("button", name="Explain: KV cache used")
    button.press("Enter")
    assert button.get_attribute("aria-expanded") == "true"
    why = page.locator(f"#{button.get_attribute('aria-controls')}")
    assert "attention keys and values" in why.inner_text()
    button.press("Escape")
    assert why.is_hidden()


def test_dashboard_counts_errors_and_refusals_of_the_window(page: Page, keyed_server: Server) -> None:
    before = [int(text(page, f"#figure-{name}")) for name in ("client_errors", "refused")]
    wrong = {"model": NAME, "prompt": "one", "n": 65}
    assert keyed_server.call("POST", "/v1/completions", wrong, KEY).status == 400
    for name, count in zip(("client_errors", "refused"), before, strict=True):
        becomes(page, f"document.getElementById('figure-{name}').textContent === '{count + 1}'")
    assert "× 400" in text(page, "#problems .beside")
    assert "max_n" in text(page, "#problems .card:nth-child(2) .beside")
    assert page.locator("#batches-section").is_hidden()  # the server has no data directory


def test_dashboard_shows_the_base_url_and_copies_a_curl_command_that_works(
    browser: Browser, keyed_server: Server
) -> None:
    page = opened(browser, keyed_server)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    becomes(page, "document.getElementById('base').textContent")
    assert text(page, "#base") == f"http://127.0.0.1:{keyed_server.port}/v1"
    page.get_by_text("Example with curl").click()
    page.get_by_role("button", name="Copy the curl command").click()
    becomes(page, "document.querySelector('[data-copy=curl]').textContent === 'Copied'")
    copied = str(page.evaluate("navigator.clipboard.readText()"))
    page.close()
    environment = {**os.environ, "API_KEY": "secret"}
    done = subprocess.run(["bash", "-c", copied], env=environment, capture_output=True, timeout=60, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"


def test_dashboard_chat_answers_several_turns(page: Page) -> None:
    page.click("#ask summary")
    page.fill("#most", "12")
    page.fill("#said", "one two")
    page.press("#said", "Enter")
    page.wait_for_selector(".told")
    assert re.match(r"\d+ tokens", text(page, ".told"))
    assert page.locator(".example").count() == 0
    page.fill("#said", "three")
    page.click("#send")
    becomes(page, "document.querySelectorAll('.told').length === 2")
    assert page.locator(".user").all_inner_texts() == ["one two", "three"]
    page.click("#anew")
    assert page.locator(".said").count() == 0


def test_dashboard_chat_asks_an_example_prompt(page: Page) -> None:
    example = page.locator(".example").first
    asked = example.inner_text()
    example.click()
    assert page.locator(".user").all_inner_texts() == [asked]
    page.wait_for_selector(".told, .failed")
    page.click("#anew")
    assert page.locator(".example").count() == 3


def test_dashboard_chat_answer_is_streamed_and_can_be_stopped(page: Page, keyed_server: Server) -> None:
    page.fill("#most", "")
    page.fill("#said", "one")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.press("#said", "Enter")
    assert asked.value.post_data_json["stream"] is True
    becomes(page, "document.querySelector('.writing .text')?.textContent || document.querySelector('.told')")
    if text(page, "#send") == "Stop":  # else the model has ended by itself
        page.click("#send")
    becomes(page, "document.getElementById('send').textContent === 'Send'")
    wait_until(lambda: keyed_server.engine.open_requests == 0)
    page.click("#anew")


def test_dashboard_chat_shows_the_servers_errors(page: Page) -> None:
    page.fill("#most", "99999999")
    page.fill("#said", "one")
    page.press("#said", "Enter")
    assert "99999999" in text(page, ".failed")
    page.fill("#most", "")
    page.click("#anew")
    page.complaints[:] = [one for one in page.complaints if "400" not in one]  # Chromium's own line on the status


def background(page: Page) -> list[int]:
    found = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return [int(number) for number in re.findall(r"\d+", str(found))[:3]]


def test_dashboard_theme_follows_the_system_or_the_users_choice(browser: Browser, keyed_server: Server) -> None:
    page = opened(browser, keyed_server, color_scheme="dark")
    assert max(background(page)) < 60
    page.click("#theme")
    assert text(page, "#theme") == "Theme: light"
    assert min(background(page)) > 200
    page.reload()
    assert min(background(page)) > 200
    page.close()


@pytest.mark.parametrize("width", [360, 1300, 2560])
def test_dashboard_fits_the_screen_and_hides_no_column_of_the_replicas(
    browser: Browser, keyed_server: Server, width: int
) -> None:
    page = opened(browser, keyed_server, viewport={"width": width, "height": 900})
    page.wait_for_selector("#replicas tr")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cells = page.locator("#replicas tr").first.locator("td")
    assert cells.count() == page.locator("#replica-heads th").count() == 12
    for cell in cells.all():
        box = cell.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        assert cell.evaluate("cell => cell.scrollWidth <= cell.clientWidth")
    page.close()


def test_dashboard_without_a_key_asks_for_the_api_key(browser: Browser, keyed_server: Server) -> None:
    page = opened(browser, keyed_server, key=None)
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    becomes(page, "document.getElementById('refused').textContent === 'The server does not accept this key.'")
    assert text(page, "#model") == "tok"
    for hidden in (".columns", "aside", ".state", ".controls", "#notice"):
        assert page.locator(hidden).is_hidden(), hidden
    page.fill("#key", "secret")
    page.press("#key", "Enter")
    becomes(page, f"document.getElementById('model').textContent === '{NAME}'")
    assert page.locator("#key-form").is_hidden()
    assert page.locator(".columns main").is_visible()
    page.close()
