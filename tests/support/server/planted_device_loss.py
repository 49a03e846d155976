"""``python planted_device_loss.py FILE serve ...`` is the command, whose steps fail as on CUDA once the file exists.

An API server that is started so starts its engine processes so.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from compiled_llm.__main__ import main

SCRIPT = str(Path(__file__))
ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported elsewhere"


def plant_in_steps(file: str) -> None:
    """Let a step fail once the file exists, which is gone then; and all later steps of the process."""
    import torch

    from compiled_llm.execution.model_runner import ModelRunner

    run, failed = ModelRunner.run, []

    def fails(*args: Any, **kwargs: Any) -> Any:
        if Path(file).exists():
            os.unlink(file)
            failed.append(file)
        if failed:
            raise torch.AcceleratorError(ILLEGAL)
        return run(*args, **kwargs)

    ModelRunner.run = fails  # type: ignore[method-assign]


def plant_in_engine_processes(file: str) -> None:
    """Have an API server start engine processes by this script."""
    from compiled_llm.server.engine_process.starter import EngineProcess

    begin: Any = EngineProcess.__init__

    def begin_planted(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        python, _, *arguments = self._arguments
        self._arguments = (python, SCRIPT, file, *arguments)

    EngineProcess.__init__ = begin_planted  # type: ignore[method-assign]


if __name__ == "__main__":
    del sys.path[0]  # of the tests
    _, planted, *sys.argv[1:] = sys.argv
    if "--leashed" in sys.argv or "--port" not in sys.argv:
        plant_in_steps(planted)
    else:
        plant_in_engine_processes(planted)
    main()
