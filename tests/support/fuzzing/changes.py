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
    """A method replaced on the instance, by one that changes what the original gives."""

    method: str = "forward"

    def run(self, side: Side) -> None:
        side.undo.pop(self.method, lambda: None)()
        original = getattr(side.model, self.method)

        @functools.wraps(original)
        def own(*args: Any, **kwargs: Any) -> Any:
            return OVERRIDES[self.method](side, original(*args, **kwargs))

        setattr(side.model, self.method, own)
        side.undo[self.method] = functools.partial(delattr, side.model, self.method)


def _other_logits(side: Side, output: Any) -> Any:
    output[0 if isinstance(output, tuple) else "logits"].mul_(torch.tensor(-0.7))
    return output


def _other_ids(side: Side, inputs: Any) -> Any:
    ids = inputs.get("input_ids")
    return inputs if ids is None else {**inputs, "input_ids": ids.clamp(max=20)}


def _noted(side: Side, inputs: Any) -> Any:
    side.note("updated")
    return inputs


OVERRIDES: dict[str, Callable[[Side, Any], Any]] = {
    "forward": _other_logits,
    "prepare_inputs_for_generation": _other_ids,
    "_update_model_kwargs_for_generation": _noted,
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


def _weight(model: PreTrainedModel) -> nn.Parameter:
    return next(_attention(model).parameters())


def _new_parameter(model: PreTrainedModel) -> None:
    layer = next(module for module in layers_of(model)[0].modules() if isinstance(module, nn.Linear))
    layer.weight = nn.Parameter(layer.weight.detach() * 0.9)


def _loaded(model: PreTrainedModel) -> None:
    model.load_state_dict({name: value.flip(0) * 0.95 for name, value in model.state_dict().items()})


def _resized(model: PreTrainedModel) -> None:
    torch.manual_seed(0)
    model.resize_token_embeddings(model.config.get_text_config(decoder=True).vocab_size + 8, mean_resizing=False)


_WAYS: dict[str, Callable[[PreTrainedModel], object]] = {
    "in place": lambda model: _weight(model).copy_(_weight(model).roll(1, dims=0)),
    "data": lambda model: setattr(_weight(model), "data", -_weight(model).data),
    "new parameter": _new_parameter,
    "swapped module": lambda model: layers_of(model).__setitem__(0, copy.deepcopy(layers_of(model)[0])),
    "load_state_dict": _loaded,
    "resize_token_embeddings": _resized,
    "to bfloat16 and back": lambda model: model.to(torch.bfloat16).to(torch.float32),
    "to float64": lambda model: model.to(torch.float64),
    "to float32": lambda model: model.to(torch.float32),
    "requires no gradients": lambda model: model.requires_grad_(False),
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


class OfChat(Step):
    """A step that a conversation takes, if there is one that it fits."""

    def run(self, side: Side) -> Any:
        if side.chat is not None and self.fits(side.chat):
            side.chat = self.changed(side.chat)
            return None if side.chat is None else [int(side.chat.mask.sum()), int(side.chat.cache.get_seq_length())]
        return None

    def fits(self, chat: Chat) -> bool:
        return True

    def changed(self, chat: Chat) -> Chat | None:
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class Crop(OfChat):
    """Forget the last tokens of the conversation."""

    tokens: int = 1

    def fits(self, chat: Chat) -> bool:
        return bool(chat.cache.get_seq_length() > self.tokens)

    def changed(self, chat: Chat) -> Chat:
        chat.cache.crop(-self.tokens)
        length = chat.cache.get_seq_length()
        return Chat(chat.text[:, :length], chat.mask[:, :length], chat.cache)


@dataclass(frozen=True, repr=False)
class Select(OfChat):
    """Take other rows of the conversation: ``how`` is a method of caches, ``rows`` what it gets."""

    how: str = "reorder_cache"
    rows: tuple[int, ...] = (0,)

    def fits(self, chat: Chat) -> bool:
        return len(chat.text) > max(self.rows)

    def changed(self, chat: Chat) -> Chat:
        rows = torch.tensor(self.rows)
        if self.how == "batch_repeat_interleave":
            rows = torch.arange(len(chat.text)).repeat_interleave(len(self.rows))
            chat.cache.batch_repeat_interleave(len(self.rows))
        else:
            getattr(chat.cache, self.how)(rows)
        return Chat(chat.text[rows], chat.mask[rows], chat.cache)


@dataclass(frozen=True, repr=False)
class CopyCache(OfChat):
    """Go on with a copy of the conversation's cache."""

    def changed(self, chat: Chat) -> Chat:
        return Chat(chat.text, chat.mask, copy.deepcopy(chat.cache))


@dataclass(frozen=True, repr=False)
class Hide(OfChat):
    """Hide tokens of the conversation's text from now on, such as a row's padding after its end."""

    row: int = 0
    last: int = 1

    def fits(self, chat: Chat) -> bool:
        return self.row < len(chat.text) and self.last < chat.text.shape[1] - 2

    def changed(self, chat: Chat) -> Chat:
        chat.mask[self.row, -self.last :] = 0
        return chat


@dataclass(frozen=True, repr=False)
class Leave(OfChat):
    """Drop the conversation."""

    def changed(self, chat: Chat) -> None:
        return None
