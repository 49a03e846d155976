"""Parts whose routes nobody has asked for are not imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

UNUSED = """
import sys
import compiled_llm, compiled_llm.engine.engine, compiled_llm.server.app
from compiled_llm.server.settings import ApiServerSettings
from compiled_llm.server.app import application
application(ApiServerSettings(names=["a"]), None)
late = ("decision", "server.pooling")
print([name for name in sys.modules if any(part in name for part in late) and "decision_transformer" not in name])
"""


@pytest.mark.whole
def test_nothing_of_it_is_imported_before_it_is_used() -> None:
    run = subprocess.run([sys.executable, "-c", UNUSED], capture_output=True, text=True, check=True)
    assert run.stdout.strip().splitlines()[-1] == "[]"
