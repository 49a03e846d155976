"""The part of `flashinfer_tests.py` that is loaded into pytest: our module as `flashinfer`, and the choice of cases."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import compiled_llm_flashinfer as flashinfer

LIMITS: dict[str, Any] = json.loads(os.environ["FLASHINFER_TESTS"])
TOKENS = ("kv_len", "kv_len_2", "max_kv_len", "max_seq_len", "seq_len", "unique_kv_len", "page_size")
"""Parameters that say how many tokens a row has, by FlashInfer's names; the largest counts."""
FACTORS = ("batch_size", "num_kv_heads", "num_heads", "head_dim", "head_dim_qk")
LATENTS = {"test_deepseek_mla": 192}
"""Files whose heads have a size that is no parameter."""


class Nothing(ModuleType):
    """A module whose functions return nothing: what builds kernels, and what asks about GPUs."""

    __path__: list[str] = []  # noqa: RUF012  a package, so that modules in it can be imported

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class Built(Nothing):
    """`flashinfer.utils`: all kernels are built, so that no fixture builds any."""

    def has_flashinfer_jit_cache(self) -> bool:
        return True


class FourBits(Nothing):
    """The helpers for pages in NVFP4, which are left out here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.leave_out

    def leave_out(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("kv_cache_sf=of NVFP4 is left out of this API")


def install() -> None:
    """Let tests import our module as `flashinfer`, and what they do not need of its other modules as empty ones."""
    sys.modules["flashinfer"] = flashinfer
    for name, module in list(sys.modules.items()):
        inside = name.removeprefix(f"{flashinfer.__name__}.")
        if inside != name:
            sys.modules[f"flashinfer.{inside}"] = module
    stubs = {"flashinfer.jit": Nothing, "flashinfer.jit.attention": Nothing, "flashinfer.utils": Built}
    stubs |= {"tests.test_helpers.jit_utils": Nothing, "tests.test_helpers.utils_fp4": FourBits}
    for name, stub in stubs.items():
        sys.modules[name] = stub(name)
        package, _, inside = name.rpartition(".")
        if package in sys.modules:
            setattr(sys.modules[package], inside, sys.modules[name])


install()


def write(**case: Any) -> None:
    with Path(LIMITS["report"]).open("a") as file:
        file.write(json.dumps(case) + "\n")


def test_of(item: pytest.Item) -> str:
    """`test_page.py::test_append_paged_kv_cache`."""
    return f"{item.path.name}::{getattr(item, 'originalname', item.name)}"


def numbers_of(item: pytest.Item) -> int:
    """Return how many numbers the keys of a case have, as far as its parameters say."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    own = {name: value for name, value in params.items() if isinstance(value, int)}
    tokens = max([own[name] for name in TOKENS if name in own], default=1)
    return math.prod(own[name] for name in FACTORS if name in own) * tokens * LATENTS.get(item.path.stem, 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    by_test: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_test[test_of(item)].append(item)
    kept = set[pytest.Item]()
    for name, cases in by_test.items():
        small = [case for case in cases if numbers_of(case) <= LIMITS["numbers"]]
        drawn = small
        if len(small) > LIMITS["most"]:
            drawn = random.Random(f"{LIMITS['seed']} {name}").sample(small, LIMITS["most"])
        kept.update(drawn)
        write(test=name, kind="too large", count=len(cases) - len(small))
        write(test=name, kind="not drawn", count=len(small) - len(drawn))
    items[:] = [item for item in items if item in kept]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Run a case with its own seed, for so long."""

    stopped = False

    def stop(*_: Any) -> None:
        nonlocal stopped
        stopped = True
        raise TimeoutError

    torch.manual_seed(LIMITS["seed"])
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMITS["seconds"])
    name = test_of(item)
    try:
        result = yield
    except BaseException as error:
        # What compares tensors makes another error of one that it did not expect.
        write(test=name, **({"kind": "too large"} if stopped else kind_of(error)))
        raise
    else:
        write(test=name, kind="passed")
        return result
    finally:
        signal.alarm(0)


def kind_of(error: BaseException) -> dict[str, str]:
    said = " ".join(str(error).split())
    if isinstance(error, (pytest.skip.Exception, pytest.xfail.Exception)):
        return {"kind": "skipped"}
    if isinstance(error, NotImplementedError) and "is left out of this API" in said:
        return {"kind": "left out", "said": said.split("=", 1)[0]}
    if isinstance(error, AttributeError) and "compiled_llm_flashinfer" in said:
        return {"kind": "left out", "said": said.split("'")[-2]}
    if LIMITS["device"] == "cpu" and isinstance(error, (AssertionError, RuntimeError)) and needs_cuda(said):
        return {"kind": "left out", "said": "CUDA graphs, which need CUDA"}
    return {"kind": "failed", "said": f"{type(error).__name__}: {said[:200]}"}


def needs_cuda(said: str) -> bool:
    return any(
        part in said for part in ("CUDA enabled", "NVIDIA driver", "torch.cuda.", "CUDAGraph", "dummy base class")
    )
