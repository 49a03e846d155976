"""Cases that a run leaves out: deselected and counted, since thousands that are skipped take half a minute."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest

from support.drawing import not_drawn, other_ways


class LeftOut:
    """A pytest plugin. Its marks are ``gpu``, ``whole``, ``drawn`` and ``either``.

    If nothing else is asked for, cases are skipped instead: the one who named them learns why they do not run.
    """

    def __init__(self, device: bool, whole: bool, seed: int, most: int | None = None) -> None:
        """``most``: so many cases of each test, with values of its parameters that differ; all if None."""
        self.device, self.whole, self.seed, self.most = device, whole, seed, most
        self.counts: Counter[str] = Counter()

    @pytest.hookimpl(trylast=True)  # after `-k`: one case alone is drawn
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        reasons = self.reasons(items)
        if len(reasons) == len(items):
            for item, reason in reasons.items():
                item.add_marker(pytest.mark.skip(reason=reason))
            return
        items[:] = [item for item in items if item not in reasons]
        self.counts.update(reasons.values())
        config.hook.pytest_deselected(items=list(reasons))
        if hasattr(config, "workeroutput"):
            config.workeroutput["left_out"] = dict(self.counts)

    def reasons(self, items: list[pytest.Item]) -> dict[pytest.Item, str]:
        """Return why cases are left out, the same ones in each worker of ``pytest -n``."""
        found = {}
        for item in items:
            if item.get_closest_marker("gpu") and not self.device:
                found[item] = "need a CUDA device"
            elif item.get_closest_marker("whole") and not self.whole:
                found[item] = "need --whole"
        if not self.whole:
            reason = f"were not drawn with --seed {self.seed} and need --whole"
            for undrawn in (partial(not_drawn, most=self.most), other_ways):
                others = [item for item in items if item not in found]
                found.update(dict.fromkeys(undrawn(others, self.seed), reason))
        return found

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a worker of ``pytest -n`` has left out: each has collected all cases."""
        self.counts = Counter(getattr(node, "workeroutput", {}).get("left_out", self.counts))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for reason, count in self.counts.most_common():
            terminalreporter.line(f"LEFT OUT [{count}] {reason}")
