"""Kernels under Triton's interpreter, which decides at import whether it interprets: in a process of their own."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    """It multiplies the 16 bits of bfloat16 as integers."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    builder, language = interpreter.InterpreterBuilder, interpreter.tl
    create_dot = builder.create_dot

    def multiplied(own: Any) -> Any:
        if own.dtype.scalar != language.bfloat16:
            return own
        return interpreter.TensorHandle((own.data.astype("uint32") << 16).view("float32"), language.float32)

    def dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return create_dot(self, multiplied(a), multiplied(b), *others)

    monkeypatch.setattr(builder, "create_dot", dot)


def patch_the_language_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks for what to patch at each call of a function in a kernel, which took a third of the time."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    language, patch, done = interpreter.tl, interpreter._patch_lang, set[int]()

    def patched(function: Any) -> Any:
        if language.core.is_builtin(language.load):  # no longer patched: another launch
            done.clear()
        if id(function.__globals__) in done:
            return interpreter._LangPatchScope()
        done.add(id(function.__globals__))
        return patch(function)

    monkeypatch.setattr(interpreter, "_patch_lang", patched)


def leave_out_what_nothing_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It works out if a sum of integers overflows, and looks at that only when it debugs; it makes a table of all of
    NumPy's types to look one up, and a name for each tuple. That took half of the time.
    """
    names = ("runtime.interpreter", "language.core", "language.semantic")
    interpreter, core, semantic = (importlib.import_module(f"triton.{name}") for name in names)
    builder, find, known = interpreter.interpreter_builder, interpreter._get_np_dtype, dict[str, Any]()
    assert not builder.options.debug
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))

    def found(own: Any) -> Any:
        name = own.scalar.name
        if name not in known:
            known[name] = find(own)
        return known[name]

    def without_a_name(self: Any, types: list[Any], fields: list[str] | None = None) -> None:
        self.types, self.fields = types, fields or [""] * len(types)

    monkeypatch.setattr(interpreter, "_get_np_dtype", found)
    monkeypatch.setattr(core.tuple_type, "__init__", without_a_name)
    monkeypatch.setattr(core.tuple_type, "name", "tuple", raising=False)
    _make_each_shape_once(monkeypatch, core, semantic)


def _make_each_shape_once(monkeypatch: pytest.MonkeyPatch, core: Any, semantic: Any) -> None:
    """Each value that a kernel computes, and its type, had tuples of its own, of objects for each size: a third.
    Shapes that are one object need not be compared size by size.
    """
    block, scalar_shape, one = core.block_type.__init__, core.tuple([]), core.constexpr(1)
    broadcast = semantic.TritonSemantic.broadcast_impl_value
    shapes = dict[tuple[int, ...], tuple[Any, int, str]]()
    made = dict[int, tuple[Any, int, str]]()
    of_values = dict[tuple[int, ...], tuple[Any, Any]]()

    def typed(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel, name = made.get(id(shape)) or once(self, element_ty, shape)
        self.name = f"<{name}, {element_ty}>"

    def once(self: Any, element_ty: Any, shape: Any) -> tuple[Any, int, str]:
        sizes = tuple(core._unwrap_if_constexpr(size) for size in core._unwrap_if_constexpr(shape))
        if sizes not in shapes:
            block(self, element_ty, shape)  # which refuses some
            shapes[sizes] = made[id(self.shape)] = self.shape, self.numel, str(self.shape)
        return shapes[sizes]

    def of_one_shape(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        types = left.type, right.type
        if types[0].is_block() and types[1].is_block() and types[0].shape is types[1].shape:
            return left, right
        return broadcast(self, left, right)

    def valued(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if not type.is_block():
            self.shape, self.numel = scalar_shape, one
            return
        sizes = tuple(type.shape.values)
        if sizes not in of_values:
            of_values[sizes] = core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))
        self.shape, self.numel = of_values[sizes]

    monkeypatch.setattr(core.block_type, "__init__", typed)
    monkeypatch.setattr(semantic.TritonSemantic, "broadcast_impl_value", of_one_shape)
    monkeypatch.setattr(core.tensor, "__init__", valued)
