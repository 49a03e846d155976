"""xgrammar's logits processor for HuggingFace, by what is known of its class; xgrammar itself is never imported here.

Its ``__call__`` takes in the last token of each row, fills ``token_bitmask``, and applies it to the scores. Called with
scores of no tokens it does all but the last. That attribute is not documented: if it goes, or the class does more, no
processor is recognised (``tests/test_xgrammar_compat.py`` tells), and such calls are slower, and right. Ends when
xgrammar offers the mask by itself.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def is_grammar(processor: Any) -> bool:
    """Whether a logits processor is the one that xgrammar makes for HuggingFace, not one derived from it."""
    module = sys.modules.get("xgrammar.contrib.hf")  # whoever has such a processor has imported it
    known = module is not None and type(processor) is getattr(module, "LogitsProcessor", None)
    return known and "token_bitmask" in vars(processor)


def masks_of(processor: Any, ids: torch.Tensor) -> NDArray[np.int32]:
    """Let a processor see all tokens so far, and return which ones may come next.

    Args:
        processor: a grammar.
        ids: ``[B, T]`` int64 on the host.

    Returns:
        ``[B, words]``, a bit for each token, overwritten by the next call; what lies beyond it is not barred.

    Raises:
        AssertionError: a token does not follow the grammar.
        RuntimeError: the processor has served a batch of another size.
    """
    processor(ids, torch.empty(len(ids), 0, device="cpu"))
    masks: NDArray[np.int32] = processor.token_bitmask.numpy()
    return masks
