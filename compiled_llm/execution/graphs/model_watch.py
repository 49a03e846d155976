"""Notices that a model has changed: pages in the prefix cache hold keys and values of the model as it was."""

from __future__ import annotations

from transformers import PreTrainedModel

from compiled_llm.compat.huggingface import WRITTEN_BY_GENERATE
from compiled_llm.compat.torch.tensors import version_of
from compiled_llm.compilation.graphs.validity import Weights
from compiled_llm.compilation.tracing.layer_state import State, names_read
from compiled_llm.model.contents import Contents


class ModelWatch:
    """Remembers a model's tensors and how often they were written to, its attributes and the containers in them.

    Writes through ``.data`` or into tensors of inference mode leave no trace, nor do changes inside objects of other
    kinds, in classes, closures and globals: after those, call ``Engine.reset_prefix_cache``.
    """

    def __init__(self, model: PreTrainedModel) -> None:
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
        """Return whether the model may compute something else than at the last call."""
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
