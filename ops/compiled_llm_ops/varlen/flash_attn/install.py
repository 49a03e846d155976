"""Checks for flash-attn's installation, and which of its versions attends."""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any

import torch

from compiled_llm_ops.protocol import TritonInstallation

OLDEST = (2, 8)  # the version of flash-attn that we have read

HOPPER = 9  # the major compute capability that flash-attn 3 is for


@functools.cache
def flash_attn_3() -> Any:
    """Return flash-attn 3's module; None if it is not installed, or the device is no Hopper."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != HOPPER:
        return None
    try:
        return importlib.import_module("flash_attn_interface")
    except Exception:  # its kernels are a library, which may not fit this torch
        return None


def flash_attn_2() -> Any:
    return importlib.import_module("flash_attn")


class FlashAttnInstallation(TritonInstallation):
    """Either version of flash-attn; and Triton, for what runs beside prefill."""

    def problems(self, builds: bool = True) -> list[str]:
        missing = super().problems(builds)
        if flash_attn_3() is None and (problem := _problem_of_version_2()):
            missing.append(problem)
        return missing


def _problem_of_version_2() -> str | None:
    way_out = "pip install flash-attn --no-build-isolation, or wrap with backend='auto'"
    try:
        package = flash_attn_2()
    except Exception as error:
        return f"flash-attn does not import ({error}): {way_out}"
    found = getattr(package, "__version__", None)  # flash-attn 4 alone is a folder without one
    if found is None or tuple(map(int, re.findall(r"\d+", found)[:2])) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        return f"flash-attn {found or '2'} is not installed in version {wanted} or newer: {way_out}"
    return None
