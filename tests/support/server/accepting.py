"""Whether a text has the form that a structural tag of xgrammar's describes."""

from __future__ import annotations

import json
from typing import Any

import xgrammar


def takes(form: dict[str, Any], text: str) -> bool:
    grammar = xgrammar.Grammar.from_structural_tag(json.dumps({"type": "structural_tag", "format": form}))
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([], xgrammar.VocabType.RAW))
    matcher = xgrammar.GrammarMatcher(compiler.compile_grammar(grammar), terminate_without_stop_token=True)
    return bool(matcher.accept_string(text) and matcher.is_completed())
