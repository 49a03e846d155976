"""Everything that a printed case is made of, to be pasted after one import."""

from support.fuzzing.callbacks import Callback
from support.fuzzing.case import Case
from support.fuzzing.changes import (
    Attention,
    Copied,
    CopyCache,
    Crop,
    Hide,
    Hook,
    Leave,
    Override,
    Rewrap,
    Select,
    Set,
    Undo,
    Weights,
)
from support.fuzzing.data import Prompt
from support.fuzzing.forward import Forward
from support.fuzzing.generate import Generate, InThreads
from support.fuzzing.playing import play

__all__ = [
    "Attention",
    "Callback",
    "Case",
    "Copied",
    "CopyCache",
    "Crop",
    "Forward",
    "Generate",
    "Hide",
    "Hook",
    "InThreads",
    "Leave",
    "Override",
    "Prompt",
    "Rewrap",
    "Select",
    "Set",
    "Undo",
    "Weights",
    "play",
]
