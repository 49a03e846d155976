"""The options that several commands have, each worded once, and the panels of ``--help`` that they stand in."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from compiled_llm.commands.options.choices import Device, Dtype

INPUT, SAMPLING, MODEL, OUTPUT = "Input", "Sampling", "Model", "Output"

_input = partial(typer.Option, rich_help_panel=INPUT)
_sampling = partial(typer.Option, rich_help_panel=SAMPLING)
_model = partial(typer.Option, rich_help_panel=MODEL)
_output = partial(typer.Option, rich_help_panel=OUTPUT)

Prompt = Annotated[
    str | None,
    typer.Argument(
        help="The text to continue, or with --chat the message to answer. `-`, or none in a pipe, reads stdin.",
        show_default=False,
    ),
]
PromptFile = Annotated[
    str | None, _input("--file", metavar="PATH", help="Read the prompt from a file; its final newline is dropped.")
]
ChatTemplate = Annotated[bool, _input("--chat/--no-chat", help="Apply the model's chat template.")]
System = Annotated[str | None, _input("--system", metavar="TEXT", help="With --chat: the system message.")]

SampleInChats = Annotated[
    bool | None,
    _sampling(
        "--sample/--greedy",
        help="Sample each token, or take the most likely one. Unless given, as the model's generation config has it.",
    ),
]
Sample = Annotated[
    bool | None,
    _sampling(
        "--sample/--greedy",
        help="Sample each token, or take the most likely one. Greedy unless an option below is given.",
    ),
]
Temperature = Annotated[
    float | None, _sampling("--temperature", help="Above 1 flattens the distribution, below 1 sharpens it.")
]
TopK = Annotated[int | None, _sampling("--top-k", help="Sample among the k most likely tokens; 0 for all.")]
TopP = Annotated[
    float | None, _sampling("--top-p", help="Sample among the fewest tokens that add up to this probability.")
]
MinP = Annotated[
    float | None,
    _sampling("--min-p", help="Sample among tokens at least this fraction as likely as the most likely one."),
]
RepetitionPenalty = Annotated[
    float | None,
    _sampling("--repetition-penalty", help="Above 1 makes earlier tokens less likely; works with --greedy too."),
]
Seed = Annotated[int | None, _sampling("--seed", help="The same seed gives the same text.")]

ModelPlace = Annotated[
    str | None, typer.Argument(help="A folder, a GGUF file, a hub id, or `demo`.", show_default=False)
]
SameModel = Annotated[str | None, _model("--model", metavar="MODEL", help="Another way to give MODEL.")]
Tokenizer = Annotated[
    str | None,
    _model("--tokenizer", metavar="PLACE", help="Take the tokenizer from this folder or hub id, not from the model's."),
]
TemplateFile = Annotated[
    Path | None,
    _model("--chat-template", metavar="FILE", help="Write chats as this Jinja template says, not as the tokenizer's."),
]
RunningMode = Annotated[
    str, _model("--mode", help="How to run: eager, compile, reduce-overhead, cuda-graphs or piecewise.")
]
Backend = Annotated[
    str,
    _model(
        "--backend", help="Whose attention kernels: auto, flashinfer, reference, or one that another package brings."
    ),
]
Artifacts = Annotated[
    Path | None, _model("--artifacts", metavar="DIR", help="Compile nothing: take it from what `compile` has written.")
]
_DTYPE = "auto: float32 on the CPU, bfloat16 on CUDA."
_DEVICE = "auto: CUDA if there is a device."
WeightsDtype = Annotated[Dtype, _model("--dtype", help=_DTYPE)]
OnDevice = Annotated[Device, _model("--device", help=_DEVICE)]
# In no panel, for commands that need none.
DtypeName = Annotated[Dtype, typer.Option("--dtype", help=_DTYPE)]
DeviceName = Annotated[Device, typer.Option("--device", help=_DEVICE)]

MaxNewTokens = Annotated[int, _output("--max-new-tokens", "--max-tokens", help="End an answer after this many tokens.")]
StopBefore = Annotated[
    list[str] | None,
    _output("--stop", metavar="TEXT", help="End an answer before it contains TEXT. Can be given several times."),
]
Quiet = Annotated[bool, _output("--quiet", "-q", help="Show no progress and no figures.")]


def model_of(place: str | None, same: str | None) -> str:
    """Return the model that MODEL or ``--model`` names.

    Raises:
        ValueError: neither does, or both.
    """
    if place is not None and same is not None:
        raise ValueError(f"MODEL {place} and --model {same} were both given; leave one of them out")
    if (model := place or same) is None:
        raise ValueError("name a model: a folder, a GGUF file, a hub id, or `demo`")
    return model
