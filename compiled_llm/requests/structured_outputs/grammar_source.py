"""What a grammar is compiled from, and what xgrammar says of it."""

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
"""What xgrammar's messages begin with: the time, and where in its own code they come from."""


class GrammarsMissingError(RuntimeError):
    """There is nothing to compile grammars with."""


class GrammarSource(NamedTuple):
    """What a grammar is compiled from; equal ones have one grammar.

    Attributes:
        kind: how ``text`` is to be read.
        text: the schema, pattern, rules or tags.
        any_whitespace: whether there may be any between the parts of JSON.
        max_whitespace_cnt: how many blanks may stand there one after the other; None for any number.
    """

    kind: GrammarKind
    text: str
    any_whitespace: bool = True
    max_whitespace_cnt: int | None = None

    @property
    def _blanks(self) -> dict[str, Any]:
        return {"any_whitespace": self.any_whitespace, "max_whitespace_cnt": self.max_whitespace_cnt}

    def check(self) -> None:
        """Look whether it can be compiled, as far as that is told at once.

        Raises:
            ValueError: it cannot; says why, and where.
        """
        if len(self.text) <= _LONG:
            _check(self)

    def compiled(self, compiler: xgrammar.GrammarCompiler) -> xgrammar.CompiledGrammar:
        """Compile it, which may take seconds.

        Raises:
            RuntimeError: it cannot be.
        """
        if self.kind == "json":
            return compiler.compile_json_schema(self.text, **self._blanks)
        if self.kind == "regex":
            return compiler.compile_regex(self.text)
        if self.kind == "structural_tag":
            return compiler.compile_structural_tag(_as_format(self.text))
        return compiler.compile_lark(self.text) if self.kind == "lark" else compiler.compile_grammar(self.text)


@lru_cache(maxsize=256)
def _check(source: GrammarSource) -> None:
    """Read a grammar, once: many requests have the same."""
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
    """Whether there is something to compile grammars with."""
    return importlib.util.find_spec("xgrammar") is not None


def check_installed() -> None:
    """Check that there is something to compile grammars with.

    Raises:
        GrammarsMissingError: there is not.
    """
    if not is_installed():
        raise GrammarsMissingError(
            "structured_outputs: a grammar needs xgrammar to be compiled: pip install '.[structured]' in the checkout"
        )


def said(error: Exception) -> str:
    """Return what an error of xgrammar's says."""
    return _PLACE.sub("", str(error)).strip()


def _as_format(text: str) -> Any:
    """Return structural tags in today's form; vLLM takes xgrammar's former one, too."""
    from xgrammar import StructuralTag, StructuralTagItem

    tag = json.loads(text)
    if "structures" not in tag:
        return tag
    items = [
        StructuralTagItem(begin=each["begin"], schema=json.dumps(each["schema"]), end=each["end"])
        for each in tag["structures"]
    ]
    return StructuralTag.from_legacy_structural_tag(items, tag["triggers"])
