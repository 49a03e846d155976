"""Writes artifacts for a contender of this package; see `compiled_llm.commands.bench.startup`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from compiled_llm.commands.bench.contenders import choose
from compiled_llm.commands.bench.contenders.ours import Ours
from compiled_llm.commands.bench.local import setup_of
from compiled_llm.commands.compile import Prepared, write_artifacts


def main() -> None:
    """Compile for the rows of the workload that the job names."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # stdout is for the answer alone
    job = json.loads(sys.argv[1])
    setup = setup_of(job)
    (contender,) = choose(job["contender"], setup.device.type)
    assert isinstance(contender, Ours), contender.name
    options = {"mode": contender.mode, "backend": contender.backend, "progress": False}
    rows = max(work.batch for work in setup.workloads)
    write_artifacts(Path(job["artifacts"]), lambda: (setup.model(), None), options, Prepared(rows, [rows], None))
    answers.write(json.dumps({"mark": "written"}) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
