"""`compiled-llm explain`. What imports torch is imported inside, so that --help is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compiled_llm.readable_errors import readable_errors


def explain(
    model: Annotated[str, typer.Argument(help="A folder, a GGUF file, a hub id, or `demo`.")],
    html: Annotated[Path | None, typer.Option(metavar="PATH", help="Write the report as a page as well.")] = None,
    dtype: Annotated[str, typer.Option(help="auto: float32 on the CPU, bfloat16 on CUDA.")] = "auto",
    device: Annotated[str, typer.Option(help="auto: CUDA if there is a device.")] = "auto",
) -> None:
    """Say which lines keep a model from running as one graph, and what to do; exits 1 if there are any."""
    with readable_errors():
        from compiled_llm.explaining.explainer import explain as explain_model
        from compiled_llm.loading import load

        loaded, tokenizer = load(model, dtype, device)
        report = explain_model(loaded.eval(), dict(tokenizer("Once upon a time", return_tensors="pt")))
        typer.echo(str(report))
        if html is not None:
            typer.echo(f"written to {report.to_html(html)}", err=True)
    raise typer.Exit(0 if report.clean else 1)
