"""The page at ``/`` in a headless Chromium: questions, answers, and what is done with them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from compiled_llm.engine.engine import Engine
from compiled_llm.execution.model_runner import ModelRunner
from support.server.browser import ENTER, ESCAPE, SPACE, TAB, Browser
from support.server.engine_processes import Loop, until
from support.server.running_servers import RunningServer, running_server
from support.server.scripted import Script

KEYS = ("a-key-of-sixteen-or-more",)

pytestmark = pytest.mark.whole


# ---- questions and answers


def test_questions_are_answered(tab: Browser, api_server: RunningServer) -> None:
    tab.until_state("ready")
    assert tab.text("#model") == "tiny"
    tab.type("#system", "Be brief")
    tab.type("#max-tokens", "60")
    tab.ask("the quick fox")
    assert tab.text("article.user") == "the quick fox"
    tab.until_answered()
    assert " tokens cached" in tab.text("article .note")
    tab.ask("the lazy dog")
    tab.until_answered(2)
    sent = tab.sent("And?")["messages"]
    assert [message["role"] for message in sent] == ["system", *("user", "assistant") * 2, "user"]
    assert sent[0] == {"role": "system", "content": "Be brief"}
    assert all(url.startswith((api_server.url, "data:")) for url in tab.requests)
    assert tab.complaints == []


def test_an_answer_is_stopped_and_a_chat_begun_again(tab: Browser) -> None:
    tab.until_state("ready")
    tab.type("#temperature", "1")
    tab.type("#question", "the quick fox")
    tab.run("document.querySelector('#ask').requestSubmit()")
    tab.run("document.querySelector('#ask').requestSubmit()")  # it is called Stop by now
    tab.until("document.querySelector('article .note')")
    assert tab.text("article .note").startswith("stopped")
    assert tab.text("#send") == "Send"
    tab.click("#new")
    assert tab.count("article") == 0
    assert len(tab.sent("And?")["messages"]) == 1


def test_figures_are_asked_for_while_they_are_unfolded(tab: Browser, api_server: RunningServer) -> None:
    tab.until_state("ready")
    tab.type("#max-tokens", "5")
    tab.ask("the quick fox")
    tab.until_answered()
    assert f"{api_server.url}/metrics" not in tab.requests
    tab.click("#figures summary")
    tab.until("document.querySelector('#pages-used').textContent === '0'")
    tab.until("document.querySelector('#speeds path').getAttribute('d')")
    for name in ("first-50", "first-99", "inter-50", "queue-99"):
        assert tab.text(f"#{name}").endswith("s")
    assert tab.text("#hits").endswith("%")
    assert int(tab.text("#pages-free").replace(",", "")) > 0


def test_it_says_while_answers_run_uncompiled(
    tab: Browser, api_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tab.until_state("ready")
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "uncompiled", "compiling")
        tab.until_state("ready; slower until it is compiled")
    tab.until_state("ready")


def test_with_a_key_it_is_asked_for_and_kept_in_the_tab(browser: Browser, engine_process: Loop) -> None:
    with running_server(engine_process.server._path, api_keys=KEYS) as guarded:
        browser.open_anew(guarded.url)
        browser.until("!document.querySelector('#key-form').hidden")
        assert browser.text("#model") == "compiled_llm"
        browser.type("#key", "wrong")
        browser.press(*ENTER)
        browser.until("document.querySelector('#key-help').innerText === 'The server does not know this key.'")
        browser.type("#key", KEYS[0])
        browser.press(*ENTER)
        browser.until_state("ready")
        assert browser.run("document.querySelector('#key-form').hidden")
        browser.type("#max-tokens", "5")
        browser.ask("the quick fox")
        browser.until_answered()
        browser.open(guarded.url)
        browser.until_state("ready")
        assert KEYS[0] not in browser.run("JSON.stringify(localStorage) + document.cookie")


def test_an_error_is_shown_and_can_be_tried_again(talk: Browser, script: Script) -> None:
    script.text, script.reason = "Yes.", "stop"
    talk.run("document.querySelector('#stop').value = 'x\\n'.repeat(300)")  # the server takes 256
    talk.ask("Is it?")
    talk.until("document.querySelector('article .error')")
    assert talk.text("article .error").startswith("stop: ")
    talk.run("document.querySelector('#stop').value = ''")
    talk.press_button("Regenerate")
    talk.until_answered()
    assert talk.count("article .error") == 0
    assert talk.text(".tail") == "Yes."


def test_reasoning_is_folded_and_not_a_part_of_the_chat(talk: Browser, script: Script) -> None:
    script.text = "<think><i>hm, well</think>Because."
    talk.ask("Why?")
    talk.until_answered()
    assert talk.run("document.querySelector('article details').open") is False
    assert talk.run("document.querySelector('article details > div').textContent") == "<i>hm, well"
    assert talk.text("article.assistant p") == "Because."
    script.text = "So."
    talk.ask("And?")
    talk.until_answered(2)
    assert "hm, well" not in script.prompt
    assert "Because." in script.prompt
    talk.open(talk.run("location.origin"))
    assert talk.run("document.querySelector('article details > div').textContent") == "<i>hm, well"  # it is kept


# ---- what is done with them


def test_an_answer_and_a_code_block_are_copied(talk: Browser, script: Script) -> None:
    origin = talk.run("location.origin")
    talk.call("Browser.grantPermissions", origin=origin, permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    script.text = "**Do** this:\n\n```sh\nls -l\n```"
    talk.ask("How?")
    talk.until_answered()
    for name, text in (("Copy code", "ls -l\n"), ("Copy answer", script.text)):
        talk.click(f"[aria-label='{name}']")
        talk.until(f"document.querySelector('[aria-label=\"{name}\"]').textContent === 'Copied'")
        assert talk.run("navigator.clipboard.readText()") == text


def ask_twice(talk: Browser, script: Script) -> None:
    """Get two answers; the next one would be another."""
    for number, question in enumerate(("One?", "Two?"), start=1):
        script.text = f"Answer {number}."
        talk.ask(question)
        talk.until_answered(number)
    script.text = "Another."


def test_an_answer_is_made_again_and_a_question_is_edited(talk: Browser, script: Script) -> None:
    ask_twice(talk, script)
    talk.press_button("Regenerate")
    talk.until("document.querySelectorAll('.tail')[1].innerText === 'Another.'")
    assert talk.run("[...document.querySelectorAll('.tail')].map((found) => found.innerText)") == [
        "Answer 1.",
        "Another.",
    ]
    talk.press_button("Edit", 0)
    assert talk.run("document.activeElement.id + ':' + document.activeElement.value") == "question:One?"
    talk.press(*ESCAPE)
    assert (talk.run("document.querySelector('#question').value"), talk.count("article.user")) == ("", 2)
    talk.press_button("Edit", 0)
    talk.run("document.querySelector('#question').value = ''")
    talk.ask("First?")
    talk.until("document.querySelectorAll('article .note').length === 1")
    assert talk.texts("article.user") == ["First?"]
    assert "One?" not in script.prompt
    talk.press_button("Delete")
    assert talk.count("article") == 0
    assert talk.kept_chats() == []


def test_an_earlier_answer_is_made_again_without_what_followed_it(talk: Browser, script: Script) -> None:
    ask_twice(talk, script)
    talk.press_button("Regenerate", 0)
    talk.until_answered()
    assert talk.texts("article") == ["One?", talk.text("article.assistant")]
    assert "Another." in talk.text("article.assistant")
    (chat,) = talk.kept_chats()
    assert [turn["answer"] for turn in chat["turns"]] == ["Another."]
    talk.ask("And?")
    talk.until_answered(2)
    assert "Another." in script.prompt
    assert not [text for text in ("Answer 1.", "Two?", "Answer 2.") if text in script.prompt]


def test_settings_go_with_a_question_and_an_empty_one_is_the_models(talk: Browser, script: Script) -> None:
    script.text = "Yes."
    talk.ask("Is it?")
    talk.until_answered()
    plain = script.asked[-1].params
    assert not {"temperature", "top_p", "seed", "stop"} & set(plain)
    values = {"temperature": "0.5", "top-p": "0.9", "seed": "7", "max-tokens": "50", "stop": "END\nFIN"}
    for name, value in values.items():
        talk.type(f"#{name}", value)
    talk.run("document.querySelector('#thinking').value = 'off'")
    body = talk.sent("And?")
    talk.until_answered(2)
    given = script.asked[-1].params
    assert {name: given[name] for name in ("temperature", "top_p", "seed", "max_tokens")} == {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "max_tokens": 50,
    }
    assert list(given["stop"]) == ["END", "FIN"]
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    talk.open(talk.run("location.origin"))
    assert talk.run("document.querySelector('#temperature').value") == "0.5"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("temperature", "-1", "From 0 to 2"),
        ("temperature", "2.5", "From 0 to 2"),
        ("top-p", "0", "From 0.001 to 1"),
        ("max-tokens", "-3", "From 1 to 4,000"),
        ("max-tokens", "1.5", "From 1 to 4,000"),
        ("seed", "-1", "From 0 to 4,294,967,295"),
    ],
)
def test_a_setting_out_of_range_is_marked_at_its_field_and_not_sent(
    talk: Browser, script: Script, field: str, value: str, said: str
) -> None:
    asked = len(script.asked)
    talk.type(f"#{field}", value)
    assert talk.text(f"#{field}-wrong") == said
    assert talk.run(f"document.querySelector('#{field}').getAttribute('aria-invalid')") == "true"
    talk.ask("Is it?")
    assert talk.run("document.activeElement.id") == field
    assert (talk.count("article"), len(script.asked)) == (0, asked)
    talk.run("document.activeElement.value = ''; document.activeElement.dispatchEvent(new Event('input'))")
    assert talk.text(f"#{field}-wrong") == ""


def test_with_a_setting_out_of_range_no_answer_is_made_again(talk: Browser, script: Script) -> None:
    script.text = "Yes."
    talk.ask("Is it?")
    talk.until_answered()
    asked = len(script.asked)
    talk.type("#temperature", "-1")
    talk.run("document.querySelector('#question').focus()")
    talk.press_button("Regenerate")
    assert talk.run("document.activeElement.id") == "temperature"
    assert (talk.text(".tail"), len(script.asked)) == ("Yes.", asked)


# ---- what the browser keeps


def test_chats_are_there_again_until_they_are_deleted(talk: Browser, script: Script) -> None:
    for chat in ("First", "Second"):
        script.text = f"{chat} *answer*."
        talk.click("#new")
        talk.ask(f"{chat} question?")
        talk.until_answered()
    talk.open(talk.run("location.origin"))
    assert talk.text("article.user") == "Second question?"
    assert talk.text("article.assistant em") == "answer"
    assert " tokens cached" in talk.text("article .note")
    assert talk.texts("#chats .title") == ["Second question?", "First question?"]
    talk.click("#chats li:last-child .title")
    assert talk.text("article.user") == "First question?"
    script.text = "Next."
    talk.ask("And?")
    talk.until_answered(2)
    assert "First *answer*." in script.prompt
    talk.click("#chats [aria-current] + button")
    assert (talk.count("article"), talk.count("#chats li")) == (0, 1)
    assert [chat["title"] for chat in talk.kept_chats()] == ["Second question?"]


UNFINISHED = "not finished"


def test_a_question_and_the_answer_so_far_are_there_after_a_reload(talk: Browser, script: Script) -> None:
    script.text, script.at_once, script.allowed = "one **two** three four five", 1, threading.Semaphore(0)
    answered = script.answered
    tokens, of_two = (len(script.tokens(text)) for text in (script.text, "one **two** three"))
    talk.ask("Count")
    talk.until("document.querySelector('#chats .title')")
    talk.open(talk.run("location.origin"))  # before the first token
    assert (talk.texts("article.user"), talk.text("article .note")) == (["Count"], UNFINISHED)
    assert talk.text("#chats .title") == "Count"
    talk.until_state("ready")
    script.allowed.release(tokens + of_two)  # the first answer, which nobody reads any more, and some of the second
    talk.press_button("Regenerate")
    talk.until("document.querySelector('.assistant strong')?.innerText === 'two'")
    talk.open(talk.run("location.origin"))
    assert (talk.text("article.assistant strong"), talk.text("article .note")) == ("two", UNFINISHED)
    script.allowed.release(tokens)
    until(lambda: script.answered == answered + 2)
    script.text, script.allowed = "Done.", None
    talk.until_state("ready")
    talk.press_button("Regenerate")
    talk.until("document.querySelector('article .note')?.innerText.includes('tokens cached')")
    (chat,) = talk.kept_chats()
    assert (chat["turns"][0]["answer"], UNFINISHED in chat["turns"][0]["note"]) == ("Done.", False)
    assert talk.complaints == []


def test_an_answer_that_fails_is_kept_as_far_as_it_came(talk: Browser) -> None:
    talk.run("fetch = () => Promise.reject(new TypeError('gone')); 0")
    talk.ask("Is it?")
    talk.until("document.querySelector('article .error')")
    assert talk.text("article .note") == ""
    talk.open(talk.run("location.origin"))
    assert (talk.texts("article.user"), talk.text("article .note")) == (["Is it?"], UNFINISHED)


def test_switched_off_nothing_is_kept(talk: Browser, script: Script) -> None:
    script.text = "Yes."
    talk.type("#system", "Be brief")
    talk.ask("Secret?")
    talk.until_answered()
    assert "Secret?" in talk.run("JSON.stringify(localStorage)")
    talk.click("#keep")
    talk.ask("Another?")
    talk.until_answered(2)
    assert talk.run("JSON.stringify(localStorage)") == '{"compiled_llm.off":"1"}'
    talk.open(talk.run("location.origin"))
    assert (talk.count("article"), talk.run("document.querySelector('#keep').checked")) == (0, False)
    talk.click("#keep")
    talk.ask("Kept?")
    talk.until_answered()
    assert [chat["title"] for chat in talk.kept_chats()] == ["Kept?"]


def test_what_another_page_has_left_in_the_browser_breaks_nothing(talk: Browser) -> None:
    for name, value in (("chat.a", "no JSON"), ("chat.b", '{"turns": [3], "id": "b"}'), ("settings", '{"keep": 1}')):
        talk.run(f"localStorage.setItem('compiled_llm.{name}', {json.dumps(value)})")
    talk.open(talk.run("location.origin"))
    talk.until_state("ready")
    assert (talk.count("#chats li"), talk.complaints) == (0, [])


def test_if_the_browser_is_full_the_chat_goes_on(talk: Browser, script: Script) -> None:
    script.text = "Yes."
    talk.run("Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }; 0")
    talk.ask("Is it?")
    talk.until_answered()
    assert talk.run("document.querySelector('#full').hidden") is False
    assert talk.text(".tail") == "Yes."


def test_a_chat_is_exported(talk: Browser, script: Script, tmp_path: Path) -> None:
    talk.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    script.text = "**Yes**."
    talk.ask("Is it?")
    talk.until_answered()
    found = {}
    for kind in ("md", "json"):
        talk.click(f"#export-{kind}")
        file = tmp_path / f"chat.{kind}"
        talk.until("true")
        for _ in range(200):
            if file.exists():
                break
            talk.run("new Promise((resolve) => setTimeout(resolve, 50))")
        found[kind] = file.read_text()
    assert found["md"] == "# Is it?\n\n## Question\n\nIs it?\n\n## Answer\n\n**Yes**.\n"
    (turn,) = json.loads(found["json"])["turns"]
    assert (turn["question"], turn["answer"]) == ("Is it?", "**Yes**.")


# ---- by keyboard, and as it comes


def test_all_of_it_goes_by_keyboard_alone(talk: Browser, script: Script) -> None:
    script.text = "Look:\n\n```sh\nls\n```"

    def tab_to(name: str) -> None:
        """Go on until what has the focus is called so, and see that the focus is shown."""
        for _ in range(60):
            talk.press(*TAB)
            active = "document.activeElement"
            label = f"{active}.getAttribute('aria-label') ?? {active}.labels?.[0]?.innerText ?? {active}.innerText"
            if (talk.run(label) or "").strip() == name:
                assert talk.run(f"getComputedStyle({active}).outlineStyle") != "none", name
                return
        raise AssertionError(f"no {name}")

    assert talk.run("document.activeElement.id") == "question"
    talk.call("Input.insertText", text="How?")
    talk.press(*ENTER)
    talk.until_answered()
    assert talk.run("document.activeElement.id") == "question"
    for name in ("Copy code", "Copy answer", "Regenerate"):
        tab_to(name)
    talk.press(*ENTER)
    talk.until_answered()
    assert talk.run("document.activeElement.id") == "question"  # the button is gone
    tab_to("Edit")
    talk.press(*ENTER)
    assert talk.run("document.activeElement.value") == "How?"
    talk.press(*ESCAPE)
    tab_to("Keep chats and settings")
    talk.press(*SPACE)
    assert talk.run("document.querySelector('#keep').checked") is False
    tab_to("Temperature")
    talk.call("Input.insertText", text="1")
    tab_to("The server's figures")
    talk.press(*ENTER)
    assert talk.run("document.querySelector('#figures').open") is True
    tab_to("New chat")
    talk.press(*ENTER)
    assert (talk.count("article"), talk.run("document.activeElement.id")) == (0, "question")


def test_an_answer_is_shown_as_it_comes_and_escape_ends_it_and_enter_does_not(talk: Browser, script: Script) -> None:
    script.text, script.at_once, script.allowed = "one two three four five", 1, threading.Semaphore(8)
    talk.ask("Count")
    talk.until("document.querySelector('.tail')?.innerText")
    talk.ask("not yet")
    assert (talk.count("article.user"), talk.text("#send")) == (1, "Stop")
    talk.press(*ESCAPE)
    talk.until_answered()
    script.allowed.release(1000)
    assert talk.text("article .note").startswith("stopped")
    assert talk.run("document.querySelector('#question').value") == "not yet"


def test_a_question_without_an_answer_is_no_part_of_the_chat(talk: Browser, script: Script) -> None:
    script.text, script.allowed = "Yes.", threading.Semaphore(0)
    talk.ask("Lost?")
    talk.press(*ESCAPE)
    talk.until_answered()
    assert talk.text("article .note").endswith("the next question goes without this one")
    script.allowed.release(1000)
    talk.ask("And?")
    talk.until_answered(2)
    assert "And?" in script.prompt
    assert "Lost?" not in script.prompt


def test_a_chat_that_is_deleted_in_the_midst_of_an_answer_does_not_come_back(talk: Browser, script: Script) -> None:
    script.text = "Yes."
    talk.ask("Is it?")
    talk.until_answered()
    script.allowed = threading.Semaphore(0)
    talk.ask("And?")
    talk.click("#chats [aria-current] + button")
    script.allowed.release(1000)
    talk.run("new Promise((resolve) => setTimeout(resolve, 100))")
    assert (talk.kept_chats(), talk.count("#chats li"), talk.text("#send")) == ([], 0, "Send")


def test_enter_sends_nothing_with_shift_or_while_characters_are_composed(talk: Browser) -> None:
    talk.type("#question", "one")
    key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "modifiers": 8}
    talk.call("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
    talk.call("Input.dispatchKeyEvent", type="keyUp", **key)
    assert talk.run("document.querySelector('#question').value") == "one\n"
    composing = "new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, bubbles: true, cancelable: true})"
    assert talk.run(f"document.querySelector('#question').dispatchEvent({composing})")
    assert talk.count("article") == 0


@pytest.fixture
def loading(browser: Browser, path: Path) -> Iterator[tuple[Loop, RunningServer]]:
    """The page of a server whose engine process is loading the weights; the test may end the server."""
    loop = Loop(path)
    with running_server(path, wait=False) as api_server:
        api_server.api_server.link._since -= 3600
        browser.open_anew(api_server.url)
        loop.server.report("loading the weights")
        browser.until_state("loading the weights")
        yield loop, api_server
    loop.close()


def test_before_the_model_is_ready_it_says_what_is_done_how_far_and_since_when(
    browser: Browser, loading: tuple[Loop, RunningServer]
) -> None:
    loop, api_server = loading
    assert browser.run("document.querySelector('#progress').hidden")
    browser.until("/^1 h 0 min$/.test(document.querySelector('#how-long').textContent)")
    api_server.api_server.link._since += 3500
    browser.until("/^1 min [45]\\d s$/.test(document.querySelector('#how-long').textContent)")
    loop.server.report("compiling decode, 4 rows (2 of 4), once", 2, 4)
    browser.until_state("compiling decode, 4 rows (2 of 4), once")
    assert browser.text("#doing") == "compiling decode, 4 rows (2 of 4), once"
    assert browser.run("[document.querySelector('#progress').value, document.querySelector('#progress').max]") == [1, 4]
    loop.server.report("loading the weights")
    browser.until_state("loading the weights")
    assert browser.run("document.querySelector('#progress').hidden")


def test_what_is_asked_before_the_model_is_ready_waits_for_it(
    browser: Browser, loading: tuple[Loop, RunningServer], engine: Engine, tmp_path: Path
) -> None:
    tokenizer = tmp_path / "tokenizer"
    engine._tokenizer.save_pretrained(tokenizer)  # type: ignore[union-attr]
    loop, _ = loading
    browser.run("document.querySelector('#max-tokens').value = 3")
    browser.ask("the quick fox")
    browser.until("document.querySelector('.assistant .note')")
    assert browser.text(".assistant .note") == "It is asked once the model is ready."
    browser.run("document.querySelector('#send').click()")
    browser.until("document.querySelector('.assistant .note')?.textContent.startsWith('stopped')")
    browser.ask("the lazy dog")
    browser.until("document.querySelector('.turn:last-child .assistant .note')")
    loop.call(loop.open, engine, tokenizer)
    browser.until_state("ready")
    browser.until("document.querySelector('.turn:last-child .assistant .note')?.textContent.endsWith('cached')")
    assert browser.run("document.querySelectorAll('article .error').length") == 0


def test_what_waits_for_a_server_that_is_gone_says_so(browser: Browser, loading: tuple[Loop, RunningServer]) -> None:
    browser.ask("the quick fox")
    browser.until("document.querySelector('.assistant .note')")
    loading[1].close()
    browser.until("document.querySelector('article .error')")
    assert browser.text("article .error") == "the server does not answer"


def test_once_it_is_ready_nothing_says_otherwise(talk: Browser) -> None:
    assert talk.run("document.querySelector('#starting').hidden")
