"""Triton's interpreter without most of what it does for each operation beside NumPy's: results are the same."""

from __future__ import annotations

import dataclasses
import importlib
import math
from typing import Any

import pytest


def hasten_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("runtime.interpreter", "language.core", "language.semantic")
    interpreter, core, semantic = (importlib.import_module(f"triton.{name}") for name in names)
    _patch_the_language_once(monkeypatch, interpreter, core)
    _leave_out_what_nothing_reads(monkeypatch, interpreter, core)
    _make_each_shape_once(monkeypatch, core)
    _make_each_number_once(monkeypatch, semantic.TritonSemantic)
    _take_operands_as_they_are(monkeypatch, core, semantic.TritonSemantic)


def _patch_the_language_once(monkeypatch: pytest.MonkeyPatch, interpreter: Any, core: Any) -> None:
    """It looks for what to patch at each call of a function in a kernel, which took a third of the time, and each
    function of the language was called by way of two others, which copied its keywords.
    """
    patch, done = interpreter._patch_lang, set[int]()

    def patched(function: Any) -> Any:
        if core.is_builtin(interpreter.tl.load):  # no longer patched: another launch
            done.clear()
        if id(function.__globals__) in done:
            return interpreter._LangPatchScope()
        done.add(id(function.__globals__))
        return patch(function)

    def patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        of_builder = interpreter.TritonSemantic(builder)
        function = getattr(member, "__wrapped__", member)

        def called(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = of_builder
            return function(*args, **kwargs)

        scope.set_attr(owner, name, called)

    monkeypatch.setattr(interpreter, "_patch_lang", patched)
    monkeypatch.setattr(interpreter, "_patch_attr", patch_attribute)


def _leave_out_what_nothing_reads(monkeypatch: pytest.MonkeyPatch, interpreter: Any, core: Any) -> None:
    """It works out if a sum of integers overflows, and looks at that only when it debugs; it makes a table of all of
    NumPy's types to look one up, and a name for each tuple. That took half of the time.
    """
    builder, handle = interpreter.interpreter_builder, interpreter.TensorHandle
    find, known = interpreter._get_np_dtype, dict[str, Any]()
    compute, refuse = interpreter.InterpreterBuilder.binary_op, handle.__post_init__
    assert not builder.options.debug
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))

    def found(own: Any) -> Any:
        name = own.scalar.name
        if name not in known:
            known[name] = find(own)
        return known[name]

    def without_a_name(self: Any, types: list[Any], fields: list[str] | None = None) -> None:
        self.types, self.fields = types, fields or [""] * len(types)

    def handled(self: Any, data: Any, dtype: Any) -> None:
        self.data, self.dtype, self.attr = data, dtype, {}
        if type(dtype) is core.dtype and data.itemsize > max(dtype.primitive_bitwidth // 8, 1):
            refuse(self)

    def computed(self: Any, left: Any, right: Any, operation: Any) -> Any:
        output = operation(left.data, right.data)
        if output.itemsize <= left.data.itemsize:
            return handle(output, left.dtype.scalar)
        return compute(self, left, right, operation)

    monkeypatch.setattr(interpreter, "_get_np_dtype", found)
    monkeypatch.setattr(handle, "__init__", handled)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "binary_op", computed)
    monkeypatch.setattr(core.tuple_type, "__init__", without_a_name)
    monkeypatch.setattr(core.tuple_type, "name", "tuple", raising=False)


def _make_each_shape_once(monkeypatch: pytest.MonkeyPatch, core: Any) -> None:
    """Each value that a kernel computes, and its type, had tuples of its own, of objects for each size: a third."""
    block, scalar_shape, one = core.block_type.__init__, core.tuple([]), core.constexpr(1)
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
    monkeypatch.setattr(core.tensor, "__init__", valued)


def _make_each_number_once(monkeypatch: pytest.MonkeyPatch, semantic: Any) -> None:
    """Half of all operands are numbers of the kernel's code, which were made, converted and repeated each time."""
    make, broadcast = semantic.scalar_constant, semantic.broadcast_impl_value
    numbers = dict[tuple[Any, type, str], Any]()
    ours, repeated = set[int](), dict[tuple[int, int], Any]()

    def constant(self: Any, value: Any, dtype: Any) -> Any:
        key = value, type(value), dtype.name
        if key not in numbers:
            numbers[key] = make(self, value, dtype)
            ours.add(id(numbers[key]))
        return numbers[key]

    def of_one_shape(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        types = left.type, right.type
        if not types[0].is_block():
            return broadcast(self, left, right)
        if types[1].is_block():  # shapes that are one object need not be compared size by size
            return (left, right) if types[0].shape is types[1].shape else broadcast(self, left, right)
        if id(right) not in ours:
            return broadcast(self, left, right)
        key = id(right), id(types[0].shape)
        if key not in repeated:
            repeated[key] = broadcast(self, left, right)[1]
        return left, repeated[key]

    monkeypatch.setattr(semantic, "scalar_constant", constant)
    monkeypatch.setattr(semantic, "broadcast_impl_value", of_one_shape)


def _take_operands_as_they_are(monkeypatch: pytest.MonkeyPatch, core: Any, semantic: Any) -> None:
    """Most are tensors, of one type: they were looked at as numbers, compile-time values, tuples, and converted."""
    tensor, plain = core.tensor, (core.tensor, int, float, bool, type(None))
    unwrap, check, convert = core._unwrap_if_constexpr, semantic.binary_op_type_checking_impl, semantic.to_tensor
    alike = set[tuple[str, float, type, tuple[bool, ...]]]()

    def unwrapped(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    def converted(self: Any, value: Any, check_type: bool = True) -> Any:
        return value if type(value) is tensor else convert(self, value, check_type)

    def operands(self: Any, left: Any, right: Any, *how: bool) -> Any:
        kinds = type(left), type(right)
        if kinds == (tensor, tensor) and len(how) < 4:  # the fourth says that it is a division
            types = left.dtype, right.dtype
            if type(types[0]) is type(types[1]) is core.dtype and types[0].name == types[1].name:
                return self.broadcast_impl_value(left, right)
        if kinds[0] is tensor and kinds[1] in (int, float) and type(left.dtype) is core.dtype:
            return with_number(self, left, right, how)
        return check(self, left, right, *how)

    def with_number(self: Any, left: Any, number: float, how: tuple[bool, ...]) -> Any:
        key = left.dtype.name, number, type(number), how
        if key in alike:  # such a number has become one of the tensor's type
            return self.broadcast_impl_value(left, self.scalar_constant(number, left.dtype))
        found = check(self, left, number, *how)
        if found[0].dtype.name == found[1].dtype.name == left.dtype.name:
            alike.add(key)
        return found

    monkeypatch.setattr(core, "_unwrap_if_constexpr", unwrapped)
    monkeypatch.setattr(semantic, "to_tensor", converted)
    monkeypatch.setattr(semantic, "binary_op_type_checking_impl", operands)
