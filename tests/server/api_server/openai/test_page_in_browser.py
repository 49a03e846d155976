"""The page at ``/`` in a headless Chromium."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.server.browser import CHROMIUM, Browser, browsing
from support.server.engine_processes import Loop
from support.server.running_servers import RunningServer, running_server

KEYS = ("a-key-of-sixteen-or-more",)
ENTER = ("Enter", 13, "\r")

pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture
def tab(browser: Browser, api_server: RunningServer) -> Browser:
    return opened(browser, api_server.url)


def opened(browser: Browser, url: str) -> Browser:
    browser.resize(1200, 800)
    browser.requests.clear()
    browser.complaints.clear()
    browser.open(url)
    return browser


def asked(tab: Browser, question: str) -> None:
    tab.type("#question", question)
    tab.press(*ENTER)


def until_state(tab: Browser, state: str) -> None:
    tab.until(f"document.querySelector('#state').textContent === {json.dumps(state)}")


def count(tab: Browser, selector: str) -> int:
    found = tab.run(f"document.querySelectorAll({json.dumps(selector)}).length")
    assert isinstance(found, int)
    return found


def test_a_question_is_answered_as_it_comes_and_the_figures_are_there(tab: Browser, api_server: RunningServer) -> None:
    until_state(tab, "ready")
    assert tab.text("#model") == "tiny"
    tab.run("log = document.querySelector('#log'); seen = new Set()")
    tab.run("new MutationObserver(() => seen.add(log.innerText)).observe(log, {childList: true, subtree: true}); 0")
    tab.type("#system", "Be brief")
    tab.type("#max-tokens", "60")
    asked(tab, "the quick fox")
    assert tab.text("article.user") == "the quick fox"
    tab.until("document.querySelector('.note')")
    assert " tokens cached" in tab.text(".note")
    assert tab.run("seen.size") > 3
    asked(tab, "the lazy dog")
    tab.until("document.querySelectorAll('.note').length === 2")
    sent = tab.run("messages({question: 'And?'})")
    assert [message["role"] for message in sent] == ["system", *("user", "assistant") * 2, "user"]
    assert sent[0] == {"role": "system", "content": "Be brief"}
    tab.until("document.querySelector('#pages-used').textContent === '0'")
    tab.until("document.querySelector('#speeds path').getAttribute('d')")
    for name in ("first-50", "first-99", "inter-50", "queue-99"):
        assert tab.text(f"#{name}").endswith("s")
    assert tab.text("#hits").endswith("%")
    assert int(tab.text("#pages-free").replace(",", "")) > 0
    assert tab.text("#cuda_graphs") == "0"
    assert all(url.startswith((api_server.url, "data:")) for url in tab.requests)
    assert tab.complaints == []


def test_an_answer_is_stopped_and_a_chat_begun_again(tab: Browser, api_server: RunningServer) -> None:
    tab.run("document.querySelector('#temperature').value = 1")
    tab.type("#question", "the quick fox")
    tab.run("document.querySelector('#ask').requestSubmit()")
    tab.run("document.querySelector('#ask').requestSubmit()")  # it is called Stop by now
    tab.until("document.querySelector('.note')")
    assert tab.text(".note").startswith("stopped")
    tab.until("document.querySelector('#running').textContent === '0'")
    assert tab.text("#send") == "Send"
    assert len(tab.run("messages({question: 'And?'})")) == 1  # a question without an answer is not sent again
    tab.run("document.querySelector('#new').click()")
    assert count(tab, "article") == 0


def test_with_a_key_it_is_asked_for_and_kept_in_the_tab(browser: Browser, engine_process: Loop) -> None:
    with running_server(engine_process.server._path, api_keys=KEYS) as guarded:
        tab = opened(browser, guarded.url)
        tab.until("!document.querySelector('#key-form').hidden")
        assert tab.text("#model") == "compiled_llm"
        tab.type("#key", "wrong")
        tab.press(*ENTER)
        tab.until("document.querySelector('#key-help').innerText === 'The server does not know this key.'")
        tab.type("#key", KEYS[0])
        tab.press(*ENTER)
        until_state(tab, "ready")
        assert tab.run("document.querySelector('#key-form').hidden")
        asked(tab, "the quick fox")
        tab.until("document.querySelector('.note')")
        tab.open(guarded.url)
        until_state(tab, "ready")
        assert tab.run("localStorage.length + document.cookie.length") == 0


def test_what_a_model_writes_is_text(tab: Browser) -> None:
    marked = "<img src=x onerror=alert(1)> **bold** `<b>` [link](javascript:alert(1))"
    written = f"{marked}\n\n```html\n<script>alert(1)</script>\n```\n- one\n- *two*\n\n2. two\n# Title"
    tab.run(f"document.querySelector('#log').replaceChildren(...markdown({json.dumps(written)}))")
    found = tab.run("[...document.querySelectorAll('#log *')].map((found) => found.localName)")
    assert found == ["p", "strong", "code", "pre", "code", "ul", "li", "li", "em", "ol", "li", "h3"]
    shown = tab.text("#log")
    assert "<img src=x onerror=alert(1)> bold <b> [link](javascript:alert(1))" in shown
    assert "<script>alert(1)</script>" in shown
    assert tab.run("try { document.body.innerHTML = '<b>'; false } catch (error) { true }")  # the policy forbids it


def test_reasoning_is_folded_and_not_a_part_of_the_chat(tab: Browser) -> None:
    tab.run(
        "turn = {question: 'Why?', answer: '', shown: byId('log')}; turns.push(turn); shown = new ShownAnswer(turn); 0"
    )
    for delta in ({"reasoning_content": "<i>hm"}, {"reasoning_content": ", well"}, {"content": "Because."}):
        tab.run(f"shown.take({{choices: [{{delta: {json.dumps(delta)}}}]}}); 0")
    tab.run("shown.end(); 0")
    assert tab.run("document.querySelector('details').open") is False
    assert tab.run("document.querySelector('details > div').textContent") == "<i>hm, well"
    assert tab.text("article.assistant > p") == "Because."
    assert tab.run("messages({question: 'And?'})")[1] == {"role": "assistant", "content": "Because."}


def test_an_error_is_shown_and_can_be_tried_again(tab: Browser) -> None:
    tab.type("#max-tokens", "99999")
    asked(tab, "the quick fox")
    tab.until("document.querySelector('.error')")
    assert tab.text(".error").startswith("max_tokens=99999: ")
    tab.run("document.querySelector('#max-tokens').value = 5")
    tab.run("document.querySelector('.error + button').click()")
    tab.until("document.querySelector('.note')")
    assert count(tab, ".error") == 0


def test_on_a_phone_nothing_is_cut_off(tab: Browser, tmp_path: Path) -> None:
    tab.look(tmp_path / "phone.png", 360, 640)
    for _ in range(2):
        assert tab.run("document.documentElement.scrollWidth <= innerWidth")
        tab.run("document.querySelector('#open-side').click()")
    assert tab.run("getComputedStyle(document.querySelector('#side')).display") == "none"


def test_before_the_model_is_ready_it_says_what_is_done(browser: Browser, path: Path) -> None:
    loop = Loop(path)
    loop.server.report("loading weights")
    with running_server(path, wait=False) as api_server:
        tab = opened(browser, api_server.url)
        until_state(tab, "loading weights")
        asked(tab, "the quick fox")
        tab.until("document.querySelector('.error')")
        assert tab.text(".error") == "the model is not ready: loading weights"
    loop.close()


def test_everything_has_a_name_and_contrast_enough(tab: Browser) -> None:
    for role in ("textbox", "button", "spinbutton"):
        nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
        named = [node["name"]["value"] for node in nodes if node.get("role", {}).get("value") == role]
        assert named
        assert all(named), role
    for scheme in ("light", "dark"):
        tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        for pair in ("text ground", "quiet ground", "quiet sunk", "on-accent accent", "bad ground", "text own"):
            assert contrast(*(color_of(tab, name) for name in pair.split())) >= 4.5, (scheme, pair)


def color_of(tab: Browser, name: str) -> tuple[float, ...]:
    """Of a variable of the style, as red, green and blue from 0 to 1."""
    tab.run(f"document.body.style.color = 'var(--{name})'")
    text = tab.run("getComputedStyle(document.body).color")
    return tuple(int(part) / 255 for part in text[4:-1].split(","))


def contrast(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    """As WCAG has it."""
    lighter, darker = sorted((luminance(first), luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(color: tuple[float, ...]) -> float:
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
