"""Checks for a torch whose attention over packed queries takes a block table."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch

from compiled_llm_ops.protocol import TritonInstallation


def varlen() -> Any:
    """Import ``torch.nn.attention.varlen``."""
    return importlib.import_module("torch.nn.attention.varlen")


class TorchInstallation(TritonInstallation):
    """torch itself; and Triton, for what runs beside prefill."""

    def problems(self, builds: bool = True) -> list[str]:
        missing = super().problems(builds)
        if not _takes_block_tables():
            missing.append(
                f"torch {torch.__version__} has no torch.nn.attention.varlen.varlen_attn_out with a block_table: "
                "install torch 2.13 or newer, or wrap with backend='auto'"
            )
        elif (active := importlib.import_module("torch.nn.attention").current_flash_attention_impl()) is not None:
            # It refuses the starts of keys that torch's own kernel needs, or takes other arguments altogether.
            missing.append(
                f"torch runs {active} in place of its own kernel: call "
                "torch.nn.attention.restore_flash_attention_impl(), or wrap with backend='flash-attn'"
            )
        return missing


def _takes_block_tables() -> bool:
    try:
        function = varlen().varlen_attn_out
    except (ImportError, AttributeError):
        return False
    return {"block_table", "seqused_k", "num_splits"} <= {*inspect.signature(function).parameters}
