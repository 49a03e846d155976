"""Checks for what Triton's kernels need: Triton itself, and a device that it compiles for."""

from __future__ import annotations

import importlib

import torch

from compiled_llm_ops.protocol import NothingToBuild

OLDEST = (8, 0)
"""The compute capability from which on Triton compiles for a device, and its tensor cores multiply bfloat16."""


class TritonInstallation(NothingToBuild):
    """Triton, which brings its compiler along."""

    def problems(self, builds: bool = True) -> list[str]:
        missing = []
        try:
            importlib.import_module("triton")
        except Exception as error:  # its compiler is a library, which may not load
            missing.append(f"Triton does not import ({error}): pip install triton")
        if torch.cuda.is_available() and (found := torch.cuda.get_device_capability()) < OLDEST:
            missing.append(
                f"Triton compiles for compute capability {'.'.join(map(str, OLDEST))} or newer, and the device has "
                f"{'.'.join(map(str, found))}: use another GPU, or wrap with backend='reference' and mode='eager'"
            )
        return missing
