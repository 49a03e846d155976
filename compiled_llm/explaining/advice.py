"""Reasons in plain words with their remedies: two tables, and a look-up."""

# Patterns are searched in the message of Dynamo, or of our own check, followed by the source line at fault. The first
# that is found counts.

from __future__ import annotations

import re
from typing import NamedTuple


class Advice(NamedTuple):
    """A regular expression, and two sentences: the reason of what it finds, and the remedy."""

    pattern: str
    reason: str
    remedy: str


# What a graph cannot hold.
BREAKS = (
    Advice(
        r"builtin operator `print`|logging\.Logger|method_descriptor.*\bwrite\b",
        "Text is written in the middle of forward, which runs on the host and not in a graph.",
        "Delete the call. To watch steps, pass a streamer to generate, or call the unwrapped model.",
    ),
    Advice(
        r"builtin operator `open`|TextIOWrapper|BufferedReader|\bopen\(|\.read_(text|bytes)\(",
        "A file is opened in forward, at every step.",
        "Read the file once, in __init__ or before wrap, and keep what it says in an attribute of the module.",
    ),
    Advice(
        r"`(R?[lL]ock|Condition|Semaphore)` context manager|\b_thread\.|\block\b.*(acquire|release)",
        "A lock is taken in forward or in a hook; a graph does not run Python, so it cannot take one.",
        "Take the lock out: the steps of a wrapped model run one after the other on one thread. If the hook itself is "
        "no longer needed, remove it.",
    ),
    Advice(
        r"Unsupported context manager",
        "A with-statement enters something that a graph cannot hold.",
        "Move the with-statement out of forward, around the call of generate.",
    ),
    Advice(
        r"Data-dependent branching|data-dependent (branch|jump|control)|GuardOnDataDependent|guard on data-dependent",
        "Which way Python goes depends on the numbers in a tensor, which are not known before the graph runs.",
        "Compute both sides and choose with torch.where (or clamp, nan_to_num, a product with a mask); torch.cond "
        "where both sides are expensive.",
    ),
    Advice(
        r"Tensor\.item\(\)|\bitem\b.*(unbacked|number)|_local_scalar_dense|\.item\(|\.tolist\(|\b(int|float|bool)\(",
        "A number is read from a tensor in forward: the host has to wait for the device, at every step.",
        "Leave it a tensor: use the 0-dim tensor itself in the arithmetic instead of calling item(), tolist(), int() "
        "or float() on it.",
    ),
    Advice(
        r"nonzero|[Dd]ynamic (output )?shape|masked_select|unique|output shape depends",
        "The shape of a result depends on the numbers in a tensor, so no memory can be set aside for it beforehand.",
        "Work on the whole tensor with a mask: torch.where(condition, value, 0) in place of nonzero(), unique(), "
        "masked_select() or indexing with a mask.",
    ),
    Advice(
        r"torch\.compiler\.disable|torch\._dynamo\.disable",
        "A function that forward calls is excluded from compiling by torch.compiler.disable.",
        "Take the decorator off, or make the function an operator with torch.library.custom_op and register_fake.",
    ),
    Advice(
        r"marked as skipped|Failed to trace builtin|builtin operator|C/C\+\+|not traceable|trace builtin",
        "Forward calls a function that cannot be traced because it is not Python, or does something to the outside.",
        "Call it once in __init__ and keep the result, move it out of forward, or make it an operator with "
        "torch.library.custom_op and register_fake.",
    ),
    Advice(
        r"mark(ed)? .*dynamic|Constraints violated|specializ",
        "Forward uses the number of rows or tokens as a Python number, so each size would need its own graph.",
        "Take sizes from tensor shapes where they are used, and do not compare them, nor look things up by them.",
    ),
)

# What a graph holds, and then must not change.
CHANGES = (
    Advice(
        r"environment",
        "An environment variable is read in forward; its value at compile time is built into the graph.",
        "Read the variable once, in __init__ or before wrap, and keep its value in an attribute of the module.",
    ),
    Advice(
        r"module was exchanged",
        "A module was exchanged after wrap, so what was compiled for the old one did not fit any more.",
        "Exchange modules first, then wrap; for a wrapped model: compiled_llm.unwrap(model), then wrap it again.",
    ),
    Advice(
        r"len\(|___dict_contains|\bdict\b|keys",
        "A Python container is filled or emptied in forward; its size and keys are built into the graph.",
        "Do not write to Python containers in forward. Fill the container in __init__ and only read it, or keep the "
        "state in a buffer of fixed shape.",
    ),
    Advice(
        r"mismatch at index|size mismatch|stride mismatch",
        "A tensor that forward uses has another shape from call to call.",
        "Give it one shape: allocate it in full once with register_buffer, and write into a part of it with "
        "index_copy_ or a mask.",
    ),
    Advice(
        r"mutated",
        "A tensor that is no parameter and no buffer is written in forward, so it has no fixed address, and CUDA "
        "graphs are skipped.",
        "Make it a buffer of its module: register_buffer in __init__, and write to self.<name> in place.",
    ),
    Advice(
        r"on the CPU|cpu device",
        "A tensor on the CPU takes part in the computation on the device, and CUDA graphs are skipped.",
        "Move it to the device once, with register_buffer or .to(device) in __init__.",
    ),
    Advice(
        r" == ",
        "A Python value that forward reads has changed from one call to the next; the old one was built into the "
        "graph.",
        "Keep what changes in a tensor (register_buffer, updated in place), and what does not change alone.",
    ),
    Advice(
        r"___check_(obj|type)_id|\bis\b",
        "An object that forward uses was exchanged for another one between calls.",
        "Set it once, in __init__ or before wrap.",
    ),
)


def advise_break(message: str, source: str) -> tuple[str, str]:
    """Return a sentence and a remedy for a graph break: ``message`` is Dynamo's, ``source`` the line at fault."""
    found = _first(BREAKS, message) or _first(BREAKS, source)
    return found or (_summary(message), _hints(message))


def advise_change(message: str) -> tuple[str, str]:
    """Return a sentence and a remedy for something that was built into a graph and changed."""
    return _first(CHANGES, message) or (_summary(message), "Set it once, before wrap.")


def _first(table: tuple[Advice, ...], text: str) -> tuple[str, str] | None:
    return next(((entry.reason, entry.remedy) for entry in table if re.search(entry.pattern, text, re.DOTALL)), None)


def _summary(message: str) -> str:
    explanation = re.search(r"Explanation: (.+?)\s*(?:\n|$)", message)
    return explanation[1] if explanation else next(iter(message.strip().splitlines()), "no reason was given")


def _hints(message: str) -> str:
    hints = re.findall(r"Hint: (.+?)\s*(?:\n|$)", message)
    return " ".join(hints) or "Move the line out of forward."
