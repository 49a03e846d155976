"""What is known of xgrammar: its processor for HuggingFace says its mask, and what compiles comes without torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from compiled_llm.compat.xgrammar import is_grammar, masks_of

xgr = pytest.importorskip("xgrammar")
hf = pytest.importorskip("xgrammar.contrib.hf")

pytestmark = pytest.mark.core


@pytest.fixture
def processors() -> tuple[Any, Any]:
    info = xgr.TokenizerInfo([chr(token) for token in range(70, 140)], vocab_size=70, stop_token_ids=[69])
    grammar = xgr.GrammarCompiler(info).compile_regex("[a-g]{2,3}[h-z]")
    return hf.LogitsProcessor(grammar), hf.LogitsProcessor(grammar)


def test_masks_are_what_it_applies(processors: tuple[Any, Any]) -> None:
    ours, theirs = processors
    for token in (0, ord("b") - 70, ord("c") - 70, ord("z") - 70):
        ids = torch.tensor([[5, token], [9, token]])
        bits = masks_of(ours, ids)[:, :, None] >> torch.arange(32).numpy() & 1
        allowed = torch.isfinite(theirs(ids, torch.zeros(2, 70)))
        assert bits.reshape(2, -1)[:, :70].tolist() == allowed.int().tolist()
        assert not allowed.all()
    with pytest.raises(AssertionError):
        masks_of(ours, ids[:, :1])


def test_only_its_own_class_is_known_and_nothing_is_imported(processors: tuple[Any, Any]) -> None:
    class Derived(hf.LogitsProcessor):  # type: ignore[misc, name-defined]
        pass

    assert is_grammar(processors[0])
    assert not is_grammar(Derived(processors[0].compiled_grammars))
    assert not is_grammar(torch.nn.ReLU())
    del processors[0].token_bitmask
    assert not is_grammar(processors[0]), "another version, of which less is known"
    with pytest.MonkeyPatch.context() as patched:
        patched.delitem(sys.modules, "xgrammar.contrib.hf")
        assert not is_grammar(processors[1])
        assert "xgrammar.contrib.hf" not in sys.modules


COMPILING = """
import sys
from compiled_llm.compat.xgrammar import import_compiler
import_compiler()
from xgrammar import CompiledGrammar, Grammar, GrammarCompiler, StructuralTag, StructuralTagItem, TokenizerInfo
info = TokenizerInfo.deserialize_json(TokenizerInfo(["a", "b"]).serialize_json())
grammar = GrammarCompiler(info).compile_regex("a|b")
assert CompiledGrammar.deserialize_json(grammar.serialize_json(), info).memory_size_bytes == grammar.memory_size_bytes
try:
    GrammarCompiler(info).compile_regex("a(")
except RuntimeError:
    print([name for name in ("torch", "transformers") if getattr(sys.modules[name], "__file__", None)])
"""


def test_what_compiles_comes_without_torch_and_transformers() -> None:
    done = subprocess.run([sys.executable, "-c", COMPILING], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
