"""Kernels compiled by Triton without a GPU: its interpreter takes what its compiler does not."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.imports import CHECKOUT

LAUNCH = re.compile(r"^ +(?:\w+ = )?(_\w+)\[\(", re.MULTILINE)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that Triton has compiled before is found."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def launched_by(kernels: Path) -> set[str]:
    """The kernels that a folder's functions launch."""
    return {name for path in kernels.rglob("*.py") for name in LAUNCH.findall(path.read_text())}


def compiled_in(tests: str, kernels: set[str]) -> set[str]:
    """Those that a folder's tests of compiling name."""
    texts = [path.read_text() for path in (CHECKOUT / "tests" / tests).rglob("*.py")]
    compiling = "\n".join(text for text in texts if "support.ops.compiling" in text)
    return {name for name in kernels if re.search(rf"\b{name}\b", compiling)}


def compiled(
    kernel: Any,
    constants: Mapping[str, Any],
    types: Mapping[str, str],
    warps: int = 4,
    aligned: Sequence[str] = (),
    **options: Any,
) -> Any:
    """What the kernel is for Hopper, with its `asm`; an argument without a type or constant is None."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    constants = {**{name: None for name in names if name not in types}, **constants}
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, **options})
    check_operands_in_registers(made.asm["ptx"])
    return made


def check_operands_in_registers(code: str) -> None:
    """Tensor cores read an operand in registers while the kernel goes on: it must wait before it writes the next one.

    With operands in shared memory, some products may still run while the next ones begin.
    """
    in_registers = re.search(r"wgmma\.mma_async\S+\s+\{[^}]*\},\s*\{", code)
    left = {int(count) for count in re.findall(r"wgmma\.wait_group\S*\s+(\d+)", code)} - {0}
    assert not (in_registers and left), f"{max(left)} products may still read registers that are written"


def in_order(code: str) -> list[str]:
    """Where the kernel waits, lets go, and touches memory, in PTX."""
    return re.findall(r"griddepcontrol\.\w+|cp\.async\.\w+|(?:ld|st|atom)\.global", code)


def resources_of(cubin: bytes, path: Path) -> str:
    """What `cuobjdump` says of it: registers, stack and shared memory."""
    from triton import knobs

    path.write_bytes(cubin)
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
