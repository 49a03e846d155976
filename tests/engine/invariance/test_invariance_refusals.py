"""What `batch_invariant=True` cannot be wrapped with, and says so before anything is allocated."""

from __future__ import annotations

from typing import Any

import pytest

from compiled_llm.config import WrapConfig
from compiled_llm.kinds.refusals import UnsupportedModelError
from support.engine.invariant_answers import invariant
from support.engine.random_requests import of_8_bits, of_16_bits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "eager"}, "batch_invariant=True with mode='eager': PyTorch's own kernels"),
        ({"cascade": True}, "batch_invariant=True with cascade=True"),
        ({"eager_first": True}, "batch_invariant=True with eager_first=True"),
        ({"backend": "flashinfer"}, "batch_invariant=True with backend='flashinfer'"),
        ({"backend": "reference"}, "batch_invariant=True with backend='reference'"),
        ({"batch_invariant": 1}, "batch_invariant=1: must be True or False"),
    ],
    ids=str,
)
def test_options_that_do_not_go_with_it(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        WrapConfig(**{"batch_invariant": True, **options})


def test_its_backend_is_not_chosen_by_name() -> None:
    with pytest.raises(ValueError, match=r"^backend='invariant': choose one of"):
        WrapConfig(backend="invariant")


def test_quantised_weights() -> None:
    with pytest.raises(UnsupportedModelError, match=r"^wrap: batch_invariant=True: model\.\S+ is quantised"):
        invariant(of_8_bits())


def test_packed_weights() -> None:
    with pytest.raises(UnsupportedModelError, match=r"^wrap: model\.\S+ is a torch\.ao\.\S+, whose packed weight"):
        invariant(of_16_bits())
