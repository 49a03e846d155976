"""Options are checked where they are given, and kv_memory means what its documentation says."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from compiled_llm import WrapConfig
from compiled_llm.config import KVMemory, parse_kv_memory
from compiled_llm.kinds.full import Full
from compiled_llm.kinds.kind import Layer
from compiled_llm.kvcache import memory as kv_cache
from compiled_llm.kvcache.memory import pages_to_allocate, states_to_allocate
from compiled_llm.kvcache.specs import kv_cache_specs, page_bytes
from compiled_llm_ops.reference.backend import BACKEND

CPU = torch.device("cpu")
LAYERS = [Layer(4, 2, 16, -1, 0.0, Full()), Layer(4, 2, 16, 6, 0.0, Full()), Layer(8, 1, 32, -1, 0.0, Full())]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (0.5, KVMemory(fraction=0.5)),
        (1.0, KVMemory(fraction=1.0)),
        (1e-9, KVMemory(fraction=1e-9)),
        (1, KVMemory(nbytes=1)),
        (2**40, KVMemory(nbytes=2**40)),
        ("8GiB", KVMemory(nbytes=8 * 2**30)),
        ("8 gib", KVMemory(nbytes=8 * 2**30)),
        (" 1.5 GB ", KVMemory(nbytes=1_500_000_000)),
        ("3MiB", KVMemory(nbytes=3 * 2**20)),
        ("3mb", KVMemory(nbytes=3_000_000)),
        ("2KiB", KVMemory(nbytes=2048)),
        ("2kB", KVMemory(nbytes=2000)),
        ("100B", KVMemory(nbytes=100)),
        (".5KiB", KVMemory(nbytes=512)),
        ("20000 tokens", KVMemory(tokens=20000)),
        ("1 token", KVMemory(tokens=1)),
        ("7Tokens", KVMemory(tokens=7)),
    ],
)
def test_kv_memory_is_a_fraction_bytes_or_tokens(value, expected):
    assert parse_kv_memory(value) == expected
    assert WrapConfig(kv_memory=value).kv_memory == value


IMPOSSIBLE_MEMORY = [
    *(0.0, -0.1, 1.1, 8.0, math.nan, math.inf, 0, -1, True, False),
    *("", "8", "GiB", "-8GiB", "0GiB", "0.1B", "8 TokenS per row", "0 tokens", "1.5 tokens", "8PiB", "1.2.3GB", "50%"),
    *(".GB", ".", "..GB", ". tokens", "1e3 tokens", "8GiB 20000 tokens"),
    *([8], {"tokens": 8}, 8j),
]


@pytest.mark.parametrize("value", IMPOSSIBLE_MEMORY, ids=repr)
def test_an_impossible_kv_memory_names_itself_and_what_is_possible(value):
    with pytest.raises(ValueError, match=r"fraction.*bytes.*'8GiB'.*'20000 tokens'") as caught:
        WrapConfig(kv_memory=value)
    assert str(caught.value).startswith(f"kv_memory={value!r}: ")


@settings(derandomize=True, deadline=None)
@given(st.text(alphabet="0123456789. GMKiBtokens-", max_size=12))
def test_any_string_is_read_or_refused_in_words(text):
    try:
        memory = parse_kv_memory(text)
    except ValueError as caught:
        error = str(caught)
    else:
        assert memory is not None
        (given_value,) = [value for value in dataclasses.astuple(memory) if value is not None]
        assert given_value > 0
        return
    assert error.startswith(f"kv_memory={text!r}: ")


NO_COUNTS: list[Any] = [0, -1, 1.0, "16", True]
IMPOSSIBLE: dict[str, tuple[list[Any], str]] = {
    "page_size": ([*NO_COUNTS, None], "must be a positive integer"),
    "max_batch_size": ([*NO_COUNTS, None], "must be a positive integer"),
    "workspace_bytes": (NO_COUNTS, "must be a positive integer"),  # None is what prefill needs
    "graph_memory": ([0, -1, True, 0.5, "", "8", "8 tokens", "0GiB", "GiB", [8]], r"bytes as an int.*'512MiB'"),
    "max_graphs": ([*NO_COUNTS, 1], r"at least 2: a step may replay a decode step and a prefill"),
    "mode": (
        ["", "Eager", "max-autotune", None, 1, ["eager"]],
        r"choose one of 'eager', 'compile', .*'cuda-graphs', 'piecewise'",
    ),
    "progress": (["yes", None, 1.0], "must be True or False"),
    "fuse_projections": (["yes", 1, 0.0], "must be True, False or None"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_value_names_itself_and_what_is_possible(name):
    values, possible = IMPOSSIBLE[name]
    for value in values:
        with pytest.raises(ValueError, match=possible) as caught:
            WrapConfig(**{name: value})
        assert str(caught.value).startswith(f"{name}={value!r}: ")


@pytest.mark.parametrize(
    ("value", "nbytes"), [(None, None), (1, 1), ("512MiB", 2**29), (" 1.5 GB ", 1_500_000_000), ("100B", 100)]
)
def test_graph_memory_is_bytes(value, nbytes):
    assert WrapConfig(graph_memory=value, max_graphs=2).graph_budget == (nbytes, 2)


@pytest.mark.parametrize("mode", ["eager", "compile", "reduce-overhead"])
@pytest.mark.parametrize("option", [{"graph_memory": "1GiB"}, {"max_graphs": 8}], ids=str)
def test_only_recorded_graphs_can_be_bounded(mode, option):
    (name,) = option
    with pytest.raises(
        ValueError, match=f"only mode='cuda-graphs' and mode='piecewise' capture.*; leave {name} out"
    ) as caught:
        WrapConfig(mode=mode, **option)
    assert str(caught.value).startswith(f"{name}={option[name]!r} with mode={mode!r}: ")


def test_projections_are_fused_on_cuda_unless_told_otherwise():
    assert [WrapConfig().fuses_on(device) for device in ("cuda", "cpu")] == [True, False]
    for wanted in (True, False):
        assert [WrapConfig(fuse_projections=wanted).fuses_on(device) for device in ("cuda", "cpu")] == [wanted] * 2
        assert not WrapConfig(fuse_projections=wanted, mode="eager").fuses_on("cuda")


def test_an_unknown_option_is_refused_with_those_that_exist():
    with pytest.raises(TypeError, match=r"no option 'batch_size'") as caught:
        WrapConfig.from_options({"batch_size": 4})
    for field in dataclasses.fields(WrapConfig):
        assert field.name in str(caught.value)


def test_options_cannot_change_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        WrapConfig().page_size = 8  # type: ignore[misc]


# ---- from kv_memory to pages; the null page comes on top


def bytes_of_a_page(page_size: int, dtype: torch.dtype = torch.float32) -> int:
    return page_bytes(kv_cache_specs(LAYERS, page_size, dtype, BACKEND))


def pages(max_positions: int = 4096, **options: Any) -> int:
    config = WrapConfig(**options)
    return pages_to_allocate(config, bytes_of_a_page(config.page_size), CPU, max_positions)


def test_a_page_takes_keys_and_values_of_all_layers():
    assert bytes_of_a_page(16) == 16 * 2 * (2 * 16 + 2 * 16 + 1 * 32) * 4
    assert bytes_of_a_page(5, torch.bfloat16) == 5 * 2 * (2 * 16 + 2 * 16 + 1 * 32) * 2


@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (16, 1), (17, 2), (20000, 1250)])
def test_tokens_are_rounded_up_to_pages(tokens, count):
    assert pages(kv_memory=f"{tokens} tokens") == count + 1


@pytest.mark.parametrize("page_size", [1, 16])
def test_bytes_are_rounded_down_to_pages(page_size):
    one = bytes_of_a_page(page_size)
    assert pages(kv_memory=one, page_size=page_size) == 2
    assert pages(kv_memory=10 * one - 1, page_size=page_size) == 10
    assert pages(kv_memory=f"{10 * one} B", page_size=page_size) == 11


def test_states_of_recurrent_layers_are_part_of_the_memory_unless_it_counts_tokens() -> None:
    one, states = bytes_of_a_page(16), 12_345_678
    for memory, count in ((10 * one + states, 10), ("160 tokens", 10)):
        assert pages_to_allocate(WrapConfig(kv_memory=memory), one, CPU, 4096, states=states) == count + 1
    for memory in (states + one - 1, states, 1, 1e-9):
        with pytest.raises(
            ValueError, match=r"holds no page.*, states of recurrent layers 11\.8 MiB, .*max_batch_size"
        ):
            pages_to_allocate(WrapConfig(kv_memory=memory), one, CPU, 4096, states=states)
    for memory, count in ((1 << 20, 8), (1 << 30, 100), (1, 4), ("160 tokens", 100), (1.0, 100), (1e-12, 4)):
        assert states_to_allocate(WrapConfig(kv_memory=memory), 1 << 16, CPU, wanted=100, least=4) == count, memory
    with pytest.raises(ValueError, match=r"leave no room for states of recurrent layers, which take 1048576\.0 GiB"):
        pages_to_allocate(WrapConfig(kv_memory="160 tokens"), one, CPU, 4096, states=2**50)


def test_a_fraction_is_of_what_is_free_and_at_most_what_rows_can_use(monkeypatch):
    one = bytes_of_a_page(16)
    monkeypatch.setattr(kv_cache, "free_bytes", lambda device: 1000 * one)
    assert pages(kv_memory=0.5) == 501
    assert pages(kv_memory=1.0) == 1001
    assert pages() == 251, "a quarter by default on a CPU"
    assert pages(kv_memory=1.0, max_batch_size=2, max_positions=100) == 2 * 7 + 1
    assert pages(max_batch_size=1, max_positions=16) == 2


@pytest.mark.parametrize("memory", [10, "10 B", 1e-12])
def test_memory_for_no_page_is_refused_with_the_numbers(memory, monkeypatch):
    one = bytes_of_a_page(16)
    monkeypatch.setattr(kv_cache, "free_bytes", lambda device: 12345678)
    with pytest.raises(ValueError, match="page_size") as caught:
        pages(kv_memory=memory)
    assert f"kv_memory={memory!r}" in str(caught.value)
    assert f"takes {one / 2**10:.1f} KiB" in str(caught.value)
    assert "11.8 MiB are free on cpu" in str(caught.value)
    assert ("an int is bytes" in str(caught.value)) == (not isinstance(memory, float))


def test_free_memory_of_this_machine_is_positive():
    assert kv_cache.free_bytes(CPU) > 0


def test_the_old_name_of_a_mode_is_answered_by_the_new_one() -> None:
    with pytest.raises(ValueError, match="'pieces' is called 'piecewise'"):
        WrapConfig(mode="pieces")  # type: ignore[arg-type]
