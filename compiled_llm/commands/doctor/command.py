"""`compiled-llm doctor`. What imports torch is imported inside, so that --help is quick."""

from __future__ import annotations

from typing import Annotated

import typer

from compiled_llm.commands.errors import readable_errors


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Skip building kernels and running a model.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object.")] = False,
) -> None:
    """Show what this machine has and what is missing, and try whether kernels build and a model runs.

    Exit code 0 if compiled_llm can run here, on CUDA if there is a device, else on the CPU; 1 if not.
    """
    with readable_errors():
        from compiled_llm.commands.doctor.report import report

        can_run = report(quick=quick, as_json=as_json)
    raise typer.Exit(0 if can_run else 1)
