"""Error messages on the troubleshooting page exist in the code."""

from __future__ import annotations

import ast
import re

from compiled_llm.kinds.support import KINDS, No
from support.docs.pages import DOCS
from support.imports import sources


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


def refusals() -> list[list[str]]:
    """Those of the table of kinds, as `wrap` puts them together."""
    return [
        re.split(r"{\w+}", f"wrap: {name}=True: {kind.what}, {cell.why}; {cell.way_out.replace('{feature}', name)}")
        for kind in KINDS
        for name, cell in kind.cells.items()
        if isinstance(cell, No)
    ]


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
    actual += refusals()
    listed = messages_on_the_page()
    assert len(listed) > 20
    for message in listed:
        assert any(shows(message, pieces) for pieces in actual), message
