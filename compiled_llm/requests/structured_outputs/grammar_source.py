"""The source of a grammar, compiled by xgrammar."""

from __future__ import annotations

import importlib.util
import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import xgrammar

GrammarKind = Literal["json", "regex", "ebnf", "lark", "structural_tag"]

_LONG = 20_000
"""Characters of a text that is not read while its user waits."""
_PLACE = re.compile(r"^(\[[\d:]+\] )?(\S+\.(cc|h):\d+: )?(Check failed: .* is false: )?")
"""The beginning of xgrammar's messages: the time, and the place in its own code."""


class GrammarsMissingError(RuntimeError):
    """No library is installed to compile grammars with."""


class GrammarSource(NamedTuple):
    """The source of a grammar; equal sources have one grammar.

    Attributes:
        kind: how to read ``text``: a schema, pattern, rules or tags.
        any_whitespace: whether any is allowed between the parts of JSON.
        max_whitespace_cnt: how many blanks in a row are allowed there; None for any number.
    """

    kind: GrammarKind
    text: str
    any_whitespace: bool = True
    max_whitespace_cnt: int | None = None

    @property
    def _blanks(self) -> dict[str, Any]:
        return {"any_whitespace": self.any_whitespace, "max_whitespace_cnt": self.max_whitespace_cnt}

    def check(self) -> None:
        """Check it as far as that is quick; ValueError, with why and where, if it cannot be compiled."""
        if len(self.text) <= _LONG:
            _check(self)

    def compiled(self, compiler: xgrammar.GrammarCompiler) -> xgrammar.CompiledGrammar:
        """Compile it, which may take seconds; RuntimeError if it fails."""
        if self.kind == "json":
            return compiler.compile_json_schema(self.text, **self._blanks)
        if self.kind == "regex":
            return compiler.compile_regex(self.text)
        if self.kind == "structural_tag":
            return compiler.compile_structural_tag(_as_format(self.text))
        return compiler.compile_lark(self.text) if self.kind == "lark" else compiler.compile_grammar(self.text)


@lru_cache(maxsize=256)
def _check(source: GrammarSource) -> None:
    """Cached, since many requests have the same grammar."""
    try:
        _read(source)
    except RuntimeError as error:
        raise ValueError(said(error)) from error


def _read(source: GrammarSource) -> xgrammar.Grammar:
    from xgrammar import Grammar

    if source.kind == "json":
        return Grammar.from_json_schema(source.text, **source._blanks)
    if source.kind == "regex":
        return Grammar.from_regex(source.text)
    if source.kind == "structural_tag":
        return Grammar.from_structural_tag(_as_format(source.text))
    return Grammar.from_lark(source.text) if source.kind == "lark" else Grammar.from_ebnf(source.text)


def is_installed() -> bool:
    return importlib.util.find_spec("xgrammar") is not None


def check_installed() -> None:
    """Raise GrammarsMissingError if no library can compile grammars."""
    if not is_installed():
        raise GrammarsMissingError(
            "structured_outputs: a grammar needs xgrammar to be compiled: pip install '.[structured]' in the checkout"
        )


def said(error: Exception) -> str:
    """Return the message of xgrammar's error."""
    return _PLACE.sub("", str(error)).strip()


def _as_format(text: str) -> Any:
    """Return structural tags in the current form; as vLLM does, it accepts xgrammar's former one, too."""
    from xgrammar import StructuralTag, StructuralTagItem

    tag = json.loads(text)
    if "structures" not in tag:
        return tag
    items = [
        StructuralTagItem(begin=each["begin"], schema=json.dumps(each["schema"]), end=each["end"])
        for each in tag["structures"]
    ]
    return StructuralTag.from_legacy_structural_tag(items, tag["triggers"])
