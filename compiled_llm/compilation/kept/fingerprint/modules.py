"""Modules of a model, their tensors and configs."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from transformers import PretrainedConfig

from compiled_llm.compat.huggingface import class_of_config
from compiled_llm.compat.torch.tensors import dispatch_keys, wrapped_in
from compiled_llm.compilation.kept.fingerprint.code import digest
from compiled_llm.compilation.kept.fingerprint.containers import entries_of
from compiled_llm.compilation.kept.fingerprint.plain import UNNAMED, is_named, path_of
from compiled_llm.compilation.kept.fingerprint.visit import Visit
from compiled_llm.model.version.module_state import names_read

_HELD = ("_parameters", "_buffers", "_modules")
_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks"),
)


def describe_module(visit: Visit, module: nn.Module, where: str) -> str:
    """Return a module's name; its parts are an entry."""
    return visit.later(module, where, partial(_parts, visit, module))


def _parts(visit: Visit, module: nn.Module, name: str) -> str:
    held = vars(module)
    for each in {*_HELD, *_HOOKS} & held.keys():
        visit.open(held[each])
    with visit.watching(False):
        attributes = [*visit.describe_attributes({each: held[each] for each in names_read(module)}, name)]
    hooks = (f"{each}: {entries_of(visit, held[each], f'{name}.{each}')}" for each in _HOOKS if held.get(each))
    registered = ((each, value) for holder in _HELD for each, value in held[holder].items())
    parts = (f"{each}: {visit.describe(value, f'{name}.{each}')}" for each, value in registered)
    kind = visit.describe(type(module), name)
    return "; ".join((kind, f"training: {module.training}", *attributes, *hooks, *parts))


def describe_tensor(visit: Visit, tensor: Tensor, where: str) -> str:
    """Describe a tensor but for its values and its address; one that was found before by its name."""
    first, name = visit.open(tensor), visit.name(tensor, where)
    if not first:
        return f"that of {name}"
    layout = (tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride(), tensor.requires_grad)
    marks = sorted(each for each in vars(tensor) if each.startswith("_dynamo") and each.endswith("_indices"))
    own = {each: value for each, value in vars(tensor).items() if is_named(each) and not each.startswith("_dynamo")}
    visit.watch(vars(tensor), own)
    visit.see(type(tensor))
    of_torch = type(tensor).__module__.partition(".")[0] == "torch"
    kind = path_of(type(tensor)) if of_torch else visit.describe(type(tensor), where)
    described = [f"{kind} {layout} {dispatch_keys(tensor)} {marks}", *visit.describe_attributes(own, where)]
    if (parts := wrapped_in(tensor)) is not None:
        described += (f"{each}: {visit.describe(part, f'{where}.{each}')}" for each, part in parts[0].items())
        described.append(visit.describe(parts[1], where))
    return "; ".join(described)


def describe_config(visit: Visit, config: PretrainedConfig, where: str) -> str:
    """Return a config's name; each of its entries is one here."""
    name = visit.name(config, where)
    if visit.open(config):
        visit.watch_entries(vars(config))
        kind = class_of_config(config)
        for base in {*type(config).__mro__} - {*kind.__mro__}:
            visit.open(base)  # of ours: a thread reads other implementations than the one that it names
        read = {entry: value for entry, value in vars(config).items() if entry not in UNNAMED}
        visit.entries[name] = digest(f"{visit.describe(kind, name)} {list(read)}")
        for entry, value in read.items():
            visit.entries[f"{name}.{entry}"] = digest(visit.describe(value, f"{name}.{entry}"))
    return name
