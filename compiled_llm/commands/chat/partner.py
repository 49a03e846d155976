"""The side that answers: a model in this process, or an engine process in another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_llm.commands.chat.conversation import check_template
from compiled_llm.commands.connecting import wait_until_ready
from compiled_llm.commands.importing import importing
from compiled_llm.commands.loading.source import Source
from compiled_llm.commands.options.running import RunningOptions
from compiled_llm.commands.preparation import Preparation
from compiled_llm.execution.reporting.progress import ProgressDisplay

if TYPE_CHECKING:  # Client needs the extra `server`
    from compiled_llm.client import Client
    from compiled_llm.engine.engine import Engine
    from compiled_llm.protocol.messages import Ready


@dataclass
class Partner:
    """A model that answers; ``max_tokens`` are those that a prompt may have with its answer."""

    engine: Engine | Client
    name: str
    tokenizer: Any
    max_tokens: int

    def refresh(self) -> bool:
        """Wait until it answers, take its attributes, and return whether it is another model than before."""
        return False


class ClientPartner(Partner):
    """An engine process in another process; if it has gone, the next question looks for its successor."""

    def __init__(self, client: Client, quiet: bool) -> None:
        """Wait until it is ready.

        Raises:
            EngineProcessError: there is none, or it does not want to talk to this client.
            ValueError: it has no tokenizer.
        """
        self.engine = self._client = client
        self._quiet = quiet
        self._ready: Ready | None = None
        self.refresh()

    def refresh(self) -> bool:
        before, ready = self._ready, wait_until_ready(self._client, self._quiet)
        if ready is not before:
            with ProgressDisplay(not self._quiet).task("loading the tokenizer"):
                self.tokenizer = self._client.tokenizer
            self.name, self.max_tokens, self._ready = ready.model, ready.max_tokens, ready
        return before is not None and ready != before


@contextmanager
def engine_process_partner(path: Path, quiet: bool) -> Iterator[Partner]:
    """Connect to an engine process for the block; raises as ``ClientPartner``."""
    from compiled_llm.client import Client

    with Client(path, tokenizer=True, wait=False) as client:
        yield ClientPartner(client, quiet)


@contextmanager
def own_model(source: Source, options: RunningOptions, say: Callable[[str], object]) -> Iterator[Partner]:
    """Load a model for the block, compile what a chat needs, and say what was compiled.

    Raises:
        ValueError: the options do not fit the model or the machine, or there is no chat template.
        RuntimeError: the model cannot be loaded.
    """
    with importing(not options.quiet):
        import compiled_llm
        from compiled_llm.commands.loading.load import load

    device = options.checked_device()
    loaded, tokenizer = load(source, options.dtype, device, progress=not options.quiet)
    check_template(tokenizer)
    model: Any = compiled_llm.wrap(loaded, **options.wrap_options(device.type))
    with compiled_llm.Engine(model, tokenizer=tokenizer, max_rows=1) as engine:
        with Preparation() as preparation:
            engine.warmup(1)
        say(preparation.figures(model.compiled.stats()))
        yield Partner(engine, source.name, tokenizer, engine.describe().max_tokens)
