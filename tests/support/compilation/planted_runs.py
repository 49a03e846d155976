"""Models that are changed while their programs are kept: what they say is what HuggingFace says of a changed one.

Run in a process of its own, it makes each change in a fork of it, before a model is wrapped, and prints JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from torch import fx

import compiled_llm
from compiled_llm.compilation import backend
from compiled_llm.compilation.kept import part
from compiled_llm.compilation.tracing.layer_marks import fill
from compiled_llm.kinds.refusals import UnsupportedModelError
from support.compilation.kept_programs import taking
from support.compilation.planted_changes import PLANTED, Planted
from support.compilation.reading import READ, Make, reading_model
from support.parity import FEW_PAGES, greedy, mixed_prompts


def planted_in_each(planted: Planted) -> Make:
    return lambda stack, *models: [planted.make(stack, model) for model in models]


CHANGES: dict[str, Make] = {
    **READ,
    **{name: planted_in_each(planted) for name, planted in PLANTED.items()},
}
NEW_TOKENS = 4


def answer(model: Any) -> list[list[int]]:
    return greedy(model, mixed_prompts([7, 3], 128, seed=0), NEW_TOKENS, pad_token_id=0).tolist()


def keep(folder: Path) -> None:
    """Keep prefill and decode of two rows of the model whose activation reads; other tests have most kernels, too."""
    with part.recording(folder):
        answer(compiled_llm.wrap(reading_model(), **FEW_PAGES))


@contextmanager
def graphs_run() -> Iterator[None]:
    """Let traced graphs run as they are, since to compile them would take longer."""

    def run(self: object, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        fill(module.graph)
        module.recompile()
        return module.forward

    with mock.patch.object(backend.Inductor, "__call__", run):
        yield


def before_wrap(make: Make) -> dict[str, Any]:
    """Make a change, wrap a model, and answer; return what is said, and how programs were made."""
    model, plain = reading_model(), reading_model()
    with ExitStack() as stack, graphs_run():
        make(stack, model, plain)
        try:
            return compared(compiled_llm.wrap(model, **FEW_PAGES), plain)
        except UnsupportedModelError as error:  # a change may leave no model that can be wrapped
            return {"expected": "", "said": type(error).__name__, "programs": {}}


def compared(model: Any, plain: Any) -> dict[str, Any]:
    return {"expected": _said(plain), "said": _said(model), "programs": model.compiled.stats().programs}


def _said(model: Any) -> list[list[int]] | str:
    try:
        return answer(model)
    except Exception as error:  # any: a change may leave no model that runs
        return type(error).__name__


def main(folder: str, *names: str) -> None:
    for name in names:
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.close(reading)
            with os.fdopen(writing, "w") as file, taking(Path(folder)):
                file.write(json.dumps(before_wrap(CHANGES[name])))
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as file:
            print(json.dumps([name, json.loads(file.read() or "null")]), flush=True)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
