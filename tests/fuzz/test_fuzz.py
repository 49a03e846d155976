"""Random calls on random tiny models: a wrapped model does what its unwrapped twin does, or refuses, and keeps no page.

``pytest tests/fuzz --fuzz-seconds=3600 --fuzz-seed=10000 -s`` goes on for an hour with other cases.
"""

from __future__ import annotations

import pytest

from support.fuzzing.fuzz import fuzz, seeds_from

PARTS = 3
CASES = 4
"""Of each part: CI runs the first, and ``--whole`` their sum."""


@pytest.mark.usefixtures("one_thread")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.whole) for part in range(1, PARTS))])
def test_a_wrapped_model_does_what_its_twin_does(part: int, request: pytest.FixtureRequest) -> None:
    option = request.config.getoption
    given = (option("--fuzz-seed"), option("--fuzz-cases"), option("--fuzz-seconds"))
    if part and any(given):
        pytest.skip("the first part runs the cases that are asked for")
    first = 1000 * option("--seed") + part * CASES if given[0] is None else given[0]
    count = given[1] if given[1] is not None else 0 if given[2] else CASES
    print(f"--fuzz-seed={first} --fuzz-cases={count}")
    print(fuzz(seeds_from(first, count, given[2]), option("--fuzz-steps"), option("--fuzz-mode")))
