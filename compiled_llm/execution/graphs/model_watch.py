"""Whether a model computes what it did before: pages in the prefix cache were computed by the model of their time."""

from __future__ import annotations

from transformers import PreTrainedModel

from compiled_llm.compat.huggingface import WRITTEN_BY_GENERATE
from compiled_llm.compat.torch.tensors import version_of
from compiled_llm.compilation.graphs.validity import Weights
from compiled_llm.compilation.tracing.layer_state import State, names_read
from compiled_llm.model.contents import Contents


class ModelWatch:
    """What is remembered of a model: its tensors and how often they were written to, attributes and what those hold.

    What was written through ``.data``, or into tensors of inference mode, leaves no trace, nor does what changes inside
    objects of other kinds, in classes, closures and globals: who does that calls ``Engine.reset_prefix_cache``.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Remember the model as it is now."""
        self._model = model
        self._remember()

    def _remember(self) -> None:
        model, modules = self._model, list(self._model.modules())
        attributes = ((vars(module), name) for module in modules for name in names_read(module))
        self._weights = Weights(model)
        self._state = State(modules)
        self._contents = Contents(held[name] for held, name in attributes if name not in WRITTEN_BY_GENERATE)
        tensors = (*model.parameters(), *model.buffers(), *self._contents.tensors)
        self._tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        self._versions = self._versions_now()

    def changed(self) -> bool:
        """Whether the model may compute something else than at the last call."""
        if self._valid():
            return False
        self._remember()
        return True

    def _valid(self) -> bool:
        return (
            self._weights.valid()
            and self._versions == self._versions_now()
            and self._state.valid()
            and self._contents.valid()
        )

    def _versions_now(self) -> list[int]:
        return list(map(version_of, self._tensors))
