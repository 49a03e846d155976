"""Error messages: those on the troubleshooting page exist, and those that exist are on the page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from support.imports import sources
from support.pages import CHECKOUT, DOCS

# Where errors are raised that somebody meets who calls wrap or generate; those of a `Runner` are met by whoever writes
# a loop of their own.
SPEAKING = (
    *("config.py", "model/*.py", "kvcache/*.py", "execution/*.py", "engine/*.py", "huggingface/*.py"),
    "compilation/artifacts/*.py",
    *("client/*.py", "protocol/*.py", "server/generator/*.py", "server/front/*.py", "server/replicas/*.py"),
)
# What makes errors that clients of HTTP see; they are not always raised where they are made.
ANSWERS = {"invalid", "unavailable", "ApiError", "PydanticCustomError"}
QUIET = {"runner.py", "admission.py"}
# Only for people who write a loop or a client of their own, or said by another message on the page.
UNLISTED = {
    "; remove it, and have it saved anew",
    "a call without a name",
    "a second hello",
    "a second request number ",
    "a frame that was cut after ",
    "it left without a word",
    "the first message is no hello",
    " is no plain data",
    "neither an answer nor an end",
    "a row cannot have room for ",
    "a row of ",
    "no page is free, and no request has any",
    "insert: another prefix tree holds pages of this pool; clear() that one first",
    "insert: pages ",
    " tokens fill ",
    " tokens cannot forget ",
    "logits_of: the row has no token that waits to be chosen",
    "masks: a row that is to get masks comes in with one; give its Sampling the first",
    "step: the rows have no next tokens; give them as forced tokens",
    "the model has changed",  # in what is said of a step that could not be captured
}


def messages_on_the_page() -> list[list[str]]:
    """Each as the pieces between what depends on the call."""
    text = (DOCS / "how-to" / "troubleshooting.md").read_text()
    return [
        [piece for piece in message.split("…") if len(piece) > 1]
        for message in re.findall(r"^`(.+)`\n:   ", text, re.MULTILINE)
    ]


def pieces_of(node: ast.expr) -> list[str]:
    """The constant pieces of a string or f-string."""
    values = node.values if isinstance(node, ast.JoinedStr) else [node]
    return [part.value for part in values if isinstance(part, ast.Constant) and isinstance(part.value, str)]


def strings_in(tree: ast.AST) -> list[list[str]]:
    found = (pieces_of(node) for node in ast.walk(tree) if isinstance(node, (ast.JoinedStr, ast.Constant)))
    return [pieces for pieces in found if pieces]


def shows(listed: list[str], actual: list[str]) -> bool:
    """Whether each piece on the page is part of the message, in order."""
    rest = "\0".join(actual)
    for piece in listed:
        _, found, rest = rest.partition(piece)
        if not found:
            return False
    return True


def test_every_message_on_the_troubleshooting_page_exists() -> None:
    actual = [pieces for file in sources().values() for pieces in strings_in(ast.parse(file.read_text()))]
    listed = messages_on_the_page()
    assert len(listed) > 40
    for message in listed:
        assert any(shows(message, pieces) for pieces in actual), message


def messages_in(tree: ast.AST) -> Iterator[tuple[int, list[str]]]:
    """Each message of an error that is made there, with its line."""
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "id", "")  # of a function, which builds the error elsewhere, with "_"
        if name in ANSWERS or (isinstance(node, ast.Raise) and not name.startswith("_")):
            given = map(pieces_of, call.args[:2] if name in ANSWERS else call.args[:1])
            yield call.lineno, max(given, key=lambda pieces: sum(map(len, pieces)), default=[])


def test_every_message_is_on_the_troubleshooting_page() -> None:
    listed, missing = messages_on_the_page(), set()
    package = CHECKOUT / "compiled_llm"
    for source in (file for pattern in SPEAKING for file in sorted(package.glob(pattern)) if file.name not in QUIET):
        for line, pieces in messages_in(ast.parse(source.read_text())):
            if max(map(len, pieces), default=0) < 12 or UNLISTED.intersection(pieces):
                continue
            if not any(shows(message, pieces) for message in listed):
                missing.add(f"{source.relative_to(package)}, line {line}: {'…'.join(pieces)}")
    assert sorted(missing) == []
