"""Uploads copy what arrays hold, however these lie in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from compiled_llm.execution.state import staging as module
from compiled_llm.execution.state.staging import Staging

CPU = torch.device("cpu")


class _Event:
    """What is copied on a CPU is done at once."""

    def synchronize(self) -> None: ...

    def record(self) -> None: ...


@pytest.fixture(params=["at once", "through areas"])
def staging(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Staging:
    """As on a CPU, and with the areas that a GPU's copies go through, which nothing can pin here."""
    made = Staging(CPU)
    if request.param == "through areas":
        monkeypatch.setattr(module, "_pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
        made._events = [_Event()] * len(made._areas)  # type: ignore[list-item]
    return made


def arrays(seed: int) -> list[NDArray[Any]]:
    """Items next to each other, columns of a matrix, every other item, from the end, one item many times, none."""
    numbers = np.random.default_rng(seed).integers(0, 2**31, (6, 5), dtype=np.int64)
    return [
        numbers[0],
        numbers[:, 1],
        np.nonzero(numbers > 0)[1][:8],
        numbers.astype(np.int32).T[2],
        (numbers > 2**30)[:, 0],
        numbers[0, ::2],
        numbers[3, ::-1],
        np.broadcast_to(numbers[0, :1], (4,)),
        numbers[:0, 0],
    ]


def test_arrays_of_any_strides_arrive(staging: Staging, seed: int) -> None:
    given = arrays(seed)
    for found, array in zip(staging.to_device(given), given, strict=True):
        assert found.numpy().dtype == array.dtype
        np.testing.assert_array_equal(found.numpy(), array)


def test_arrays_of_any_strides_fill_the_beginning_of_a_buffer(staging: Staging, seed: int) -> None:
    given = arrays(seed)
    targets = [torch.full((9,), 1, dtype=torch.from_numpy(array.copy()).dtype) for array in given]
    staging.upload(list(zip(given, targets, strict=True)))
    for target, array in zip(targets, given, strict=True):
        np.testing.assert_array_equal(target.numpy(), np.append(array, np.ones(9 - len(array), array.dtype)))


def test_what_is_uploaded_is_a_copy(staging: Staging, seed: int) -> None:
    array = np.arange(5)
    (there,) = staging.to_device([array])
    array[:] = 0
    assert there.tolist() == [0, 1, 2, 3, 4]


def test_uploads_of_all_sizes_arrive(staging: Staging) -> None:
    """More than areas there are, each larger than those before, and some larger than an area may be."""
    for number in range(2 * module.AREAS):
        array = np.arange(number, number + 1000 * (number + 1))
        (there,) = staging.to_device([array])
        np.testing.assert_array_equal(there.numpy(), array)
    (large,) = staging.to_device([np.arange(300_000)])
    assert large.tolist() == list(range(300_000))
    assert sum(len(area.bytes) for area in staging._areas) <= module.AREAS * module._LARGEST
