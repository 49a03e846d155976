"""An engine process keeps the profile of what its requests use, and the next one begins with it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from compiled_llm.client import Client
from compiled_llm.compilation.artifacts.profile import Profile
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.execution.lifecycle.runtime import Runtime
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.server.engine_process.kept_profile import KeptProfile
from support.server.engine_processes import PATIENCE, started_engine_process

OPTIONS = (
    "--mode",
    "compile",
    "--no-eager-first",
    "--warmup",
    "1",
    "--max-num-seqs",
    "8",
    "--kv-memory",
    "20000 tokens",
)


class Used:
    """The runtime of a model whose requests use steps."""

    def __init__(self) -> None:
        self.asleep, self.saved = False, 0
        self.failure: Exception | None = None
        self.warming = SimpleNamespace(uses=0)

    def save_profile(self, path: Path) -> None:
        if self.failure is not None:
            raise self.failure
        self.saved += 1


def test_it_is_saved_when_a_step_was_used_and_the_model_is_awake(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    used, kept = Used(), KeptProfile(tmp_path / "profile")
    kept.save()  # before there is a model
    kept.begin(cast(Runtime, used))
    kept.save()
    assert used.saved == 0
    used.warming.uses, used.asleep = 3, True
    kept.save()
    assert used.saved == 0
    used.asleep = False
    for failure in (OSError("the disk is full"), RuntimeError("the model is asleep")):
        used.failure = failure
        kept.save()
        assert f"the profile could not be saved at {tmp_path / 'profile'}: {failure}" in caplog.text
    used.failure = None
    for _ in range(2):
        kept.save()
    assert used.saved == 1


def test_it_is_saved_again_and_again() -> None:
    used, kept = Used(), KeptProfile(Path("profile"), period=0.001)
    kept.begin(cast(Runtime, used))

    async def use() -> None:
        saving = asyncio.create_task(kept.run())
        for uses in (1, 2, 3):
            used.warming.uses = uses
            while used.saved < uses:
                await asyncio.sleep(0.001)
        saving.cancel()

    asyncio.run(asyncio.wait_for(use(), PATIENCE))
    assert used.saved == 3


@contextmanager
def ended(folder: Path, path: Path, profile: Path) -> Iterator[Client]:
    """An engine process with a profile, which is told to end."""
    with started_engine_process(folder, path, *OPTIONS, "--profile", str(profile)) as process:
        with Client(path) as client:
            yield client
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, error


@pytest.mark.slow
@pytest.mark.whole
def test_the_next_engine_process_prepares_what_the_last_one_used(
    model_folder: Path, path: Path, tmp_path: Path
) -> None:
    profile, prompts = tmp_path / "profile", [[3, 4, 5]]
    params: Any = SamplingParams(temperature=0.0, max_tokens=12, n=3)
    with ended(model_folder, path, profile) as client:
        (expected,) = client.generate(prompts, params)
        assert client.stats().cold_starts > 0
    saved = Profile.read(profile)
    of_four = StepKey.decode(4)
    assert saved.uses[of_four] > 0
    with ended(model_folder, path, profile) as client:
        (again,) = client.generate(prompts, params)
        assert client.stats().cold_starts == 0
    assert [answer.token_ids for answer in again.outputs] == [answer.token_ids for answer in expected.outputs]
    assert Profile.read(profile).uses[of_four] == saved.uses[of_four] + saved.uses[of_four] // 2
