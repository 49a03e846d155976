"""Kernels compiled by Triton without a GPU: its interpreter takes what its compiler does not."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


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
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, **options})


def in_order(code: str) -> list[str]:
    """Where the kernel waits, lets go, and touches memory, in PTX."""
    return re.findall(r"griddepcontrol\.\w+|cp\.async\.\w+|(?:ld|st|atom)\.global", code)


def resources_of(cubin: bytes, path: Path) -> str:
    """What `cuobjdump` says of it: registers, stack and shared memory."""
    from triton import knobs

    path.write_bytes(cubin)
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
