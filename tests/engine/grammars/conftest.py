"""An engine whose tokens are texts, and the worker process that compiles grammars."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from transformers import PreTrainedModel

from compiled_llm.engine.engine import Engine
from support.engine.text_tokenizers import byte_level
from support.engine.tiny_engines import tiny, wrapped
from support.parity import assert_account_is_empty

if TYPE_CHECKING:
    from compiled_llm.engine.grammars.worker_process import WorkerProcess


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return wrapped(plain=tiny(eos_token_id=1, vocab_size=380))


@pytest.fixture
def engine(model: PreTrainedModel) -> Iterator[Engine]:
    with Engine(model, tokenizer=byte_level()) as engine:
        yield engine
    assert_account_is_empty(model)


@pytest.fixture
def worker() -> Iterator[WorkerProcess]:
    """One that an engine may take, and close."""
    with _started() as process:
        yield process


@pytest.fixture(scope="module")
def lasting_worker() -> Iterator[WorkerProcess]:
    """One for a file: to start one takes half a second of a core."""
    with _started() as process:
        yield process


@contextmanager
def _started() -> Iterator[WorkerProcess]:
    from compiled_llm.engine.grammars.worker_process import WorkerProcess  # a part that can be taken out

    process = WorkerProcess()
    yield process
    process.close()
    assert not Path(f"/proc/{process.pid}").exists()
