"""Everything that a printed case is made of, to be pasted after one import."""

from support.fuzzing.callbacks import Callback as Callback
from support.fuzzing.case import Case as Case
from support.fuzzing.changes import (
    Attention as Attention,
    Copied as Copied,
    CopyCache as CopyCache,
    Crop as Crop,
    Hide as Hide,
    Hook as Hook,
    Leave as Leave,
    Override as Override,
    Rewrap as Rewrap,
    Select as Select,
    Set as Set,
    Undo as Undo,
    Weights as Weights,
)
from support.fuzzing.data import Prompt as Prompt
from support.fuzzing.forward import Forward as Forward
from support.fuzzing.generate import Generate as Generate, InThreads as InThreads
from support.fuzzing.playing import play as play
