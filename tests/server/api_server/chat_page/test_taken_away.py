"""What a click takes away on the page at ``/``, in a headless Chromium: it is gone at once, and can be brought back."""

from __future__ import annotations

import threading

import pytest

from support.server.browser import Browser
from support.server.scripted import Script

pytestmark = pytest.mark.whole


def converse(talk: Browser, script: Script, *questions: str) -> None:
    for number, question in enumerate(questions, start=1):
        script.text = f"Answer to {question}"
        talk.ask(question)
        talk.until_answered(number)
    script.text = "Another."


def answers(talk: Browser) -> list[str]:
    return [turn["answer"] for chat in talk.kept_chats() for turn in chat["turns"]]


def stored(talk: Browser) -> str:
    return str(talk.run("JSON.stringify(localStorage)"))


def test_a_deleted_chat_is_gone_from_the_browser_and_comes_back(talk: Browser, script: Script) -> None:
    converse(talk, script, "One?", "Two?")
    talk.click("#chats [aria-current] + button")
    assert (talk.count("article"), talk.count("#chats li"), "One?" in stored(talk)) == (0, 0, False)
    assert talk.text("#taken") == "The chat “One?” is deleted."
    talk.click("#bring-back")
    assert talk.texts("article.user") == ["One?", "Two?"]
    assert answers(talk) == ["Answer to One?", "Answer to Two?"]
    assert talk.run("document.querySelector('#undo').hidden")
    assert talk.complaints == []


def test_a_chat_that_was_not_open_comes_back_too(talk: Browser, script: Script) -> None:
    converse(talk, script, "One?")
    talk.open(talk.run("location.origin"))
    talk.click("#new")
    talk.click("#chats .title + button")
    assert "One?" not in stored(talk)
    talk.click("#bring-back")
    assert talk.texts("article.user") == ["One?"]
    assert answers(talk) == ["Answer to One?"]


def test_a_deleted_question_comes_back_to_its_place(talk: Browser, script: Script) -> None:
    converse(talk, script, "One?", "Two?")
    talk.press_button("Delete", 0)
    assert (talk.texts("article.user"), answers(talk)) == (["Two?"], ["Answer to Two?"])
    talk.click("#bring-back")
    assert talk.texts("article.user") == ["One?", "Two?"]
    assert answers(talk) == ["Answer to One?", "Answer to Two?"]


def test_answers_that_another_answer_has_replaced_come_back(talk: Browser, script: Script) -> None:
    converse(talk, script, "One?", "Two?")
    talk.press_button("Regenerate", 0)
    assert talk.text("#taken") == "2 answers have gone."
    talk.until_answered()
    assert answers(talk) == ["Another."]
    talk.click("#bring-back")
    assert answers(talk) == ["Answer to One?", "Answer to Two?"]
    assert talk.texts(".tail") == ["Answer to One?", "Answer to Two?"]


def test_a_question_that_is_edited_and_then_replaced_is_edited_no_more(talk: Browser, script: Script) -> None:
    converse(talk, script, "One?", "Two?")
    talk.press_button("Edit", 1)
    talk.press_button("Regenerate", 0)
    talk.until_answered()
    assert talk.run("document.querySelector('#editing').hidden")
    talk.ask("Three?")
    talk.until_answered(2)
    assert talk.texts("article.user") == ["One?", "Three?"]


def test_bringing_back_ends_the_answer_in_its_place(talk: Browser, script: Script) -> None:
    converse(talk, script, "One?")
    script.allowed = threading.Semaphore(0)
    talk.press_button("Regenerate")
    talk.click("#bring-back")
    talk.until("document.querySelector('#send').textContent === 'Send'")
    script.allowed.release(1000)
    assert (answers(talk), talk.texts(".tail")) == (["Answer to One?"], ["Answer to One?"])
    assert "stopped" not in stored(talk)


def test_what_is_said_afterwards_settles_it(talk: Browser, script: Script) -> None:
    converse(talk, script, "One?", "Two?")
    talk.press_button("Delete", 0)
    talk.ask("Three?")
    assert talk.run("document.querySelector('#undo').hidden")


def test_chats_that_are_no_longer_kept_stay_until_the_page_is_closed(talk: Browser, script: Script) -> None:
    converse(talk, script, "One?")
    talk.click("#new")
    converse(talk, script, "Two?")
    talk.type("#system", "Be brief")
    before = stored(talk)
    talk.click("#keep")
    assert stored(talk) == '{"compiled_llm.off":"1"}'
    assert talk.text("#taken") == "Chats and settings are no longer kept: they go when this page is closed."
    assert talk.texts("#chats .title") == ["Two?", "One?"]
    talk.click("#bring-back")
    assert sorted(stored(talk)) == sorted(before)
    assert talk.run("document.querySelector('#keep').checked")
    talk.click("#keep")
    talk.open(talk.run("location.origin"))
    assert (talk.count("article"), talk.count("#chats li"), talk.text("#system")) == (0, 0, "")


def test_it_can_be_brought_back_on_a_phone(talk: Browser, script: Script) -> None:
    converse(talk, script, "x" * 200)
    talk.resize(320, 640)
    talk.click("#open-side")
    talk.click("#chats .title + button")
    talk.click("#open-side")
    for _ in range(2):  # beside the chat, and beside the list of chats
        assert talk.run("document.querySelector('#bring-back').checkVisibility({ visibilityProperty: true })")
        assert talk.run("document.querySelector('#bring-back').getBoundingClientRect().right <= innerWidth")
        assert talk.run("document.documentElement.scrollWidth <= innerWidth")
        talk.click("#open-side")
