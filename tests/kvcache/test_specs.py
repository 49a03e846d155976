"""KV specs: what a layer keeps lies where its spec says, and models whose values have another size than keys run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm import Engine, WrapConfig
from compiled_llm.kinds.full import Full, FullAttentionSpec
from compiled_llm.kinds.kind import Layer
from compiled_llm.kinds.refusals import UnsupportedModelError
from compiled_llm.kinds.spec import JoinedSpec, KVCacheSpec, TokenPlaces
from compiled_llm.kinds.uneven import Uneven
from compiled_llm.kvcache.releasable_memory import ReleasableMemory
from compiled_llm.kvcache.specs import (
    allocate_pages,
    kv_cache_specs,
    page_bytes,
    page_size_bytes,
)
from compiled_llm.model.checks import check_layers
from compiled_llm_ops.backends import backend_named
from compiled_llm_ops.reference.backend import Reference
from support.parity import FEW_PAGES, greedy, mixed_prompts, wrap_and_compare
from support.uneven_heads import VALUE_DIM, uneven_llama

CPU = torch.device("cpu")
UNEVEN = Layer(4, 4, 24, -1, 0.0, Uneven(16))
CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-4}


def pair(seed: int, mode: Any = "eager") -> tuple[PreTrainedModel, Any]:
    return uneven_llama(seed), compiled_llm.wrap(uneven_llama(seed), mode=mode, **FEW_PAGES)


# ---- memory


@pytest.mark.parametrize(
    ("spec", "shape", "nbytes"),
    [
        (FullAttentionSpec(2, 12, 16, 4, torch.float32), (9, 2, 2, 4, 16), 2 * 2 * 4 * 16 * 4),
        (FullAttentionSpec(2, 16, 16, 4, torch.bfloat16), (9, 2, 2, 4, 16), 2 * 2 * 4 * 16 * 2),
        (JoinedSpec(12, 5, 4, torch.float32, 2), (9, 2, 4, 17), 2 * 4 * 17 * 4),
        (JoinedSpec(12, 20, 4, torch.bfloat16, 2), (9, 2, 4, 32), 2 * 4 * 32 * 2),
    ],
)
class TestSpec:
    def test_memory_is_as_large_as_its_pages(self, spec: KVCacheSpec, shape: tuple[int, ...], nbytes: int) -> None:
        (memory,) = allocate_pages([spec], 9, ReleasableMemory(CPU))
        assert (memory.shape, memory.dtype, page_size_bytes(spec)) == (shape, spec.dtype, nbytes)
        assert memory.nbytes == 9 * nbytes
        assert not memory.any()

    def test_what_is_written_is_read_and_nothing_else_changes(
        self, spec: KVCacheSpec, shape: tuple[int, ...], nbytes: int, seed: int
    ) -> None:
        """Two rows of 6 and 9 tokens, the second of which lacks its first column, which a window has left."""
        generator = torch.Generator().manual_seed(seed)
        (memory,) = allocate_pages([spec], 9, ReleasableMemory(CPU))
        sizes = 12, {17: 5, 32: 20}.get(shape[-1], 12)
        if isinstance(spec, FullAttentionSpec):
            sizes = spec.head_dim, spec.head_dim
        keys, values = (torch.randn(2, 2, 9, size, generator=generator).to(spec.dtype) for size in sizes)
        pages, lengths = [[3, 1], [5, 2, 7]], [6, 9]
        entries = [
            (own[at // 4], at % 4, row, 9 - length + at)
            for row, (own, length) in enumerate(zip(pages, lengths, strict=True))
            for at in range(length)
        ]
        places = TokenPlaces(9, *torch.tensor(entries).T)
        spec.write(memory, places, keys[:, :, 1:], values[:, :, 1:])
        keys[:, :, 0], values[:, :, 0] = 0, 0
        for row, (own, length) in enumerate(zip(pages, lengths, strict=True)):
            read = spec.read(memory, torch.tensor(own), length)
            assert torch.equal(read[0], keys[row, :, 9 - length :])
            assert torch.equal(read[1], values[row, :, 9 - length :])
        assert not memory[[0, 4, 6, 8]].any()

    @pytest.mark.parametrize("rows", [1, 2])
    def test_all_columns_of_all_rows_are_written_as_if_they_were_chosen(
        self, spec: KVCacheSpec, shape: tuple[int, ...], nbytes: int, rows: int, seed: int
    ) -> None:
        """The first column of a layer with a window is missing."""
        generator = torch.Generator().manual_seed(seed)
        sizes = 12, {17: 5, 32: 20}.get(shape[-1], 12)
        if isinstance(spec, FullAttentionSpec):
            sizes = spec.head_dim, spec.head_dim
        both = [torch.randn(rows, 2, 6, size, generator=generator).to(spec.dtype) for size in sizes]
        entries = [(1 + 2 * row + at // 4, at % 4, row, at) for row in range(rows) for at in range(7)]
        places = TokenPlaces(7, *torch.tensor(entries).T)
        chosen, whole = (allocate_pages([spec], 9, ReleasableMemory(CPU))[0] for _ in range(2))
        spec.write(chosen, places, both[0], both[1])
        spec.write(whole, places._replace(whole=True), both[0], both[1])
        assert chosen.any()
        assert torch.equal(whole, chosen)


def test_layers_of_one_model_may_have_different_specs() -> None:
    layers = [Layer(4, 2, 16, -1, 0.0, Full()), UNEVEN]
    specs = kv_cache_specs(layers, 4, torch.float32, backend_named("reference"))
    assert [type(spec) for spec in specs] == [FullAttentionSpec, JoinedSpec]
    assert page_bytes(specs) == 4 * (2 * 2 * 16 + 4 * (24 + 16)) * 4


# ---- values of another size than keys


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("mode", ["eager", pytest.param("compile", marks=pytest.mark.whole)])
def test_such_a_model_decodes_by_plan(mode: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reference, "decode_ops", lambda self, device: None)
    wrap_and_compare(uneven_llama(seed), seed, mode=mode)


def test_its_pages_take_what_keys_and_values_take(seed: int) -> None:
    model = pair(seed)[1]
    greedy(model, mixed_prompts([5], 128, seed), 2)
    with Engine(model) as engine:
        described = engine.describe()
    one = 2 * 2 * 4 * (16 + VALUE_DIM) * 4  # layers, heads, tokens, numbers, bytes
    assert described.memory["pages"] == one * (described.pages.total + 1)


@pytest.mark.usefixtures("problems")
def test_a_backend_that_cannot_says_so_and_who_can() -> None:
    class Placed:
        device, dtype = torch.device("cuda:0"), torch.bfloat16

    model: Any = Placed()
    message = (
        r"'flashinfer' cannot run attention layer 1: its keys have heads of size 24, and its values of size 16; "
        "backend='reference' with mode='eager' can"
    )
    layers = [Layer(4, 2, 64, -1, 0.0, Full()), UNEVEN]
    for backend in ("auto", "flashinfer"):
        with pytest.raises(UnsupportedModelError, match=message):
            check_layers(model, layers, WrapConfig(backend=backend))
    check_layers(model, layers, WrapConfig(backend="reference", mode="eager"))
