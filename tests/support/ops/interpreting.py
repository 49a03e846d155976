"""Kernels under Triton's interpreter, which decides at import whether it interprets: in a process of their own."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

TESTS = Path(__file__).parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that has TRITON_INTERPRET=1")
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="for the process that does not interpret")


def check_interpreted(files: str, config: pytest.Config) -> None:
    """Run the interpreted tests of these files in tests."""
    options = [f"--seed={config.getoption('seed')}", *["--whole"] * config.getoption("--whole")]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        *map(str, sorted(TESTS.glob(files))),
        *options,
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


def take_scalars_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes an int of an array of one number, which NumPy 2.4 refuses."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


def round_to_fp8_as_gpus_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """It rounds half away from zero, and loses the carry: 124.6 becomes 64. Only float32 is converted to fp8 by us."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    convert, language = interpreter._convert_float, interpreter.tl

    def converted(numbers: Any, own: Any, other: Any, rounding: Any) -> Any:
        if (own, other) != (language.float32, language.float8e4nv):
            return convert(numbers, own, other, rounding)
        floats = torch.from_numpy(numbers.view("float32").copy())
        return floats.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", converted)


def multiply_bfloat16_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It multiplies the 16 bits of bfloat16 as integers; and NumPy adds as the processor and all sizes have it."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    builder, language = interpreter.InterpreterBuilder, interpreter.tl
    create_dot = builder.create_dot

    def multiplied(own: Any) -> Any:
        if own.dtype.scalar != language.bfloat16:
            return own
        return interpreter.TensorHandle((own.data.astype("uint32") << 16).view("float32"), language.float32)

    def dot(self: Any, a: Any, b: Any, sums: Any, *others: Any) -> Any:
        if sums.data.dtype.kind != "f":
            return create_dot(self, a, b, sums, *others)
        # Added in float64, in any order, and rounded once, a row has the same bits in any batch.
        nothing = interpreter.TensorHandle(np.zeros_like(sums.data, dtype="float64"), language.float64)
        product = create_dot(self, multiplied(a), multiplied(b), nothing, *others)
        return interpreter.TensorHandle(product.data.astype(sums.data.dtype) + sums.data, sums.dtype.scalar)

    monkeypatch.setattr(builder, "create_dot", dot)
