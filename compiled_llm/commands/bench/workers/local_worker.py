"""A contender of this environment at the end of a pipe, to time its start; see `compiled_llm.commands.bench.peer`."""

from __future__ import annotations

import json
import os
import sys
from typing import IO, Any


def main() -> None:
    """Load the contender and the model that the job names, then answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # stdout is for answers alone
    job = json.loads(sys.argv[1])

    from compiled_llm.commands.bench.contenders import choose
    from compiled_llm.commands.bench.local import setup_of

    _send(answers, {"mark": "imported"})
    setup = setup_of(job)
    (contender,) = choose(job["contender"], setup.device.type)
    with contender.opened(setup) as session:
        setup.synchronize()
        _send(answers, {"mark": "loaded"})
        for line in sys.stdin:
            _send(answers, _answer(session, json.loads(line), answers))


def _answer(session: Any, request: dict[str, Any], answers: IO[str]) -> dict[str, Any]:
    from compiled_llm.commands.bench.timing import TokenClock
    from compiled_llm.commands.bench.workload import Workload

    class Marker(TokenClock):
        def put(self, value: Any) -> None:
            super().put(value)
            if len(self.times) == 1:
                _send(answers, {"mark": "first token"})

    workload = Workload(request["batch"], request["prompt"], request["new"], request["sampled"] is not None)
    timing = session.run_with(Marker(), workload)
    return {"first": timing.first, "total": timing.total, "tokens": workload.batch * workload.new}


def _send(answers: IO[str], message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
