"""Who watches the steps of a model: one file each, and a line here."""

from __future__ import annotations

from importlib import import_module

from compiled_llm.config import WrapConfig
from compiled_llm.execution.state.runner_tap import RunnerTap

TAPS = {
    "check_pages": "compiled_llm.execution.taps.page_check",
}
"""The modules that have one, as ``TAP``, by the option of ``wrap`` that asks for it."""


def taps_of(config: WrapConfig) -> list[type[RunnerTap]]:
    """Return the taps that a config asks for; ValueError if one is not there."""
    asked = ["check_pages"] if config.checks_pages else []
    for option in asked:
        if option not in TAPS:
            raise ValueError(f"{option}={getattr(config, option)!r}: this installation has no such tap; leave it out")
    return [import_module(TAPS[option]).TAP for option in asked]
