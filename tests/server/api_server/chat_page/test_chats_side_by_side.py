"""Several chats on the page at ``/`` in a headless Chromium: an answer goes on while another chat is open."""

from __future__ import annotations

import json
import threading

import pytest

from support.server.browser import Browser
from support.server.scripted import Script

pytestmark = pytest.mark.whole

COUNTED = "one two three four five"


def begin_counting(talk: Browser, script: Script) -> None:
    """Begin an answer of which some tokens come, and the others once they are allowed."""
    script.text, script.at_once, script.allowed = COUNTED, 1, threading.Semaphore(8)
    talk.ask("Count")
    talk.until("document.querySelector('.tail')?.innerText")


def open_chat(talk: Browser, title: str) -> None:
    titles = "[...document.querySelectorAll('#chats .title')]"
    talk.run(f"{titles}.find((found) => found.innerText === {json.dumps(title)}).click()")


def test_an_answer_goes_on_while_another_chat_is_open(talk: Browser, script: Script) -> None:
    begin_counting(talk, script)
    talk.click("#new")
    assert (talk.count("article"), talk.text("#send")) == (0, "Send")
    assert talk.run("document.querySelector('#chats .title').classList.contains('waiting')")
    assert script.allowed is not None
    script.allowed.release(1000)
    talk.until("!document.querySelector('#chats .waiting')")
    assert (talk.count("article"), talk.kept_chats()[0]["turns"][0]["answer"]) == (0, COUNTED)
    open_chat(talk, "Count")
    assert talk.text(".tail") == COUNTED
    assert f"{len(script.tokens(COUNTED))} tokens" in talk.text("article .note")
    assert talk.complaints == []


def test_one_comes_back_to_an_answer_and_sees_it_come_and_can_stop_it(talk: Browser, script: Script) -> None:
    begin_counting(talk, script)
    talk.click("#new")
    open_chat(talk, "Count")
    assert (talk.text("#send"), talk.text("article.user")) == ("Stop", "Count")
    assert script.allowed is not None
    script.allowed.release(6)
    talk.until("document.querySelector('.tail').innerText.startsWith('one two three')")
    talk.click("#send")
    talk.until_answered()
    assert talk.text("article .note").startswith("stopped")
    script.allowed.release(1000)


def test_what_comes_in_another_chat_does_not_move_the_one_that_is_read(talk: Browser, script: Script) -> None:
    script.text = "\n\n".join(["A line."] * 100)
    talk.ask("Write")
    talk.until_answered()
    talk.click("#new")
    begin_counting(talk, script)
    open_chat(talk, "Write")
    talk.run("document.querySelector('#log').scrollTop = 40")
    assert script.allowed is not None
    script.allowed.release(1000)
    talk.until("!document.querySelector('#chats .waiting')")
    assert (talk.run("document.querySelector('#log').scrollTop"), talk.text("article.user")) == (40, "Write")


def test_two_chats_ask_at_once_and_each_has_its_own_answer(talk: Browser, script: Script) -> None:
    begin_counting(talk, script)
    talk.click("#new")
    talk.ask("More?")
    assert talk.text("#send") == "Stop"
    assert script.allowed is not None
    script.text = "No more."  # it is read when the other answer is over
    script.allowed.release(1000)
    talk.until_answered()
    kept = {chat["title"]: chat["turns"][0]["answer"] for chat in talk.kept_chats()}
    assert kept == {"Count": COUNTED, "More?": "No more."}
    assert "Count" not in script.prompt


def test_a_chat_of_another_tab_is_in_the_list(talk: Browser, script: Script) -> None:
    script.text = "Yes."
    talk.ask("Is it?")
    talk.until_answered()
    other = {"id": "7", "title": "Elsewhere", "changed": 1, "turns": [{"question": "q", "answer": "a", "thought": ""}]}
    event = "dispatchEvent(new StorageEvent('storage', { key: 'compiled_llm.chat.7' }))"
    talk.run(f"localStorage.setItem('compiled_llm.chat.7', {json.dumps(json.dumps(other))}); {event}")
    assert talk.texts("#chats .title") == ["Is it?", "Elsewhere"]
    talk.run(f"localStorage.removeItem('compiled_llm.chat.7'); {event}")
    assert talk.texts("#chats .title") == ["Is it?"]
