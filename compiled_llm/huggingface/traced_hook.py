"""``traced_hook``: a hook on a module that is compiled into the model's steps."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import cast

from torch import nn

from compiled_llm.huggingface.handle import CompiledModel, compiled_models
from compiled_llm.model.traced.hooks import HookFunction, PlacedHook

logger = logging.getLogger("compiled_llm.graphs")


class TracedHookHandle:
    """The handle of a traced hook, which removes it: by ``remove``, or at the end of a ``with`` block."""

    def __init__(self, placed: list[tuple[CompiledModel, PlacedHook]]) -> None:
        self._placed = placed

    def remove(self) -> None:
        """Remove the hook; the next call compiles the steps without it. Removing it again does nothing."""
        for compiled, hook in self._placed:
            if compiled.facts.hooks.remove(hook):
                compiled.facts.version.change_code()
        self._placed = []

    def __enter__(self) -> TracedHookHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def traced_hook(module: nn.Module, function: HookFunction) -> TracedHookHandle:
    """Let a function see, and if it likes change, what a module of a wrapped model computes, on the compiled path.

    It is like ``module.register_forward_hook``, with a fourth argument: ``function(module, args, output, tokens)``
    returns None, or what takes the place of ``output``. It is traced into the compiled steps, so it runs in
    ``generate``, in engines and in ``forward``, and costs what its operations cost. Steps are of packed tokens of
    several rows: tensors that the model has as ``[B, Q, ...]`` are ``[T, ...]`` in ``args`` and ``output``.
    ``tokens.rows`` and ``tokens.positions`` (``[T]`` int64) say whose they are, and ``tokens.emit(name, tensor)`` hands
    a tensor ``[T, ...]`` out, which results have as ``emitted[name]`` in the shape ``[B, Q, ...]``.

    Steps are compiled again at the next call, and once more after ``remove``. In between, change what the function
    reads in place (``vector.copy_(...)``), and nothing is compiled. Other numbers, tensors and objects count from the
    next call on, too, wherever the function has them from: closures, defaults, globals that its code names, attributes,
    modules, containers, functions that it calls; an engine forgets texts that were computed otherwise. It cannot see
    writes through ``.data`` or into tensors of inference mode, arrays of NumPy, ``__slots__``, names that are looked up
    as strings, nor what code of libraries keeps: call ``engine.reset_prefix_cache()`` after these.

    A call that only HuggingFace's own forward can serve raises an error while there are hooks, rather than leave them
    out.

    Args:
        module: inside of a wrapped model; the hook stays with its name, if another module takes its place.
        function: Python that ``torch.compile`` can trace whole.

    Returns:
        A handle with ``remove()``, which is a context manager, too.

    Raises:
        TypeError: ``module`` is no module, or ``function`` cannot be called.
        ValueError: ``module`` is in no wrapped model, is the model itself, or its language model head, which has logits
            of some tokens alone.

    Examples:
        >>> def steer(module, args, output, tokens):
        ...     return output + vector
        >>> with compiled_llm.traced_hook(model.model.layers[5], steer):  # doctest: +SKIP
        ...     model.generate(**inputs)
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"traced_hook: module={module!r:.80} is no torch.nn.Module")
    if not callable(function):
        raise TypeError(f"traced_hook: function={function!r:.80} cannot be called")
    found = [(compiled, name) for compiled in list(compiled_models) if (name := _name_in(compiled, module)) is not None]
    if not found:
        raise ValueError(
            f"traced_hook: module, a {type(module).__name__}, is in no wrapped model; wrap the model first, and give "
            "one of its modules, such as model.model.layers[5]"
        )
    for compiled, _ in found:
        compiled.home.check()
        _check_place(compiled, module)
    placed: list[tuple[CompiledModel, PlacedHook]] = []
    for compiled, name in found:
        placed.append((compiled, compiled.facts.hooks.add(name, function)))
        compiled.facts.version.change_code()
        logger.info("compiled_llm: a traced hook is on %s: the next call compiles the steps with it", name)
    return TracedHookHandle(placed)


def _name_in(compiled: CompiledModel, module: nn.Module) -> str | None:
    model = compiled.facts.reference()
    if model is None:
        return None
    return next((name for name, own in model.named_modules() if own is module), None)


def _check_place(compiled: CompiledModel, module: nn.Module) -> None:
    model = compiled.facts.model
    if module is model or module is cast(nn.Module | None, model.get_output_embeddings()):
        which = "the wrapped model itself" if module is model else "its language model head"
        raise ValueError(
            f"traced_hook: module is {which}, which has logits of some tokens alone; give a module inside, such as its "
            "last norm, or read output_logits"
        )
