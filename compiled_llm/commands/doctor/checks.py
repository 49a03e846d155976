"""All that `compiled-llm doctor` looks at, one finding each.

No finding may depend on another's health: torch and the rest are imported inside each check, and a check that fails
says so in its finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

from compiled_llm.commands.doctor import machine, packages
from compiled_llm.commands.doctor.finding import DoctorFinding, Outcome, essence
from compiled_llm.env import Env

_Check: TypeAlias = tuple[str, str, Callable[[], Outcome], bool]
"""Part, name, check, and whether nothing runs without it."""


def examine(cuda: bool) -> Iterator[DoctorFinding]:
    """Yield a finding for each thing that compiled_llm uses.

    Args:
        cuda: models will run on a CUDA device, so what that takes is needed.
    """
    for part, name, check, needed in _checks(cuda):
        try:
            outcome = check()
        except Exception as error:
            outcome = Outcome("warning", f"cannot be checked: {essence(error)}")
        yield DoctorFinding(part, name, *outcome, needed=needed and outcome.status != "not needed")


def has_cuda() -> bool:
    """Whether torch works and sees a CUDA device."""
    try:
        import torch

        return torch.cuda.is_available()
    except Exception:  # the finding about torch says why
        return False


def _checks(cuda: bool) -> Iterator[_Check]:
    yield "packages", "Python", packages.python, True
    yield "packages", "compiled_llm", packages.ourselves, True
    for package in packages.REQUIRED:
        yield "packages", package.module, partial(packages.imported, package), True
    yield "packages", "flashinfer", partial(packages.flashinfer, cuda), cuda
    triton = partial(packages.imported, packages.TRITON, "missing" if cuda else "not needed")
    yield "packages", "triton", triton, cuda
    yield "devices", "NVIDIA driver", machine.nvidia_driver, False
    yield from _gpus() if cuda else [("devices", "CUDA", machine.no_gpu, False)]
    yield "devices", "CPU", partial(machine.cpu, cuda), False
    yield "compilers", "C++ compiler", machine.cxx, True
    yield "compilers", "Python headers", machine.python_headers, True
    yield "compilers", "nvcc", partial(machine.nvcc, cuda), cuda
    yield "compilers", "ninja", partial(machine.ninja, cuda), cuda
    yield "caches", "compiled_llm", _own_cache, False
    yield "caches", "Inductor", _inductor_cache, False
    yield "caches", "FlashInfer", machine.flashinfer_cache, False
    for package in packages.OPTIONAL:
        yield "extras", package.module, partial(packages.imported, package, "optional"), False


def _gpus() -> Iterator[_Check]:
    """Yield a check for each GPU; only the first, which `cuda` stands for, is needed."""
    import torch

    for index in range(torch.cuda.device_count()):
        yield "devices", f"cuda:{index}", partial(machine.gpu, index), index == 0


def _own_cache() -> Outcome:
    return machine.cache(Env.from_environ().cache, "COMPILED_LLM_CACHE")


def _inductor_cache() -> Outcome:
    from compiled_llm.compat import inductor_cache

    return machine.cache(inductor_cache(), "TORCHINDUCTOR_CACHE_DIR")
