"""Undocumented parts of xgrammar: its logits processor for HuggingFace, and the modules that compile grammars."""

# Importing this module imports neither xgrammar nor torch. The processor's ``__call__`` takes in the last token of each
# row, fills ``token_bitmask``, and applies it to the scores. Called with scores of no tokens it does all but the last.
# That attribute is not documented: if it goes, or the class does more, no processor is recognised
# (``tests/compat/test_xgrammar.py`` tells), and such calls are slower, and right. Ends when xgrammar offers the mask by
# itself.
# ``import xgrammar`` imports torch and transformers, in 2 seconds and 300 MB, for matchers and tokenizers that a
# process which only compiles has no use for. ``import_compiler`` imports the modules that compile, in a tenth of both.
# Which they are is not documented: if one needs more, that process imports all of it (``tests/compat/test_xgrammar.py``
# tells), and starts later. Ends when xgrammar imports them lazily.

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


def is_grammar(processor: object) -> bool:
    """Whether a logits processor is the one that xgrammar makes for HuggingFace, not one derived from it."""
    module = sys.modules.get("xgrammar.contrib.hf")  # it is imported if there is such a processor
    known = module is not None and type(processor) is getattr(module, "LogitsProcessor", None)
    return known and "token_bitmask" in vars(processor)


def masks_of(processor: Any, ids: torch.Tensor) -> NDArray[np.int32]:
    """Let a grammar see all tokens so far, ``[B, T]`` int64 on the host; return the mask of those that may follow."""
    # The mask is ``[B, words]``, a bit for each token, overwritten by the next call; tokens beyond it are allowed.
    # AssertionError if a token does not follow the grammar, RuntimeError if it has served a batch of another size.
    import torch

    processor(ids, torch.empty(len(ids), 0, device="cpu"))
    masks: NDArray[np.int32] = processor.token_bitmask.numpy()
    return masks


def import_compiler() -> None:
    """Make ``xgrammar`` what compiles grammars alone, in a process that imports neither torch nor transformers."""
    # If this version of xgrammar does not come apart, it raises, and the process can import nothing of it any more.
    found = importlib.util.find_spec("xgrammar")
    assert found is not None, "xgrammar is not installed"
    package = ModuleType("xgrammar")
    package.__path__ = list(found.submodule_search_locations or ())
    tokenizers: Any = ModuleType("transformers")
    tokenizers.PreTrainedTokenizerBase = type("PreTrainedTokenizerBase", (), {})
    tokenizers.PreTrainedTokenizerFast = type("PreTrainedTokenizerFast", (), {})
    # torch: tvm_ffi, which calls the library, takes it as missing
    sys.modules |= {"xgrammar": package, "transformers": tokenizers, "torch": None}  # type: ignore[dict-item]
    for module in ("exception", "load_binding", "compiler", "grammar", "structural_tag", "tokenizer_info"):
        vars(package).update(vars(importlib.import_module(f"xgrammar.{module}")))
