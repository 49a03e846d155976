"""Who watches the steps of a model: one file each, or one a layer, and a line here."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from compiled_llm.config import WrapConfig
from compiled_llm.execution.state.runner_tap import RunnerTap

TAPS = {
    "check_pages": ["compiled_llm.execution.taps.page_check"],
    "logprobs": ["compiled_llm.engine.logprobs.tap"],
    "hidden_states": ["compiled_llm.engine.emitted", "compiled_llm.huggingface.emitted"],
}
"""The modules of each, by the option that asks for it: one in each layer that has a part, as ``TAP``."""


@cache
def parts_in(layer: str) -> dict[str, Any]:
    """Return the parts of taps in a layer, by option."""
    modules = ((option, module) for option, modules in TAPS.items() for module in modules)
    return {option: import_module(module).TAP for option, module in modules if module.split(".")[1] == layer}


def part_in(layer: str, option: str) -> Any:
    """Return what an option asks for; ValueError if it is not there."""
    if option not in parts_in(layer):
        raise ValueError(f"{option}: this installation gives none; leave it out")
    return parts_in(layer)[option]


def taps_of(config: WrapConfig) -> list[type[RunnerTap]]:
    """Return the taps that a config asks for; ValueError if one is not there."""
    return [part_in("execution", "check_pages")] if config.checks_pages else []
