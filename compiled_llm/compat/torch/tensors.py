"""Fake and symbolic values in graphs, and private properties of tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only


class Fakes(NamedTuple):
    """Makers of tensors without data: ``of`` for those in containers, the same each time, ``another`` a new one."""

    # ``another`` has memory of its own, with the layout of one that needs no gradient; it takes a tenth of the time of
    # a function.

    of: Callable[[Any], Any]
    another: Callable[[Tensor], Tensor]


@contextmanager
def fake_tensors(run: nn.Module | None = None) -> Iterator[Fakes]:
    """Run the block on tensors without data, and without log messages about errors on them; yield their makers."""
    # Operations on real tensors alone still change those. The block may ``run`` a module of any kind.
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with _mode_for(run)(allow_non_fake_inputs=True) as mode:
            # What ops did is kept by their arguments, and packed weights of torch.ao cannot be compared (torch 2.13).
            mode.cache_enabled &= run is None or not _packs_weights(run)

            def fake(tensor: Tensor) -> Tensor:
                return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor, static_shapes=True)

            def another(tensor: Tensor) -> Tensor:
                size, stride = tensor.size(), tensor.stride()
                with no_dispatch():
                    memory = torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")
                return FakeTensor(mode, memory, tensor.device)

            yield Fakes(lambda values: tree_map_only(Tensor, fake, values), another)
    finally:
        logger.setLevel(level)


class _LenientMode(FakeTensorMode):
    """Takes tensors of subclasses of ``Parameter`` for what they are, plain ones; torch 2.11 refuses these classes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._plain: dict[int, tuple[Tensor, Tensor]] = {}  # by the identity of a tensor, which stays alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, self._taken, (args, kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _taken(self, tensor: Tensor) -> Tensor:
        if not _is_plain_subclass(type(tensor)):
            return tensor
        if id(tensor) not in self._plain:
            with no_dispatch():
                self._plain[id(tensor)] = tensor, tensor.as_subclass(Tensor)
        return self._plain[id(tensor)][1]


def _mode_for(run: nn.Module | None) -> type[FakeTensorMode]:
    classes = set() if run is None else {type(weight) for weight in run.parameters()}
    return _LenientMode if any(map(_is_plain_subclass, classes)) else FakeTensorMode


def _is_plain_subclass(kind: type[Tensor]) -> bool:
    """Whether a subclass of ``Parameter`` adds attributes alone: its tensors are plain ones, and wrap no others."""
    dispatch = attrgetter("__torch_dispatch__")
    return issubclass(kind, nn.Parameter) and kind is not nn.Parameter and dispatch(kind) is dispatch(Tensor)


def _packs_weights(model: nn.Module) -> bool:
    return any(type(module).__module__.startswith("torch.ao.") for module in model.modules())


def fake_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Return what ``nn.functional.linear`` makes of a fake input, in one operation where torch takes four."""
    # So a trial forward takes a fourth less. None if it may make something else: the input has data, or the weight is
    # of another size, type, device or class than a plain product takes.
    fits = (weight.dim(), weight.dtype, weight.device) == (2, input.dtype, input.device)
    plain = type(weight) in (Tensor, nn.Parameter) and fits
    if not (plain and isinstance(input, FakeTensor) and input.shape[-1:] == weight.shape[1:]):
        return None
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def has_unknown_sizes(error: BaseException) -> bool:
    """Whether an operation on tensors without data has failed because its results' sizes depend on the data."""
    return isinstance(error, DynamicOutputShapeException)


def inputs_by_tensor(graph: fx.Graph) -> Callable[[Tensor], fx.Node | None]:
    """Return a function that finds the input of a graph, as Dynamo has made it, for a real tensor."""
    # Dynamo's fake tensors are made once for each real one, and remembered.
    inputs = graph.find_nodes(op="placeholder")
    fakes = {id(fake): node for node in inputs if isinstance(fake := node.meta.get("example_value"), FakeTensor)}
    modes = [node.meta["example_value"].fake_mode for node in fakes.values()]
    return lambda tensor: fakes.get(id(modes[0].from_tensor(tensor, static_shapes=True))) if modes else None


def example_of(node: fx.Node) -> Any:
    """Return the fake tensor or symbolic size of a node in a graph of Dynamo's."""
    return node.meta["example_value"]


def stands_for_plain(example: object) -> bool:
    """Whether a graph's value is a plain tensor, not of a subclass, as quantised weights mostly are."""
    return isinstance(example, FakeTensor)


@contextmanager
def running_on(values: Iterable[Any]) -> Iterator[None]:
    """Let the block run a graph on the fake tensors among ``values``; their sizes stay symbolic."""
    from torch._dispatch.python import enable_python_dispatcher

    mode = next(tensor.fake_mode for tensor in values if isinstance(tensor, FakeTensor))
    with mode, enable_python_dispatcher():  # without the second, sizes became numbers before torch 2.13
        yield


def note_examples(graph: fx.Graph, examples: Sequence[Any]) -> None:
    """Give a graph that is not Dynamo's the examples of its inputs, as Dynamo would: AOTAutograd's cache reads them."""
    for node, example in zip(graph.find_nodes(op="placeholder"), examples, strict=True):
        node.meta["example_value"] = example


def storage_number(tensor: Tensor) -> int:
    """Return a number that tensors have in common while they share memory; fake ones have no address."""
    number: int = tensor.untyped_storage()._cdata
    return number


def storage_owners(storage: torch.UntypedStorage) -> int:
    uses: int = torch._C._storage_Use_Count(storage._cdata)
    return uses - 1  # ``storage`` itself


def storage_numbers(tensors: Iterable[Tensor]) -> list[int]:
    """Return the ``storage_number`` of each tensor."""
    return [*map(attrgetter("_cdata"), map(Tensor.untyped_storage, tensors))]


version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Return how often a tensor has been written to; those of inference mode do not count it."""


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return ``version_of`` of each; subclasses of torch's tensors are not asked, whose Python code takes long."""
    with torch._C.DisableTorchFunctionSubclass():
        return [*map(version_of, tensors)]


def addresses_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return the address of each; subclasses of torch's tensors are not asked, whose Python code takes long."""
    with torch._C.DisableTorchFunctionSubclass():
        return [*map(Tensor.data_ptr, tensors)]


def dispatch_keys(tensor: Tensor) -> int:
    """Return a number for how torch calls operations on a tensor: those of inference mode, for one, have another."""
    keys: int = torch._C._dispatch_keys(tensor).raw_repr()
    return keys


def copy_all(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy tensors into others of the same types and sizes, in few launches; public functions take one for each."""
    if into:
        torch._foreach_copy_([*into], [*tensors])  # pyright: ignore[reportPrivateImportUsage]


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor stands for other ones, as quantised weights do."""
    return is_traceable_wrapper_subclass(tensor)


def wrapped_in(tensor: Tensor) -> tuple[dict[str, Any], Any] | None:
    """Return the tensors and the other parts of a tensor subclass that wraps others; None of any other class."""
    if not is_traceable_wrapper_subclass(tensor):
        return None
    names, others = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, others


def unbacked_symbols(value: Tensor | torch.SymInt | torch.SymFloat | torch.SymBool) -> set[object]:
    """Return the numbers in a graph's value, or in its sizes, that only the device knows."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return set(free_unbacked_symbols(value))


def sizes_of(value: object) -> tuple[set[Any], set[Any]]:
    """Return the symbols that a graph's value has as a size or stride, or is, and those that others are made of."""
    numbers = (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
    expressions = [number.node.expr for number in numbers if isinstance(number, torch.SymInt)]
    alone = {expression for expression in expressions if expression.is_Symbol}
    return alone, set().union(*(expression.free_symbols for expression in expressions)) - alone
