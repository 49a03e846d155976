"""When prefill is faster by FlashInfer's kernels for Hopper, and which processes have them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compiled_llm_ops import Geometry
from compiled_llm_ops.contracts.devices import device_of
from compiled_llm_ops.flashinfer import backend, hopper, prebuilt
from compiled_llm_ops.flashinfer.hopper import FA3, worth_fa3
from compiled_llm_ops.flashinfer.splitting import SPLIT, WHOLE, worth_splitting

PROCESSORS = 132
DEVICE = torch.device("cuda", 0)
BEFORE = (0, 512, 2048, 8192)
ALONE = {
    16: {
        16: ((5.3, 9.2, 5.5), (15.5, 10.7, 12.2), (45.0, 12.4, 32.3), (162.3, 23.0, 113.0)),
        64: ((5.8, 10.5, 5.5), (20.0, 14.5, 12.3), (62.6, 16.2, 32.4), (235.2, 26.5, 113.3)),
        128: ((7.7, 14.1, 6.9), (21.8, 17.1, 13.8), (64.5, 22.4, 34.4), (237.5, 40.6, 114.0)),
        256: ((11.4, 21.9, 8.7), (25.4, 22.6, 15.4), (67.8, 32.2, 35.5), (239.7, 67.8, 114.0)),
        512: ((18.3, 32.0, 12.1), (32.2, 37.8, 18.9), (74.6, 55.4, 38.4), (247.6, 125.8, 116.0)),
        1024: ((32.9, 69.7, 19.3), (47.7, 82.6, 26.6), (90.6, 118.0, 46.9), (273.2, 263.3, 130.3)),
        2048: ((99.2, 117.1, 57.1), (124.1, 140.6, 72.4), (197.3, 215.0, 117.4), (479.4, 497.2, 281.0)),
    },
    32: {
        64: ((6.1, 11.5, 5.8), (20.3, 17.2, 12.1), (63.3, 22.5, 32.4), (237.3, 40.8, 111.5)),
        128: ((7.9, 14.8, 7.0), (22.1, 22.7, 13.9), (64.6, 32.3, 34.0), (237.7, 67.8, 113.2)),
        256: ((11.4, 31.6, 9.1), (25.8, 36.1, 15.6), (68.8, 53.9, 35.6), (244.8, 124.5, 114.4)),
        512: ((19.1, 59.6, 13.0), (33.1, 70.3, 19.8), (76.1, 105.6, 40.3), (256.2, 251.9, 123.0)),
        1024: ((53.5, 68.8, 34.5), (78.2, 93.4, 49.3), (148.8, 166.1, 90.5), (432.7, 448.4, 255.0)),
        2048: ((161.0, 195.3, 89.7), (212.3, 244.4, 122.3), (372.5, 401.6, 208.2), (941.0, 970.6, 541.9)),
    },
}
"""Microseconds of one attention on an H100, in a graph, without and with keys shared among blocks, and by fa3: by
query heads and new tokens of one row, each for the tokens before these."""
BESIDE = [
    (16, 8, 300, 128, (15.7, 17.7, 17.6)),
    (16, 8, 300, 1024, (54.2, 64.3, 36.0)),
    (16, 32, 300, 128, (27.4, 31.6, 35.2)),
    (16, 64, 1000, 512, (123.4, 133.4, 146.5)),
    (32, 8, 300, 128, (16.2, 19.0, 27.4)),
    (32, 8, 300, 1024, (65.3, 84.0, 54.0)),
    (32, 32, 1000, 512, (83.0, 96.4, 148.9)),
    (32, 64, 1000, 1024, (167.6, 179.8, 316.0)),
]
"""The same of rows that decode with so many keys, beside a prompt of so many tokens."""


def heads(query_heads: int, **changed: Any) -> Geometry:
    return Geometry(query_heads, 8, 128, 16, -1, 0.0, torch.bfloat16, torch.bfloat16)._replace(**changed)


def chosen(geometry: Geometry, queries: list[int], lengths: list[int]) -> int:
    if worth_fa3(geometry, queries, lengths, PROCESSORS):
        return FA3
    return SPLIT if worth_splitting(geometry, queries, lengths, PROCESSORS) else WHOLE


@pytest.mark.parametrize(
    ("query_heads", "new", "before", "us"),
    [
        (query_heads, new, before, us)
        for query_heads, times in ALONE.items()
        for new, row in times.items()
        for before, us in zip(BEFORE, row, strict=True)
    ],
)
def test_the_fastest_kernels_are_taken_for_one_row(
    query_heads: int, new: int, before: int, us: tuple[float, float, float]
) -> None:
    assert us[chosen(heads(query_heads), [new], [before + new])] <= 1.2 * min(us)


@pytest.mark.parametrize(("query_heads", "rows", "keys", "new", "us"), BESIDE)
def test_rows_that_decode_stay_where_heads_share_a_block(
    query_heads: int, rows: int, keys: int, new: int, us: tuple[float, float, float]
) -> None:
    assert us[chosen(heads(query_heads), [1] * rows + [new], [keys] * rows + [new])] <= 1.15 * min(us)


def test_a_window_bounds_what_a_block_goes_over() -> None:
    assert chosen(heads(16), [256], [30_000]) == SPLIT
    assert chosen(heads(16, window_left=512), [256], [30_000]) == FA3


# ---- which processes have them


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A Hopper GPU, and FlashInfer's modules that name, find and build kernels."""
    built: list[str] = []

    def spec(*module: Any) -> SimpleNamespace:
        def build(verbose: bool) -> None:
            built.append(name_of(*module))

        return SimpleNamespace(build=build)

    def name_of(*module: Any) -> str:
        return "_".join(str(part) for part in module)

    modules = {
        "flashinfer.jit.attention.modules": SimpleNamespace(
            get_batch_prefill_uri=name_of, gen_batch_prefill_module=spec
        ),
        "flashinfer.jit.env": SimpleNamespace(FLASHINFER_AOT_DIR=tmp_path / "aot", FLASHINFER_JIT_DIR=tmp_path / "jit"),
        "flashinfer.utils": SimpleNamespace(is_sm90a_supported=lambda device: True),
    }
    monkeypatch.setattr(hopper, "importlib", SimpleNamespace(import_module=modules.__getitem__))
    monkeypatch.setattr(prebuilt, "importlib", SimpleNamespace(import_module=modules.__getitem__))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(multi_processor_count=132, shared_memory_per_multiprocessor=228 * 1024),
    )
    monkeypatch.setattr(prebuilt, "_folders", [])
    monkeypatch.setattr(hopper, "find_nvcc", lambda: "nvcc")
    monkeypatch.setattr(hopper, "_builds", {})
    monkeypatch.setattr("os.setpriority", lambda *_: None)  # of this process, it would be for good
    caches = (hopper.has_kernels, hopper._was_built)
    for cache in caches:
        cache.cache_clear()
    yield SimpleNamespace(built=built, jit=tmp_path / "jit", modules=modules["flashinfer.jit.attention.modules"])
    for cache in caches:
        cache.cache_clear()


def put(folder: Path, geometry: Geometry) -> None:
    name = hopper._name(geometry)
    (folder / name).mkdir(parents=True)
    (folder / name / f"{name}.so").touch()


def best(*groups: Geometry) -> int:
    device_of.cache_clear()
    return backend.BACKEND.best_schedule(groups, [1024], [1024], DEVICE)


def test_a_process_uses_the_kernels_that_it_finds(installed: SimpleNamespace) -> None:
    put(installed.jit, heads(16))
    assert best(heads(16)) == FA3
    assert best(heads(16), heads(16, window_left=100)) == WHOLE, "those with windows are others"


def test_kernels_that_come_later_are_for_later_processes(installed: SimpleNamespace) -> None:
    assert best(heads(16)) == WHOLE
    hopper.build_for_later(heads(16), DEVICE)
    hopper.build_for_later(heads(32), DEVICE)
    hopper.wait_for_builds()
    assert len(installed.built) == 1, "heads are no part of a module"
    put(installed.jit, heads(16))
    assert best(heads(16)) == WHOLE
    hopper._was_built.cache_clear()  # as in another process
    assert best(heads(16)) == FA3


def test_a_process_that_was_given_kernels_builds_none(installed: SimpleNamespace, tmp_path: Path) -> None:
    put(tmp_path / "given", heads(16))
    prebuilt._folders.append(tmp_path / "given")
    assert best(heads(16)) == FA3
    hopper.build_for_later(heads(16, head_dim=64), DEVICE)
    assert not hopper._builds


@pytest.mark.parametrize(
    ("queries", "lengths", "taken"),
    [
        ([256], [256], False),
        ([400], [400], True),
        ([64], [576], True),
        ([200] * 4, [200] * 4, True),
        ([1], [400], False),
    ],
)
def test_short_prompts_stay_with_the_shorter_plan(
    installed: SimpleNamespace, queries: list[int], lengths: list[int], taken: bool
) -> None:
    put(installed.jit, heads(16))
    device_of.cache_clear()
    assert (backend.BACKEND.best_schedule([heads(16)], queries, lengths, DEVICE) == FA3) is taken


@pytest.mark.parametrize("changed", [{"head_dim": 512}, {"kv_dtype": torch.float8_e4m3fn}], ids=str)
def test_what_has_no_kernels_stays_with_fa2(installed: SimpleNamespace, changed: dict[str, Any]) -> None:
    put(installed.jit, heads(16, **changed))
    hopper.build_for_later(heads(16, **changed), DEVICE)
    assert best(heads(16, **changed)) == WHOLE
    assert not hopper._builds


def test_another_device_stays_with_fa2(installed: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    put(installed.jit, heads(16))
    assert best(heads(16)) == WHOLE


def test_without_a_compiler_nothing_is_built(installed: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "find_nvcc", lambda: None)
    hopper.build_for_later(heads(16), DEVICE)
    assert not hopper._builds


def test_a_build_that_fails_is_said_and_ends_nothing(
    installed: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("nvcc is missing")

    monkeypatch.setattr(installed.modules, "gen_batch_prefill_module", broken)
    hopper.build_for_later(heads(16), DEVICE)
    hopper.wait_for_builds()
    assert "nvcc is missing" in caplog.text
