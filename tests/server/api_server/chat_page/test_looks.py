"""The page at ``/`` on a desktop and a phone, dark and light: nothing is cut off, and all can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.server.browser import Browser
from support.server.scripted import Script

pytestmark = pytest.mark.whole

WIDE = (
    "# A title\n\nSo $x = \\frac{-b \\pm \\sqrt{b^2 - 4ac}}{2a}$.\n\n$$\n" + "x + y + " * 30 + "z\n$$\n\n"
    "```python\nprint(" + '"long" + ' * 40 + '"end")\n```\n\n|' + "a column|" * 12 + "\n|" + "-|" * 12 + "\n|"
    + "1|" * 12 + "\n\n> quoted\n\n- one\n  - two\n\nhttps://a.example/" + "x" * 200 + "\n"
)  # fmt: skip
PAIRS = ("text ground", "quiet ground", "quiet sunk", "on-accent accent", "bad ground", "bad raised", "text own")
PAIRS_OF_CODE = tuple(f"code-{number} sunk" for number in (1, 2, 3, 4))


@pytest.mark.parametrize("width", [320, 360, 768, 1200])
def test_nothing_is_cut_off(talk: Browser, script: Script, width: int, tmp_path: Path) -> None:
    script.text = WIDE
    talk.ask("A question that is long enough to be wrapped on a phone, and has averylongword" + "x" * 100)
    talk.until_answered()
    for scheme in ("light", "dark"):
        talk.look(tmp_path / f"{scheme}.png", width, 740, scheme)
        assert talk.run("document.documentElement.scrollWidth <= innerWidth")
        assert talk.run("document.querySelector('#log').scrollWidth <= document.querySelector('#log').clientWidth")
    for selector in ("pre", ".wide", "math[class]"):  # these scroll by themselves
        assert talk.run(f"getComputedStyle(document.querySelector('{selector}')).overflowX") == "auto"
    is_small = talk.run("getComputedStyle(document.querySelector('#side')).display") == "none"
    assert is_small == (width < 800)
    if is_small:
        talk.click("#open-side")
        assert talk.run("document.querySelector('#temperature').getBoundingClientRect().right <= innerWidth")
        assert talk.run("document.querySelector('#side').scrollWidth <= innerWidth")
        talk.click("#chats .title")
        assert talk.run("document.activeElement.id") == "question"


def test_a_wrong_setting_is_shown_on_a_phone(talk: Browser, script: Script) -> None:
    talk.type("#temperature", "-1")
    talk.resize(360, 740)
    talk.ask("Is it?")
    assert talk.run("document.activeElement.id") == "temperature"
    assert talk.run("document.activeElement.getBoundingClientRect().width > 0")


def test_everything_has_a_name(talk: Browser, script: Script) -> None:
    script.text = WIDE
    talk.ask("What?")
    talk.until_answered()
    for role in ("textbox", "button", "spinbutton", "checkbox", "combobox"):
        nodes = talk.call("Accessibility.getFullAXTree")["nodes"]
        named = [node["name"]["value"] for node in nodes if node.get("role", {}).get("value") == role]
        assert named, role
        assert all(named), role


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_there_is_contrast_enough(talk: Browser, scheme: str) -> None:
    talk.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    for pair in (*PAIRS, *PAIRS_OF_CODE):
        assert contrast(*(color_of(talk, name) for name in pair.split())) >= 4.5, pair


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
