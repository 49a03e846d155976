"""What a user does to a model and a conversation between calls."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import compiled_llm
from support.fuzzing.callbacks import PlantedError
from support.fuzzing.data import Step
from support.fuzzing.side import OPTIONS, Chat, Side, plain


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def _attention(model: PreTrainedModel) -> nn.Module:
    return next(module for module in layers_of(model)[-1].modules() if hasattr(module, "layer_idx"))


PLACES: dict[str, Callable[[PreTrainedModel], nn.Module]] = {
    "model": lambda model: model,
    "base": lambda model: model.base_model,
    "layer": lambda model: layers_of(model)[-1],
    "attention": _attention,
    "head": lambda model: model.get_output_embeddings(),
    "embeddings": lambda model: model.get_input_embeddings(),
}


# ---- hooks and overrides


@dataclass(frozen=True, repr=False)
class Hook(Step):
    """A forward hook; with ``before`` one that sees the inputs. It takes the place of the one of its name."""

    place: str = "layer"
    does: str = "looks"
    before: bool = False

    def run(self, side: Side) -> None:
        module = PLACES[self.place](side.model)
        add = module.register_forward_pre_hook if self.before else module.register_forward_hook
        _replace(side, "hook", add(functools.partial(self.called, side), with_kwargs=self.before).remove)

    def called(self, side: Side, module: nn.Module, args: Any, output: Any) -> Any:
        if self.does == "raises":
            raise PlantedError("in a hook")
        if self.before:
            return side.note("before", self.place, [_shape(value) for value in args])
        seen = _first(output)
        if self.does == "looks":
            return side.note("hook", self.place, list(seen.shape))
        changed = seen * 1.3 if self.does == "scales" else _added(seen)
        return _with_first(output, changed)


def _shape(value: Any) -> Any:
    return list(value.shape) if isinstance(value, Tensor) else None


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _with_first(output: Any, changed: Tensor) -> Any:
    if isinstance(output, Tensor):
        return changed
    if isinstance(output, tuple):
        return (changed, *output[1:])
    output[next(iter(output))] = changed
    return output


def _added(seen: Tensor) -> Tensor:
    added = seen.clone()
    added[:, -1] += torch.linspace(-1, 1, seen.shape[-1])
    return added


def _replace(side: Side, name: str, undo: Callable[[], Any]) -> None:
    side.undo.pop(name, lambda: None)()
    side.undo[name] = undo


@dataclass(frozen=True, repr=False)
class Override(Step):
    """A method replaced on the instance."""

    method: str = "forward"

    def run(self, side: Side) -> None:
        side.undo.pop(self.method, lambda: None)()
        original = getattr(side.model, self.method)
        setattr(side.model, self.method, OVERRIDES[self.method](original, side))
        side.undo[self.method] = functools.partial(delattr, side.model, self.method)


def _own_forward(original: Callable[..., Any], side: Side) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        output[0 if isinstance(output, tuple) else "logits"].mul_(torch.tensor(-0.7))
        return output

    return forward


def _own_inputs(original: Callable[..., Any], side: Side) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare_inputs_for_generation(*args: Any, **kwargs: Any) -> Any:
        inputs = original(*args, **kwargs)
        if inputs.get("input_ids") is not None:
            inputs["input_ids"] = inputs["input_ids"].clamp(max=20)
        return inputs

    return prepare_inputs_for_generation


def _own_update(original: Callable[..., Any], side: Side) -> Callable[..., Any]:
    @functools.wraps(original)
    def _update_model_kwargs_for_generation(*args: Any, **kwargs: Any) -> Any:
        side.note("updated")
        return original(*args, **kwargs)

    return _update_model_kwargs_for_generation


OVERRIDES = {
    "forward": _own_forward,
    "prepare_inputs_for_generation": _own_inputs,
    "_update_model_kwargs_for_generation": _own_update,
}


@dataclass(frozen=True, repr=False)
class Undo(Step):
    """Take back the hook, the override or the attribute of this name, if there is one."""

    name: str = "hook"

    def run(self, side: Side) -> None:
        side.undo.pop(self.name, lambda: None)()


# ---- settings, weights, kinds


@dataclass(frozen=True, repr=False)
class Set(Step):
    """Set an attribute of ``config``, ``generation_config``, or of a module at one of the places."""

    where: str = "generation_config"
    name: str = "pad_token_id"
    value: Any = None

    def run(self, side: Side) -> None:
        owner = PLACES[self.where](side.model) if self.where in PLACES else getattr(side.model, self.where)
        if hasattr(owner, self.name):
            _replace(
                side,
                f"{self.where}.{self.name}",
                functools.partial(setattr, owner, self.name, getattr(owner, self.name)),
            )
            setattr(owner, self.name, self.value)


@dataclass(frozen=True, repr=False)
class Attention(Step):
    """Another of HuggingFace's attention implementations."""

    name: str = "eager"

    def run(self, side: Side) -> None:
        side.model.set_attn_implementation(self.name)


@dataclass(frozen=True, repr=False)
class Weights(Step):
    """Other weights, in one of the ways in which users change them."""

    how: str = "in place"

    def run(self, side: Side) -> None:
        with torch.no_grad():
            _WAYS[self.how](side.model)


def _in_place(model: PreTrainedModel) -> None:
    weight = next(_attention(model).parameters())
    weight.copy_(weight.roll(1, dims=0))


def _data(model: PreTrainedModel) -> None:
    weight = next(_attention(model).parameters())
    weight.data = -weight.data


def _new_parameter(model: PreTrainedModel) -> None:
    layer = next(module for module in layers_of(model)[0].modules() if isinstance(module, nn.Linear))
    layer.weight = nn.Parameter(layer.weight.detach() * 0.9)


def _swapped(model: PreTrainedModel) -> None:
    layers = layers_of(model)
    layers[0] = copy.deepcopy(layers[0])


def _loaded(model: PreTrainedModel) -> None:
    model.load_state_dict({name: value.flip(0) * 0.95 for name, value in model.state_dict().items()})


def _resized(model: PreTrainedModel) -> None:
    torch.manual_seed(0)
    model.resize_token_embeddings(model.config.get_text_config(decoder=True).vocab_size + 8, mean_resizing=False)


def _rounded(model: PreTrainedModel) -> None:
    model.to(torch.bfloat16)
    model.to(torch.float32)


_WAYS: dict[str, Callable[[PreTrainedModel], None]] = {
    "in place": _in_place,
    "data": _data,
    "new parameter": _new_parameter,
    "swapped module": _swapped,
    "load_state_dict": _loaded,
    "resize_token_embeddings": _resized,
    "to bfloat16 and back": _rounded,
    "to float64": lambda model: model.to(torch.float64) and None,
    "to float32": lambda model: model.to(torch.float32) and None,
    "requires no gradients": lambda model: model.requires_grad_(False) and None,
}
WAYS = tuple(_WAYS)


@dataclass(frozen=True, repr=False)
class Rewrap(Step):
    """Unwrap, and wrap with other options."""

    options: dict[str, Any] = field(default_factory=dict)

    def run(self, side: Side) -> Any:
        _as_it_was(side)
        if side.options is None:
            return _few_tokens(side)
        compiled_llm.unwrap(side.model)
        tokens = _few_tokens(side)
        side.options = {**OPTIONS, **self.options}
        compiled_llm.wrap(side.model, **side.options)
        return tokens


def _as_it_was(side: Side) -> None:
    """Without a conversation, hooks and overrides: those hold the model that there is now."""
    side.chat = None
    while side.undo:
        side.undo.popitem()[1]()


def _few_tokens(side: Side) -> Any:
    return plain(side.model.generate(torch.arange(3, 9)[None], max_new_tokens=4, do_sample=False, num_beams=1))


@dataclass(frozen=True, repr=False)
class Copied(Step):
    """Go on with a copy of the model."""

    how: str = "deepcopy"

    def run(self, side: Side) -> Any:
        _as_it_was(side)
        side.model = copy.deepcopy(side.model) if self.how == "deepcopy" else pickle.loads(pickle.dumps(side.model))


# ---- the conversation's cache


@dataclass(frozen=True, repr=False)
class Crop(Step):
    """Forget the last tokens of the conversation."""

    tokens: int = 1

    def run(self, side: Side) -> Any:
        if (chat := side.chat) is None or chat.cache.get_seq_length() <= self.tokens:
            return None
        chat.cache.crop(-self.tokens)
        length = chat.cache.get_seq_length()
        side.chat = Chat(chat.text[:, :length], chat.mask[:, :length], chat.cache)
        return length


@dataclass(frozen=True, repr=False)
class Select(Step):
    """Take other rows of the conversation: ``how`` is a method of caches, ``rows`` what it gets."""

    how: str = "reorder_cache"
    rows: tuple[int, ...] = (0,)

    def run(self, side: Side) -> Any:
        if (chat := side.chat) is None or len(chat.text) <= max(self.rows):
            return None
        rows = torch.tensor(self.rows)
        if self.how == "batch_repeat_interleave":
            rows = torch.arange(len(chat.text)).repeat_interleave(len(self.rows))
            chat.cache.batch_repeat_interleave(len(self.rows))
        else:
            getattr(chat.cache, self.how)(rows)
        side.chat = Chat(chat.text[rows], chat.mask[rows], chat.cache)
        return len(rows)


@dataclass(frozen=True, repr=False)
class CopyCache(Step):
    """Go on with a copy of the conversation's cache."""

    def run(self, side: Side) -> Any:
        if (chat := side.chat) is None:
            return None
        side.chat = Chat(chat.text, chat.mask, copy.deepcopy(chat.cache))
        return side.chat.cache.get_seq_length()


@dataclass(frozen=True, repr=False)
class Hide(Step):
    """Hide tokens of the conversation's text from now on, such as a row's padding after its end."""

    row: int = 0
    last: int = 1

    def run(self, side: Side) -> Any:
        if (chat := side.chat) is None or self.row >= len(chat.text) or self.last >= chat.text.shape[1] - 2:
            return None
        chat.mask[self.row, -self.last :] = 0
        return int(chat.mask.sum())


@dataclass(frozen=True, repr=False)
class Leave(Step):
    """Drop the conversation."""

    def run(self, side: Side) -> None:
        side.chat = None
