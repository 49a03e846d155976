from __future__ import annotations

import pytest

from compiled_llm.commands import preparation
from compiled_llm.commands.generate.run import GenerateRequest
from compiled_llm.commands.options.sampling import SamplingFlags
from compiled_llm.commands.preparation import Preparation
from compiled_llm.config import WrapConfig
from compiled_llm.execution.reporting.stats import Stats
from compiled_llm.requests.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("compiled", "stats", "said"),
    [
        (2, Stats(graphs=2), "2 graphs compiled in 0 s, and kept for the next start"),
        (0, Stats(graphs=1), "1 graph traced in 0 s, and code taken from the cache"),
        (0, Stats(), "nothing compiled"),
        (
            1,
            Stats(graphs=3, recompiles=1, cudagraph_skips=2),
            "3 graphs compiled in 0 s, and kept for the next start, 1 recompiles, 2 cudagraph skips",
        ),
    ],
)
def test_the_last_line_says_what_was_compiled_and_whether_it_is_kept(
    compiled: int, stats: Stats, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    so_far = iter([7, 7 + compiled])
    monkeypatch.setattr(preparation, "_compiled_so_far", lambda: next(so_far))
    with Preparation() as block:
        pass
    assert block.figures(stats) == said


def test_on_a_cpu_the_command_and_wrap_share_their_code() -> None:
    """Sizes of tables are constants of the programs, and so are part of the keys in Inductor's cache."""
    options = {"mode": "cuda-graphs", "backend": "auto", "dtype": "auto", "device": "auto", "model": "demo"}
    call = {"prompt": "Hi", "chat": False, "system": None, "max_new_tokens": 1, "stop": (), "as_json": False}
    request = GenerateRequest(**call, **options, sampling=SamplingFlags(), quiet=False)
    assert request.wrap_config("cpu") == WrapConfig()
    assert request.wrap_config("cuda") == WrapConfig(max_batch_size=1)


@pytest.mark.parametrize("flag", ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"])
def test_one_option_of_sampling_is_enough_to_draw(flag: str) -> None:
    assert SamplingFlags(**{flag: 1}).options()["do_sample"]  # type: ignore[arg-type]
    assert not SamplingFlags().options()["do_sample"]
    assert SamplingFlags().params(8, []) == SamplingParams(temperature=0.0, max_tokens=8)
    assert SamplingFlags(top_p=0.9, seed=1).params(8, ["."]) == SamplingParams(
        temperature=1.0, top_p=0.9, seed=1, max_tokens=8, stop=["."]
    )
