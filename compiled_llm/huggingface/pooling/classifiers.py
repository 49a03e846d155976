"""Wrapped classifiers: layers and head run compiled, and HuggingFace's own forward does the rest."""

# Programs run a class whose forward gives the scores of chosen tokens, as a causal LM gives logits. A call of the model
# is HuggingFace's own forward around what these programs say of all tokens: which token counts, losses and outputs are
# its own. Shapes: B rows, Q columns, C labels.

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)

from compiled_llm.compat.cache_names import output_field
from compiled_llm.huggingface.forward.forward import run_forward
from compiled_llm.kinds.refusals import UnsupportedModelError
from compiled_llm.model.traced.shallow_copies import shallow_copy

if TYPE_CHECKING:
    from compiled_llm.huggingface.handle import Wrapped
    from compiled_llm.huggingface.pooling import classifiers as this
    from compiled_llm.huggingface.wrapped_model import ClassifiersPart

    checked: ClassifiersPart = this


def check(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError, or ValueError, if a classifier is not transformers' generic one, or contradicts."""
    name = type(model).__name__
    head = getattr(model, "score", None)
    if not (isinstance(model, GenericForSequenceClassification) and isinstance(head, nn.Linear)):
        raise UnsupportedModelError(
            f"wrap: {name} is not transformers' generic classifier, whose head scores the last token; use it unwrapped"
        )
    if head.out_features != (labels := model.config.num_labels):
        raise ValueError(
            f"wrap: {name} has num_labels={labels} in its config, and a head of {head.out_features} labels; load it "
            f"with num_labels={head.out_features}"
        )


@functools.cache
def scoring_class(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a subclass of a classifier's class whose forward scores the tokens of ``logits_to_keep``, [B, Q', C]."""

    def forward(self: Any, *args: Any, logits_to_keep: int | Tensor = 0, **kwargs: Any) -> Any:
        out = self.base_model(*args, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        kind = SequenceClassifierOutputWithPast
        field = output_field(kind)
        more = {field: getattr(out, field, None), "hidden_states": getattr(out, "hidden_states", None)}
        return kind(logits=self.score(out.last_hidden_state[:, kept]), **more)

    own = inspect.signature(base.forward)
    kept = inspect.Parameter("logits_to_keep", inspect.Parameter.KEYWORD_ONLY, default=0)
    parameters = [*own.parameters.values()]
    parameters.insert(len(parameters) - 1, kept)
    forward.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    forward.__annotations__["return"] = SequenceClassifierOutputWithPast
    members = {"__module__": base.__module__, "__qualname__": base.__qualname__, "forward": forward}
    return cast(type[PreTrainedModel], type(base.__name__, (base,), members))


def classify(base: Any, self: Wrapped, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Run a wrapped classifier's ``forward``: its class's own, around compiled layers and head."""
    scores = _Scores(self, scoring_class(base).forward)
    modules = {**self._modules, self.base_model_prefix: scores, "score": nn.Identity()}
    return base.forward(shallow_copy(self, base, _modules=modules), *args, **kwargs)


class _Scores(nn.Module):
    """What stands for the layers of a classifier: scores of all tokens in place of hidden states."""

    def __init__(self, model: Wrapped, original: Callable[..., object]) -> None:
        super().__init__()
        self._call = functools.partial(run_forward, original, model)

    def forward(self, *args: object, **kwargs: object) -> BaseModelOutputWithPast:
        given = {name: value for name, value in kwargs.items() if value is not None}
        # Nobody goes on with the cache of a text that is scored.
        out = cast(CausalLMOutputWithPast, self._call(args, {"use_cache": False, **given}))
        field = output_field(BaseModelOutputWithPast)
        more: dict[str, Any] = {field: getattr(out, output_field(type(out)), None), "hidden_states": out.hidden_states}
        return BaseModelOutputWithPast(last_hidden_state=out.logits, **more)


def refuse_to_generate(self: PreTrainedModel, /, *args: object, **kwargs: object) -> NoReturn:
    """Say that classifiers do not generate."""
    raise UnsupportedModelError(f"generate: {type(self).__name__} scores texts, and writes none; call the model")
