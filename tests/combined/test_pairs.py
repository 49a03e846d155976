"""Features in random pairs and triples: each answer is that of the model alone, whatever meets.

For an hour on a CPU, and 400 engines on a GPU, in ten processes; each failure is printed with its seed:

    pytest tests/combined --fuzz-seconds 3600 --fuzz-seed 10000 -s
    for n in $(seq 0 9); do pytest tests/combined -m gpu --fuzz-cases 40 --fuzz-seed $((40 * n)) -s & done; wait
"""

from __future__ import annotations

import pytest

from compiled_llm.engine.steps.loop import Loop
from compiled_llm.execution.cascade import cascade as cascades
from compiled_llm.execution.drafts import part
from support.combined.case import Cases
from support.execution.drafters import Turning
from support.fuzzing.fuzz import quiet, seeds_from

pytestmark = pytest.mark.timeout(0)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short texts have what long ones have: runs that are shared, and drafts in most steps."""
    monkeypatch.setattr(cascades, "LEAST_KEYS", 8)
    monkeypatch.setattr(part, "Rule", lambda *_: Turning([4, 4, 1, 4]))


@pytest.mark.usefixtures("one_thread", "often", "without_inductor")
def test_features_meet(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "asynchronous", property(lambda _: True))  # steps are read one late, as on CUDA
    play(request, gpu=False, on_a_model=2, cases=4)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.usefixtures("often")
def test_features_meet_on_a_gpu(request: pytest.FixtureRequest) -> None:
    play(request, gpu=True, on_a_model=10, cases=20)


def play(request: pytest.FixtureRequest, gpu: bool, on_a_model: int, cases: int) -> None:
    option = request.config.getoption
    first = 1000 * option("--seed") if option("--fuzz-seed") is None else option("--fuzz-seed")
    count, seconds = option("--fuzz-cases"), option("--fuzz-seconds")
    played = Cases(gpu, on_a_model)
    with quiet():
        for seed in seeds_from(first, cases if count is None and not seconds else count, seconds):
            played.try_seed(seed)
    print(played)
    assert not played.faults, "\n\n".join(played.faults)
