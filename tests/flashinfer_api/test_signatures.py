"""Functions and methods have FlashInfer's arguments, in its order, with its defaults; needs FlashInfer, and no GPU."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import compiled_llm_flashinfer as ours

flashinfer = pytest.importorskip("flashinfer")
pytestmark = pytest.mark.skipif(
    not flashinfer.__version__.startswith("0.6.13"), reason="signatures are those of FlashInfer 0.6.13"
)


def own_functions() -> Iterator[str]:
    """`single_decode_with_kv_cache`, `BlockSparseAttentionWrapper.plan`."""
    for name in ours.__all__:
        own = getattr(ours, name)
        if inspect.isfunction(own):
            yield name
        elif inspect.isclass(own):
            yield from (f"{name}.{method}" for method, found in vars(own).items() if inspect.isfunction(found))


def found_in(module: Any, path: str) -> Any:
    """None if there is no such function, or it only hands on what it is given."""
    owner, _, name = path.rpartition(".")
    function = vars(getattr(module, owner) if owner else module).get(name)
    return None if function is None or "*args" in str(inspect.signature(function)) else function


def arguments_of(function: Any) -> list[tuple[str, Any]]:
    return [(name, entry.default) for name, entry in inspect.signature(function).parameters.items()]


SHARED = [path for path in own_functions() if found_in(ours, path) and found_in(flashinfer, path)]


@pytest.mark.parametrize("path", SHARED)
def test_a_signature_is_that_of_flashinfer(path: str) -> None:
    assert arguments_of(found_in(ours, path)) == arguments_of(found_in(flashinfer, path))


def test_what_everyone_calls_is_compared() -> None:
    assert {"single_decode_with_kv_cache", "BlockSparseAttentionWrapper.plan", "append_paged_kv_cache"} <= {*SHARED}
