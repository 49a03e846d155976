"""What ``batch_invariant`` needs of a model's weights, and of how it multiplies with them."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from compiled_llm.kinds.refusals import UnsupportedModelError
from compiled_llm.model.weights.fused_weights import LinearRecorder

_PLAIN = (torch.Tensor, nn.Parameter)


def check_invariance(model: PreTrainedModel, recorder: LinearRecorder, has_experts: bool, packed: bool) -> None:
    """Raise UnsupportedModelError if the model multiplies otherwise than by linear layers with plain weights."""
    # ``recorder`` has seen a forward, but not the ops of experts if the model ``has_experts``, nor those of weights
    # that are ``packed``. The bits of quantised weights' kernels, and of products of many matrices, as mixtures of
    # experts have them, depend on the batch.
    quantised = packed or getattr(model.config, "quantization_config", None) is not None
    foreign = [name for name, weight in model.named_parameters() if type(weight.data) not in _PLAIN]
    foreign += [name for name, module in model.named_modules() if type(module).__module__.startswith("torch.ao.")]
    if quantised or foreign:
        raise UnsupportedModelError(
            f"wrap: batch_invariant=True: {foreign[0] if foreign else type(model).__name__} is quantised, and products "
            "with such weights have no kernels whose bits do not depend on the number of rows; load the model without "
            "quantisation, or wrap it without batch_invariant"
        )
    others = [*(["fused_experts"] if has_experts else []), *recorder.other_matmuls]
    if others:
        raise UnsupportedModelError(
            f"wrap: batch_invariant=True: {type(model).__name__} multiplies by {', '.join(others)}, as "
            "mixtures of experts do, besides its linear layers, and there are no kernels for that whose bits do not "
            "depend on the number of rows; wrap it without batch_invariant"
        )
