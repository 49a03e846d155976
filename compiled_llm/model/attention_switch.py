"""The attention of a thread, and its experts: ours while it runs one of our programs, else the user's own."""

# A wrapped model at rest keeps the user's implementations, also for threads that do not compute. So anything that does
# not pass through us (inner modules, other models of the same config, training, saving) is untouched.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from compiled_llm.compat import huggingface
from compiled_llm.compat.huggingface import implementations_read
from compiled_llm.model.attention import NAME
from compiled_llm.model.layers.experts import experts_name, experts_of, log_others
from compiled_llm.model.weights.weights_lock import WeightsLock


def attention_configs(model: nn.Module) -> list[PretrainedConfig]:
    """Return the configs whose attention implementation modules read, each once: a copied layer has a copy of it."""
    configs = (vars(module).get("config") for module in model.modules())
    return list({id(config): config for config in configs if isinstance(config, PretrainedConfig)}.values())


def attention_function_of_user(model: PreTrainedModel) -> str | None:
    """Return the name of an attention function of the user's that the language model calls; None if it calls none."""
    return _first_of_user(_of_language(attention_configs(model), model))


def _of_language(configs: Sequence[PretrainedConfig], model: PreTrainedModel) -> list[PretrainedConfig]:
    """Return the configs of the language model; HuggingFace's own forward runs the towers beside it."""
    kind = model.config.get_text_config(decoder=True).model_type
    return [config for config in configs if config.model_type == kind]


def _first_of_user(configs: Sequence[PretrainedConfig]) -> str | None:
    return next(filter(None, map(huggingface.attention_function_of_user, configs)), None)


def paged_attention_in(model: nn.Module) -> AbstractContextManager[None]:
    """For the block, a model's attention and experts are ours in this thread."""
    return implementations_read(attention_configs(model), NAME, experts_name(experts_of(model)))


class AttentionSwitch:
    """A model's attention, and its experts, in this thread."""

    def __init__(self, model: PreTrainedModel) -> None:
        # how many layers have experts that our ops compute, and others, by the reason; as ``experts_of``
        self.experts: Mapping[str, int] = {}
        self.find_configs(model)
        self._weights = WeightsLock()

    def find_configs(self, model: PreTrainedModel) -> None:
        self._configs = attention_configs(model)
        self._of_language = _of_language(self._configs, model)
        before, self.experts = self.experts, experts_of(model)
        if self.experts != before:
            log_others(model, self.experts)

    def function_of_user(self) -> str | None:
        """Return the name of an attention function of the user's that the model calls now; None if it calls none."""
        return _first_of_user(self._of_language)

    def paged(self) -> AbstractContextManager[None]:
        return implementations_read(self._configs, NAME, experts_name(self.experts))

    def named(self, name: str) -> AbstractContextManager[None]:
        """Let another function that is registered be the attention of all parts, the towers among them."""
        return implementations_read(self._configs, name)

    @contextmanager
    def original(self) -> Iterator[None]:
        """Use the model's own attention and experts for the duration, also inside ``paged``."""
        with self._weights.read(), implementations_read((), None):
            yield

    def moving_weights(self, caller: int | None) -> AbstractContextManager[None]:
        """Wait until no thread but ``caller`` is inside ``original``, and let none enter it for the duration."""
        return self._weights.move(caller)
