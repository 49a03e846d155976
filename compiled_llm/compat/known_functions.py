"""Functions of other packages on a model, or called with its tokens, known by a hash of their source.

``tests/compat/test_known_functions.py`` compares the hashes with the installed packages.

| function | what it does | without it | ends when |
| --- | --- | --- | --- |
| hooks of ``enable_input_require_grads`` (transformers) and of PEFT | ``requires_grad_`` on embeddings | \
HuggingFace's forward for good after checkpointed gradients | they are removed with the checkpoints |
| ``add_fused_lm_head`` (TRL) | log-probabilities, in calls that ask for them | the same after a trainer was made | it \
is a method of the trainer's |
| ``convert_outputs_to_fp32`` (accelerate) | logits in float32, which sampling makes of them anyway | the same | \
accelerate takes it off with the trainer |
| ``torch.autocast`` as a decorator, which stands in the latter | nothing, if it is off | the same | the same |
| ``MultiTokenEOSCriteria`` (lm-eval) | looks for a text in the last tokens | a look at the model after each step | \
lm-eval's class has ``leaves_model_alone`` |

Another text of a function is another function, which may do anything: on a model it stays in effect, on HuggingFace's
path, and is named with its package and the call that takes it off; after a criterion the model is looked at. The
versions are those whose text it is.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch


class Known(NamedTuple):
    """A function of a package that does nothing to tokens, or only what the forward does that it calls."""

    package: str  # the distribution whose function it is
    versions: str  # those that have it
    name: str  # what puts it on a model, or the class of the criterion
    calls: str = ""  # the variable of the function that holds that forward; empty for a hook and a criterion
    calls_inside: bool = False  # whether calls that ask for more get it from the module inside the model
    is_criterion: bool = False  # whether it is the ``__call__`` of a stopping criterion


_REQUIRES_GRAD = "c3bf74471d197bb9f6e6fadd1ac4d9672ef4f6e7ec2d4047c0f059c28078d845"
_REQUIRES_GRAD_OF_PEFT = "ee01ce7c9f43ba658ffce6ab93afe1d2630da43ffa82f6c099cf9e9d8db831fe"
_FUSED_HEAD_15 = "0a25cccc477b1fcb676f931105eb4395b1c62ffb83929a6d9186f3a66d371e09"
_FUSED_HEAD_16 = "f686ee7c34da96936af68836ca869913bd77822808ad83c7b3d82a03c705ddda"
_TO_FLOAT32 = "15588d3d35abfcc100a545e8d6061a3789d4efd05a9f0a5d9e3ffaa76fbcccdb"
_AUTOCAST = "49f0c5ec5ba16e7d6f17da688125dd7e89b77357b2732e5fb2433fc27f744508"
_STOPS_AT_TEXT = "4c5b41ffedda777f04f1545c3c5a616e83e27fae78708bb318a85aed28390d08"

KNOWN = {
    _REQUIRES_GRAD: Known("transformers", ">=5.17,<5.25", "PreTrainedModel.enable_input_require_grads"),
    _REQUIRES_GRAD_OF_PEFT: Known("peft", ">=0.18,<0.22", "make_inputs_require_grad"),
    _FUSED_HEAD_15: Known("trl", "==1.15.*", "add_fused_lm_head", "original_forward", calls_inside=True),
    _FUSED_HEAD_16: Known("trl", "==1.16.*", "add_fused_lm_head", "original_forward", calls_inside=True),
    _TO_FLOAT32: Known("accelerate", ">=1.10,<1.16", "convert_outputs_to_fp32", "model_forward"),
    _AUTOCAST: Known("torch", ">=2.11,<2.16", "autocast_decorator", "func"),
    _STOPS_AT_TEXT: Known("lm_eval", ">=0.4.8,<=0.4.13", "MultiTokenEOSCriteria", is_criterion=True),
}
"""By the hash of their source."""

_REMOVED_BY = {
    ("transformers", "PreTrainedModel.enable_input_require_grads"): "model.disable_input_require_grads()",
    ("trl", "add_fused_lm_head"): "del model.forward",
    ("accelerate", "convert_outputs_to_fp32"): "accelerator.unwrap_model(model, keep_fp32_wrapper=False)",
    ("accelerate", "add_hook_to_module"): "accelerate.hooks.remove_hook_from_module(model)",
    ("torch", "autocast_decorator"): "accelerator.unwrap_model(model, keep_fp32_wrapper=False)",
}
"""The calls that take a function off, by its package and by what puts it there."""


def source_hash(code: CodeType) -> str:
    """Return the hash of a function's source, or of nothing if its source is not at hand."""
    try:
        source = textwrap.dedent(inspect.getsource(code))
    except (OSError, TypeError):
        source = ""
    return hashlib.sha256(source.encode()).hexdigest()


@functools.lru_cache(maxsize=256)
def _known_code(code: CodeType) -> Known | None:
    return KNOWN.get(source_hash(code))


def _known(function: object) -> Known | None:
    return _known_code(function.__code__) if isinstance(function, FunctionType) else None


def asks_for_gradients(hook: object) -> bool:
    """Return whether a forward hook is known to call ``requires_grad_`` alone, which does nothing without gradients."""
    known = _known(hook)
    return known is not None and not (known.calls or known.is_criterion)


def reads_tokens_alone(criterion: object) -> bool:
    """Return whether a criterion is known to leave the model alone; one of a derived class may do anything."""
    known = _known(vars(type(criterion)).get("__call__"))
    return known is not None and known.is_criterion


def forward_called(forward: object) -> object:
    """Return the forward that known ones stand around, which do nothing more in calls that ask for nothing more."""
    while (inner := _called_by(forward)) is not None:
        forward = inner
    return forward


def caller_of_inside(forward: object) -> str | None:
    """Return which of the known functions around a forward calls the module inside; None if none does."""
    while (inner := _called_by(forward)) is not None:
        known = _known(_function_of(forward))
        if known is not None and known.calls_inside:
            return f"{known.name} of {known.package}"
        forward = inner
    return None


def has_its_own_forward(kind: type) -> bool:
    """Return whether a class has the ``forward`` that its library defines, there or in the class it derives from."""
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    return is_defined_in(owner.__module__, vars(owner)["forward"])


def is_defined_in(module: str, function: object) -> bool:
    """Return whether a function or method was defined in a module; those around one copy its name, not its globals."""
    found = sys.modules.get(module)
    return found is not None and getattr(_function_of(function), "__globals__", None) is vars(found)


def _function_of(forward: object) -> object:
    return forward.__func__ if isinstance(forward, MethodType) else forward


def _called_by(forward: object) -> object:
    function = _function_of(forward)
    if not isinstance(function, FunctionType):
        # What accelerate's function holds: an object whose class has no other use.
        return vars(function).get("model_forward") if type(function).__name__ == "ConvertOutputsToFp32" else None
    known = _known(function)
    if known is None or not known.calls:
        return None
    held = inspect.getclosurevars(function).nonlocals
    autocast = held.get("autocast_instance")
    return None if isinstance(autocast, torch.autocast) and autocast._enabled else held[known.calls]


def author_of(function: object) -> str:
    """Return which package put a function on a model, and the call that removes it; its own name if it has none."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return type(function).__name__
    package = str(function.__globals__.get("__name__", "")).partition(".")[0]
    name = _qualified_name(function).partition(".<locals>")[0]
    removed_by = _REMOVED_BY.get((package, name))
    return f"{name} of {package}" + ("" if removed_by is None else f", which {removed_by} takes off")


def _qualified_name(function: Callable[..., Any]) -> str:
    """Return the name of the code itself: ``functools.wraps`` copies that of another function."""
    return getattr(function.__code__, "co_qualname", function.__qualname__)
