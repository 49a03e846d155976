"""A model that is loaded here, to chat with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from compiled_llm.commands.chat.conversation import check_template
from compiled_llm.commands.importing import importing
from compiled_llm.commands.loading.source import Source
from compiled_llm.commands.preparation import Preparation
from compiled_llm.config import WrapConfig

if TYPE_CHECKING:
    from compiled_llm.engine.engine import Engine
    from compiled_llm.engine.metrics import EngineStats
    from compiled_llm.engine.thread.handle import RequestHandle
    from compiled_llm.requests.sampling_params import SamplingParams


class RunningOptions(NamedTuple):
    """How a model is run in this process: the options of the command."""

    mode: str
    backend: str
    dtype: str
    device: str
    quiet: bool

    def wrap_options(self, device: str) -> dict[str, Any]:
        """Return the options of ``wrap`` on a kind of device; those of ``compiled-llm generate``, to share its code."""
        rows = {"max_batch_size": 1} if device == "cuda" else {}
        return {"mode": self.mode, "backend": self.backend, "progress": not self.quiet, **rows}

    def wrap_config(self, device: str) -> WrapConfig:
        """Return the options of ``wrap`` on a kind of device, checked."""
        return WrapConfig.from_options(self.wrap_options(device))


class OwnModel:
    """A model in this process."""

    def __init__(self, name: str, engine: Engine, tokenizer: Any) -> None:
        """Let an engine answer that is ready."""
        self.name = name
        self.tokenizer = tokenizer
        self.max_tokens = engine.describe().max_tokens
        self._engine = engine

    def refresh(self) -> bool:
        """It stays what it is."""
        return False

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> RequestHandle:
        """Begin to answer token ids."""
        return self._engine.submit(prompt, params)

    def stats(self) -> EngineStats:
        """Return how the engine is doing."""
        return self._engine.stats()


@contextmanager
def own_model(source: Source, options: RunningOptions) -> Iterator[tuple[OwnModel, str]]:
    """Load a model, and compile what a chat needs; yield it, and what was compiled, in words.

    Args:
        source: where it is.
        options: how to run it.

    Raises:
        ValueError: the options do not fit the model or the machine, or there is no chat template.
        RuntimeError: the model cannot be loaded.
    """
    with importing(not options.quiet):
        import compiled_llm
        from compiled_llm.commands.loading.load import device_of, dtype_of, load
        from compiled_llm.model.checks import check_device

    device = device_of(options.device)
    check_device(device.type, dtype_of(options.dtype, device), options.wrap_config(device.type))
    loaded, tokenizer = load(source, options.dtype, device, progress=not options.quiet)
    check_template(tokenizer)
    model: Any = compiled_llm.wrap(loaded, **options.wrap_options(device.type))
    with compiled_llm.Engine(model, tokenizer=tokenizer, max_rows=1) as engine:
        with Preparation() as preparation:
            engine.warmup(1)
        yield OwnModel(source.name, engine, tokenizer), preparation.figures(model.compiled.stats())
