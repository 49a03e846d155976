"""The options that several commands have, each worded once, and the panels of ``--help`` that they stand in."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, get_args

import typer

from compiled_llm.commands.options.choices import Device, Dtype
from compiled_llm.config import KVDtype

INPUT, SAMPLING, MODEL, OUTPUT = "Input", "Sampling", "Model", "Output"

_input = partial(typer.Option, rich_help_panel=INPUT)
sampling_option = partial(typer.Option, rich_help_panel=SAMPLING)
_model = partial(typer.Option, rich_help_panel=MODEL)
_output = partial(typer.Option, rich_help_panel=OUTPUT)

Prompt = Annotated[
    str | None,
    typer.Argument(
        help="The text to continue, or with --chat the message to answer. `-`, or nothing in a pipe, reads stdin.",
        show_default=False,
    ),
]
PromptFile = Annotated[
    str | None, _input("--file", metavar="PATH", help="Read the prompt from a file; its final newline is dropped.")
]
ChatTemplate = Annotated[
    bool, _input("--chat/--no-chat", help="Send the prompt as a chat message, with the model's chat template.")
]
Images = Annotated[
    list[Path] | None,
    _input(
        "--image",
        metavar="FILE",
        help="Show this PNG, JPEG or WebP file. Can be given several times.",
    ),
]
System = Annotated[str | None, _input("--system", metavar="TEXT", help="Begin the chat with this system message.")]

SampleInChats = Annotated[
    bool | None,
    sampling_option(
        "--sample/--greedy",
        help="Sample each token, or always take the most likely one. The default is in the model's generation config.",
    ),
]
Sample = Annotated[
    bool | None,
    sampling_option(
        "--sample/--greedy",
        help="Sample each token, or always take the most likely one. Greedy is the default, unless an option below is "
        "given.",
    ),
]
ModelPlace = Annotated[
    str | None, typer.Argument(help="The model: a folder, a GGUF file, a hub id, or `demo`.", show_default=False)
]
SameModel = Annotated[str | None, _model("--model", metavar="MODEL", help="The same as MODEL, given as an option.")]
Tokenizer = Annotated[
    str | None,
    _model(
        "--tokenizer", metavar="PLACE", help="Use the tokenizer of this folder or hub id instead of the model's own."
    ),
]
TemplateFile = Annotated[
    Path | None,
    _model(
        "--chat-template",
        metavar="FILE",
        help="Use the chat template in this file (Jinja) instead of the tokenizer's own.",
    ),
]
RunningMode = Annotated[
    str, _model("--mode", help="How the model runs: eager, compile, reduce-overhead, cuda-graphs or piecewise.")
]
Backend = Annotated[
    str,
    _model(
        "--backend",
        help="The attention kernels: auto, flashinfer, triton, flash-attn, torch, reference, or the name of one that "
        "you have installed.",
    ),
]
Artifacts = Annotated[
    Path | None,
    _model(
        "--artifacts",
        metavar="DIR",
        help="Load compiled code from this folder, which `compiled-llm compile` has written, and compile nothing.",
    ),
]
EagerFirst = Annotated[
    bool,
    _model(
        "--eager-first/--no-eager-first",
        help="On a CPU, answer at once, uncompiled, while the model is compiled in the background.",
    ),
]
_KV_DTYPES = ("auto", *get_args(KVDtype))
_DTYPE = "The type of the weights; auto is float32 on the CPU and bfloat16 on CUDA."
_DEVICE = "Where the model runs; auto is CUDA if there is a device, else the CPU."
WeightsDtype = Annotated[Dtype, _model("--dtype", help=_DTYPE)]
OnDevice = Annotated[Device, _model("--device", help=_DEVICE)]
KeysAndValues = Annotated[
    str | None,
    _model(
        "--kv-dtype",
        metavar=f"[{'|'.join(_KV_DTYPES)}]",
        parser=lambda name: None if name == "auto" else name,
        show_default="auto",
        help="The type of keys and values in memory; auto is that of the weights, the other has 8 bits.",
    ),
]
ScalesFile = Annotated[
    Path | None,
    _model(
        "--kv-scales",
        metavar="FILE",
        help="With --kv-dtype, the scales of keys and values that KVScales.save has written in Python; else all are 1.",
    ),
]
BatchInvariant = Annotated[
    bool,
    _model(
        "--batch-invariant",
        help="Compute the same bits for a text whatever runs beside it. Steps take longer, and all wait for compiling.",
    ),
]
# In no panel, for commands that need none.
DtypeName = Annotated[Dtype, typer.Option("--dtype", help=_DTYPE)]
DeviceName = Annotated[Device, typer.Option("--device", help=_DEVICE)]

MaxNewTokens = Annotated[int, _output("--max-new-tokens", "--max-tokens", help="Stop after this many new tokens.")]
StopBefore = Annotated[
    list[str] | None,
    _output("--stop", metavar="TEXT", help="Stop before the answer contains TEXT. Can be given several times."),
]
Quiet = Annotated[bool, _output("--quiet", "-q", help="Show no progress and no figures.")]


def model_of(place: str | None, same: str | None) -> str:
    """Return the model that MODEL or ``--model`` names; ValueError if neither does, or both."""
    if place is not None and same is not None:
        raise ValueError(f"MODEL {place} and --model {same} were both given; leave one of them out")
    if (model := place or same) is None:
        raise ValueError("name a model: a folder, a GGUF file, a hub id, or `demo`")
    return model
