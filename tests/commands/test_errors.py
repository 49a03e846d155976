"""Errors of Python functions, in the words of the command line."""

from __future__ import annotations

import pytest

from compiled_llm.commands.errors import as_typed
from compiled_llm.commands.printable import printable


@pytest.mark.parametrize(
    ("message", "typed"),
    [
        ("wrap: no compiler; install one, or wrap with mode='eager'", "no compiler; install one, or use --mode eager"),
        ("backend=''; choose one of 'auto'", "--backend ''; choose one of 'auto'"),
        ("max_new_tokens=50: with a prompt of 3", "--max-new-tokens 50: with a prompt of 3"),
        ("load it with dtype=torch.bfloat16, or move it", "load it with --dtype bfloat16, or move it"),
        ("operations_uds='a': a file lies there", "--operations-uds a: a file lies there"),
        ("device='cuda', but torch sees none", "--device cuda, but torch sees none"),
        ("page_size=0: must be positive; device_map={}", "page_size=0: must be positive; device_map={}"),
    ],
)
def test_options_are_named_as_they_are_typed(message: str, typed: str) -> None:
    assert as_typed(message) == typed


def test_what_turns_the_direction_of_text_is_spelled_out() -> None:
    """Else a name or an answer would read otherwise than it is."""
    assert printable("a\u202eb\u2066c\u2069") == "a\\u202eb\\u2066c\\u2069"
    assert printable("\x1b[2J \u05d0 \u200f\n") == "\\x1b[2J \u05d0 \u200f\n"
