"""Images on the page at `/` in a headless Chromium: chosen, pasted and dropped, shown, sent, and kept."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from support.server.browser import Browser
from support.server.images import data_url
from support.server.scripted import Script

pytestmark = pytest.mark.whole

RED = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAEElEQVR4nGP4z8AARAwQCgAf7gP9i18U1AAAAABJRU5ErkJggg=="
)
HAND_OVER = """
(async () => {
  const blob = await (async (url) => {
    const [head, data] = url.split(",");
    const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
    return new File([bytes], "a.png", { type: head.slice(5).split(";")[0] });
  })(%s);
  const moved = new DataTransfer();
  moved.items.add(blob);
  const options = { bubbles: true, cancelable: true, clipboardData: moved, dataTransfer: moved };
  document.querySelector("#question").dispatchEvent(new %s(%s, options));
})()
"""


def hand_over(talk: Browser, how: str, file: bytes = RED, kind: str = "image/png") -> None:
    """Paste or drop a file."""
    event = {"paste": "ClipboardEvent", "drop": "DragEvent"}[how]
    talk.run(HAND_OVER % (json.dumps(data_url(file, kind)), event, json.dumps(how)))


def choose(talk: Browser, file: Path) -> None:
    document = talk.call("DOM.getDocument")["root"]["nodeId"]
    node = talk.call("DOM.querySelector", nodeId=document, selector="#image-files")["nodeId"]
    talk.call("DOM.setFileInputFiles", files=[str(file)], nodeId=node)


def until_waiting(talk: Browser, count: int) -> None:
    talk.until(f"document.querySelectorAll('#images img').length === {count}")


def loaded(talk: Browser, selector: str) -> bool:
    """Whether an image is drawn, which the page's policy might forbid."""
    return bool(talk.run(f"document.querySelector({json.dumps(selector)}).decode().then(() => true, () => false)"))


def kept_turns(talk: Browser) -> Any:
    stored = "Object.keys(localStorage).filter((name) => name.startsWith('compiled_llm.chat.'))"
    return json.loads(talk.run(f"localStorage.getItem({stored}[0])"))["turns"]


def files_sent(script: Script) -> list[bytes]:
    image_prompt = script.asked[-1].image_prompt
    return [] if image_prompt is None else image_prompt.images


def test_a_image_comes_by_button_paste_and_drop_and_is_shown_sent_and_kept(
    talk: Browser, script: Script, tmp_path: Path
) -> None:
    script.text = "A red square."
    talk.until("!document.querySelector('#add-image').hidden")
    (tmp_path / "a.png").write_bytes(RED)
    choose(talk, tmp_path / "a.png")
    until_waiting(talk, 1)
    hand_over(talk, "paste")
    until_waiting(talk, 2)
    hand_over(talk, "drop")
    until_waiting(talk, 3)
    talk.click("#images button")
    until_waiting(talk, 2)
    talk.click("#images button")
    until_waiting(talk, 1)
    talk.ask("What is it?")
    talk.until_answered()
    assert len(files_sent(script)) == 1
    assert files_sent(script)[0].startswith(b"\x89PNG")
    assert (talk.count("article.user .image"), talk.count("#images img")) == (1, 0)
    assert loaded(talk, "article.user .image")
    (turn,) = kept_turns(talk)
    assert turn["images"][0].startswith("data:image/png;base64,")
    talk.open(talk.run("location.origin"))
    talk.until_state("ready")
    assert loaded(talk, "article.user .image")
    asked = len(script.asked)
    script.text = "Again."
    talk.run("[...document.querySelectorAll('button')].find((found) => found.innerText === 'Regenerate').click()")
    talk.until("document.querySelector('.assistant .tail')?.innerText === 'Again.'")
    assert (len(script.asked), len(files_sent(script))) == (asked + 1, 1)
    talk.ask("And its size?")  # the image of the earlier turn goes with it
    talk.until_answered(2)
    assert len(files_sent(script)) == 1
    assert talk.complaints == []


def test_a_question_that_is_edited_has_its_image_again(talk: Browser, script: Script) -> None:
    script.text = "Yes."
    talk.until("!document.querySelector('#add-image').hidden")
    hand_over(talk, "drop")
    until_waiting(talk, 1)
    talk.click("#send")  # an image alone is a question
    talk.until_answered()
    assert talk.text("#chats .title") == "Image"
    talk.run("[...document.querySelectorAll('button')].find((found) => found.innerText === 'Edit').click()")
    until_waiting(talk, 1)
    talk.ask("Is it red?")
    talk.until("document.querySelector('article.user')?.innerText === 'Is it red?'")
    talk.until_answered()
    assert len(files_sent(script)) == 1


def test_a_large_image_is_made_smaller_and_what_is_none_is_said(talk: Browser, script: Script) -> None:
    script.text = "Yes."
    talk.until("!document.querySelector('#add-image').hidden")
    hand_over(talk, "drop", b"no image", "text/plain")
    talk.until("!document.querySelector('#no-image').hidden")
    noise = (
        "(() => { const canvas = document.createElement('canvas'); canvas.width = 3000; canvas.height = 1000;"
        " const drawing = canvas.getContext('2d'); for (let place = 0; place < 3000; place += 3) {"
        " drawing.fillStyle = `rgb(${place % 255} ${(place * 7) % 255} ${(place * 13) % 255})`;"
        " drawing.fillRect(place, place % 900, 3, 90); } return canvas.toDataURL('image/png'); })()"
    )
    hand_over(talk, "paste", base64.b64decode(talk.run(noise).partition(",")[2]))
    until_waiting(talk, 1)
    assert loaded(talk, "#images img")
    image = "document.querySelector('#images img')"
    assert talk.run(f"[{image}.naturalWidth, {image}.naturalHeight]") == [1536, 512]
    assert talk.run("document.querySelector('#no-image').hidden")


def test_a_model_without_eyes_has_no_button(tab: Browser) -> None:
    tab.until_state("ready")
    assert tab.run("document.querySelector('#add-image').hidden")
    hand_over(tab, "paste")
    assert tab.count("#images img") == 0


def parts_of(message: dict[str, Any]) -> list[str]:
    return [part.get("text", part["type"]) for part in message["content"]]


def test_images_for_which_a_request_has_no_room_are_left_out_from_the_oldest_on(talk: Browser, script: Script) -> None:
    script.text = "Yes."
    talk.until("!document.querySelector('#add-image').hidden")
    hand_over(talk, "drop")  # the first question has two
    until_waiting(talk, 1)
    for turn in range(1, 19):
        hand_over(talk, "drop")
        until_waiting(talk, 2 if turn == 1 else 1)
        sent = talk.sent(f"Question {turn}")["messages"][::2]
        talk.until_answered(turn)
        assert len(files_sent(script)) == min(turn + 1, 16)
    assert parts_of(sent[0]) == ["(2 images were here.)", "Question 1"]
    assert parts_of(sent[1]) == ["(An image was here.)", "Question 2"]
    assert parts_of(sent[2]) == ["image_url", "Question 3"]
    notes = talk.texts("article .note")
    assert not [note for note in notes[:15] if "left out" in note]
    assert [note.split(" · ")[0] for note in notes[15:]] == [
        "the oldest image was left out: no room for more",
        "the 2 oldest images were left out: no room for more",
        "the 3 oldest images were left out: no room for more",
    ]
    assert (talk.count("article .error"), talk.complaints) == (0, [])


def test_images_have_room_beside_the_texts_in_the_bytes_of_a_request(talk: Browser) -> None:
    counted = """
    import('/page/messages.js').then(({ giveRoom, request }) => {
      const images = ['data:image/png;base64,' + 'A'.repeat(100_000)];
      const turn = (text) => ({ question: text, answer: text, images });
      giveRoom(16, 300_000);
      return ['x', 'ä'.repeat(20_000)].map((text) => request([turn(text), turn('x'), turn('x')]).leftOut);
    })"""
    assert talk.run(counted) == [1, 2]
