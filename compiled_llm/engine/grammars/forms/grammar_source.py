"""The source of a grammar, compiled by xgrammar."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from compiled_llm.engine.grammars.forms.strings import has_strings, with_escapes
from compiled_llm.requests.structured_outputs import GrammarsMissingError

if TYPE_CHECKING:
    import xgrammar

GrammarKind = Literal["json", "regex", "ebnf", "lark", "structural_tag"]

_LONG = 20_000  # characters of a text that is not read while its user waits
_PLACE = re.compile(r"^(\[[\d:]+\] )?(\S+\.(cc|h):\d+: )?(Check failed: .* is false: )?")
"""The beginning of xgrammar's messages: the time, and the place in its own code."""


class GrammarSource(NamedTuple):
    """The source of a grammar; equal sources have one grammar."""

    kind: GrammarKind  # how to read ``text``: a schema, pattern, rules or tags
    text: str
    any_whitespace: bool = True  # whether any is allowed between the parts of JSON
    max_whitespace_cnt: int | None = None  # how many blanks in a row are allowed there; None for any number

    def check(self) -> None:
        """Check it as far as that is quick; ValueError, with why and where, if it cannot be compiled."""
        if len(self.text) <= _LONG:
            _check(self)

    def compiled(self, compiler: xgrammar.GrammarCompiler) -> xgrammar.CompiledGrammar:
        """Compile it, which may take seconds; RuntimeError or ValueError if it fails."""
        made: xgrammar.CompiledGrammar
        if self.kind == "structural_tag":  # these, and Lark's rules, may name special tokens of the compiler's
            made = compiler.compile_structural_tag(_as_format(self.text))
        elif self.kind == "lark":
            made = compiler.compile_lark(self.text)
        else:
            made = compiler.compile_grammar(self.read())
        return made

    def read(self) -> xgrammar.Grammar:
        """Read it, without a vocabulary; RuntimeError or ValueError if it fails."""
        from xgrammar import Grammar

        if self.kind == "json":
            blanks: Any = {"any_whitespace": self.any_whitespace, "max_whitespace_cnt": self.max_whitespace_cnt}
            if has_strings(self.text):
                return Grammar.from_ebnf(_rules(self.text, **blanks))
            return Grammar.from_json_schema(self.text, **blanks)
        if self.kind == "structural_tag":
            return Grammar.from_structural_tag(_as_format(self.text))
        if self.kind == "regex":
            return Grammar.from_regex(self.text)
        return Grammar.from_lark(self.text) if self.kind == "lark" else Grammar.from_ebnf(self.text)


@lru_cache(maxsize=256)
def _check(source: GrammarSource) -> None:
    """Cached, since many requests have the same grammar."""
    try:
        source.read()
    except RuntimeError as error:
        raise ValueError(message_of(error)) from error


def _rules(schema: str, **blanks: Any) -> str:
    """Return the rules of a schema with strings that may have escapes."""
    from xgrammar import Grammar

    return with_escapes(str(Grammar.from_json_schema(schema, **blanks)))


def is_installed() -> bool:
    return importlib.util.find_spec("xgrammar") is not None


def check_installed() -> None:
    """Raise GrammarsMissingError if no library can compile grammars."""
    if not is_installed():
        raise GrammarsMissingError(
            "structured_outputs: a grammar needs xgrammar to be compiled: pip install '.[structured]' in the checkout"
        )


def message_of(error: Exception) -> str:
    """Return the message of xgrammar's error."""
    return _PLACE.sub("", str(error)).strip()


def _as_format(text: str) -> Any:
    """Return structural tags in the current form; as vLLM does, it accepts xgrammar's former one, too."""
    from xgrammar import StructuralTag, StructuralTagItem

    tag = json.loads(text)
    if "structures" not in tag:
        return _with_rules(tag)
    try:
        items = [
            StructuralTagItem(begin=each["begin"], schema=json.dumps(each["schema"]), end=each["end"])
            for each in tag["structures"]
        ]
        former = StructuralTag.from_legacy_structural_tag(items, tag["triggers"])
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"is no structural tag: structures, each with begin, schema and end, and triggers: {error!r}"
        ) from error
    return _with_rules(former.model_dump(mode="json"))


def _with_rules(part: object) -> object:
    """Return a part of structural tags in which strings of JSON may have escapes."""
    if isinstance(part, list):
        return [_with_rules(each) for each in part]
    if not isinstance(part, Mapping):
        return part
    if part.get("type") != "json_schema" or part.get("style", "json") != "json":
        return {name: _with_rules(each) for name, each in part.items()}
    schema = json.dumps(part.get("json_schema"))
    if part.get("excludes") or part.get("any_order") or not has_strings(schema):
        return part
    return {"type": "grammar", "grammar": _rules(schema, max_whitespace_cnt=part.get("max_whitespace_cnt"))}
