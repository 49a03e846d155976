"""`compiled-llm explain`. What imports torch is imported inside, so that --help is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compiled_llm.commands.early_checks import check_driver
from compiled_llm.commands.errors import readable_errors
from compiled_llm.commands.importing import importing
from compiled_llm.commands.loading.source import locate
from compiled_llm.commands.options import shared
from compiled_llm.commands.options.choices import Device, Dtype, integers
from compiled_llm.commands.printable import printable


def explain(
    model: shared.ModelPlace = None,
    timings: Annotated[
        str,
        typer.Option(
            metavar="BATCHES",
            help="Also show where the time of prefill and decode goes, for these batch sizes: 1,8,32.",
        ),
    ] = "",
    dump: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Also write the bytecode, guards, graphs and Inductor's code, and the report, into this new folder.",
        ),
    ] = None,
    same_model: shared.SameModel = None,
    dtype: shared.DtypeName = Dtype.auto,
    device: shared.DeviceName = Device.auto,
) -> None:
    """Show which lines keep a model from running as one graph, and what to do. Exit code 1 if there are any."""
    with readable_errors():
        sizes = integers("--timings", timings)
        check_driver(device.value)
        source = locate(shared.model_of(model, same_model))
        with importing(True):
            from compiled_llm.commands.loading.load import load
            from compiled_llm.explaining.explainer import explain as explain_model

        loaded, _ = load(source, dtype.value, device.value)
        report = explain_model(loaded.eval(), timings=sizes, dump=dump)
        report.data["name"] = source.name  # by which other commands find it, too
        typer.echo(printable(str(report)))
        if dump is not None:
            typer.echo(f"written to {dump}", err=True)
    raise typer.Exit(0 if report.clean else 1)
