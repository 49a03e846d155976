"""A contender of this environment at the end of a pipe, as `processes.py` says, to time its start."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    """Load the contender and the model that the job names, then answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # stdout is for answers alone

    def say(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    job = json.loads(sys.argv[1])

    import torch

    say(mark="torch")
    from models import build
    from peers import HFStatic
    from spent import Spent

    from compiled_llm.commands.bench.contenders import ALL, Ours, Setup
    from compiled_llm.commands.bench.timing import Workload

    say(mark="imported")
    (contender,) = (one for one in [*ALL, HFStatic()] if one.name == job["contender"])
    if isinstance(contender, Ours):
        contender.options["artifacts"] = job["artifacts"]
    dtype, device = getattr(torch, job["dtype"]), torch.device(job["device"])
    setup = Setup(job["model"], device, dtype, [Workload(*job["workload"])], load=build)
    torch.zeros(1, device=device)
    setup.synchronize()
    say(mark="device")
    setup.model()
    setup.synchronize()
    say(mark="weights")
    spent = Spent().seconds if job["spent"] else {}
    with contender.opened(setup) as session:
        setup.synchronize()
        say(mark="loaded")
        for line in sys.stdin:
            asked = json.loads(line)
            ids = torch.tensor(asked["prompts"], device=device)
            options = {"attention_mask": torch.ones_like(ids), "do_sample": False, **session.options}
            out = session.model.generate(input_ids=ids, max_new_tokens=asked["new"][0], **options)
            setup.synchronize()
            say(lengths=[out.shape[1] - ids.shape[1]] * len(ids), spent=dict(spent))
            spent.clear()


if __name__ == "__main__":
    main()
