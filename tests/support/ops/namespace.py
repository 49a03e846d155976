"""What must hold of every op of a namespace, whichever package defines it."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Sequence, Set
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor


def ops_of(namespace: str, left_out: Set[str] = frozenset()) -> list[str]:
    """Their names; the package that defines them is imported before."""
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith(f"{namespace}::")}
    return sorted({name.partition("::")[2] for name in names} - left_out)


def check_definition(package: ModuleType, namespace: str, name: str, cases: Sequence[Any]) -> None:
    """An op has a fake, kernels and cases, and its public function its signature, and a docstring that explains it."""
    packet = getattr(getattr(torch.ops, namespace), name)
    for overload in packet.overloads():
        qualified = f"{namespace}::{name}"
        assert torch._library.simple_registry.singleton.find(qualified).fake_impl.kernel is not None, "no fake"
        for key in ("CPU", "CUDA"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(
                f"{qualified}.{overload}".removesuffix(".default"), key
            )
    assert cases
    public = getattr(package, name)
    documented = inspect.getdoc(public)
    assert documented is not None
    check_signature(packet.default._schema, inspect.signature(public))
    returns = len(getattr(packet, packet.overloads()[0])._schema.returns) > 0
    sections = ["Args:", *(["Returns:"] if returns else []), "Raises:", "Source:"]
    while (referred := re.search(r"\nArgs: those of ``(\w+)``\.\n", documented)) is not None:
        documented = documented.replace(referred[0], arguments_section(getattr(package, referred[1])))
    found = [documented.find(f"\n{section}\n") for section in sections]
    assert -1 not in found
    assert found == sorted(found)
    arguments = documented[found[0] : found[1]]
    for argument in packet.default._schema.arguments:
        (line,) = [line for line in arguments.splitlines() if line.strip().startswith(f"{argument.name}: ")]
        if str(argument.type) == "Tensor":
            assert "[" in line or "like ``key``" in line, f"the shape of {argument.name}"
    assert re.search(r"int32|int64|dtype", arguments)
    assert "https://" in documented[found[-1] :] or name == "skinny_linear", "the measurement is our own"


def check_signature(schema: torch.FunctionSchema, signature: inspect.Signature) -> None:
    """A public function takes what its op takes: names, order, types and defaults."""
    types: dict[Any, str] = {Tensor: "Tensor", Tensor | None: "Optional[Tensor]", torch.dtype: "int"}
    types |= {list[Tensor]: "List[Tensor]", int: "int", float: "float", bool: "bool", str: "str"}
    taken = [
        (name, types[entry.annotation], None if entry.default is entry.empty else entry.default)
        for name, entry in signature.parameters.items()
    ]
    assert taken == [(entry.name, str(entry.type), entry.default_value) for entry in schema.arguments]


def arguments_section(function: Callable[..., Any]) -> str:
    """What an op that takes the same arguments refers to."""
    documented = inspect.getdoc(function)
    assert documented is not None
    return documented[documented.index("\nArgs:") : documented.index("\nReturns:\n")]


def check_gradients_are_refused(op: torch._ops.OpOverload, case: tuple[Any, ...]) -> None:
    """Each input that asks for gradients is refused by name, unless they are off."""
    fields, name = [entry.name for entry in op._schema.arguments], op._schema.name.partition("::")[2]
    asking: dict[str, Any] = {}
    for field, value in zip(fields, case, strict=False):
        if isinstance(value, Tensor) and value.is_floating_point():
            asking[field] = value.detach().clone().requires_grad_()
        elif isinstance(value, list) and value and all(map(torch.is_floating_point, value)):
            asking[field] = [tensor.detach().clone().requires_grad_() for tensor in value]
    for field, value in asking.items():
        given = {**dict(zip(fields, case, strict=False)), field: value}
        with pytest.raises(RuntimeError, match=rf"^{name}: {field}\.requires_grad is True.*torch\.no_grad\(\)"):
            op(**given)
        for off in (torch.no_grad, torch.inference_mode):
            with off():
                op(**given)


def opcheck(
    op: torch._ops.OpOverload, cases: Sequence[Any], seed: int, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it for one case that is drawn; of the others, that its fake and its schema are right."""
    allclose_of_any_dtype(monkeypatch)
    drawn = random.Random(f"{seed} {op}").randrange(len(cases))
    for number, case in enumerate(cases):
        tests: tuple[str, ...] = ("test_schema", "test_faketensor")
        if whole or number == drawn:
            tests = (*tests, "test_autograd_registration", "test_aot_dispatch_dynamic")
        results = torch.library.opcheck(op, case, test_utils=tests)
        assert set(results) == set(tests)
        assert set(results.values()) == {"SUCCESS"}


def allclose_of_any_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let opcheck compare tensors of fp8, which PyTorch does not on a CPU."""
    allclose = torch.allclose

    def compared(*tensors: Tensor, **options: Any) -> bool:
        return allclose(*(own.float() if own.dtype == torch.float8_e4m3fn else own for own in tensors), **options)

    monkeypatch.setattr(torch, "allclose", compared)
