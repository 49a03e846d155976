"""The options that several commands have, each worded once, and the panels of ``--help`` that they stand in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compiled_llm.commands.options.choices import Device, Dtype

INPUT, SAMPLING, MODEL, OUTPUT = "Input", "Sampling", "Model", "Output"

Prompt = Annotated[
    str | None,
    typer.Argument(
        help="The text to continue, or with --chat the message to answer. `-`, or none in a pipe, reads stdin.",
        show_default=False,
    ),
]
PromptFile = Annotated[
    str | None,
    typer.Option(
        "--file",
        metavar="PATH",
        help="Read the prompt from a file; its final newline is dropped.",
        rich_help_panel=INPUT,
    ),
]
ChatTemplate = Annotated[
    bool, typer.Option("--chat/--no-chat", help="Apply the model's chat template.", rich_help_panel=INPUT)
]
System = Annotated[
    str | None,
    typer.Option("--system", metavar="TEXT", help="With --chat: the system message.", rich_help_panel=INPUT),
]

Sample = Annotated[
    bool | None,
    typer.Option(
        "--sample/--greedy",
        help="Sample each token, or take the most likely one. Greedy unless an option below is given.",
        rich_help_panel=SAMPLING,
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature", help="Above 1 flattens the distribution, below 1 sharpens it.", rich_help_panel=SAMPLING
    ),
]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", help="Sample among the k most likely tokens; 0 for all.", rich_help_panel=SAMPLING),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p", help="Sample among the fewest tokens that add up to this probability.", rich_help_panel=SAMPLING
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        "--min-p",
        help="Sample among tokens at least this fraction as likely as the most likely one.",
        rich_help_panel=SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty",
        help="Above 1 makes earlier tokens less likely; works with --greedy too.",
        rich_help_panel=SAMPLING,
    ),
]
Seed = Annotated[
    int | None, typer.Option("--seed", help="The same seed gives the same text.", rich_help_panel=SAMPLING)
]

ModelPlace = Annotated[str, typer.Argument(help="A folder, a GGUF file, a hub id, or `demo`.")]
RunningMode = Annotated[
    str,
    typer.Option(
        "--mode",
        help="How to run: eager, compile, reduce-overhead, cuda-graphs or pieces.",
        rich_help_panel=MODEL,
    ),
]
Backend = Annotated[
    str,
    typer.Option("--backend", help="Whose attention kernels: auto, flashinfer or reference.", rich_help_panel=MODEL),
]
Artifacts = Annotated[
    Path | None,
    typer.Option(
        "--artifacts",
        metavar="DIR",
        help="Compile nothing: take it from what `compile` has written.",
        rich_help_panel=MODEL,
    ),
]
_DTYPE = "auto: float32 on the CPU, bfloat16 on CUDA."
_DEVICE = "auto: CUDA if there is a device."
WeightsDtype = Annotated[Dtype, typer.Option("--dtype", help=_DTYPE, rich_help_panel=MODEL)]
OnDevice = Annotated[Device, typer.Option("--device", help=_DEVICE, rich_help_panel=MODEL)]
# In no panel, for commands that need none.
DtypeName = Annotated[Dtype, typer.Option("--dtype", help=_DTYPE)]
DeviceName = Annotated[Device, typer.Option("--device", help=_DEVICE)]

MaxNewTokens = Annotated[
    int,
    typer.Option(
        "--max-new-tokens", "--max-tokens", help="End an answer after this many tokens.", rich_help_panel=OUTPUT
    ),
]
StopBefore = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        metavar="TEXT",
        help="End an answer before it contains TEXT. Can be given several times.",
        rich_help_panel=OUTPUT,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress and no figures.", rich_help_panel=OUTPUT)]
