"""The positions of a prompt with images, as ``generate`` counts them: a private method of transformers.

``GenerationMixin._prepare_position_ids_for_generation``: an engine has to know positions before anything runs. Without
it, engines refuse images; ends when models have a public method that returns positions. Some models keep the
difference to the length in ``rope_deltas``, for a second turn of ``generate``: the copy that is given here keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from transformers import PreTrainedModel

_METHOD = "_prepare_position_ids_for_generation"


def prompt_positions(model_class: type, model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Tensor | None:
    """Return ``[1, T]`` or ``[A, 1, T]`` positions of one prompt; None if this transformers does not say.

    Args:
        model_class: whose method is called.
        model: a copy of the model, in which the method may leave something.
        inputs: what the processor returned, ``input_ids`` ``[1, T]`` among it.
    """
    method = getattr(model_class, _METHOD, None)
    if method is None:
        return None
    positions: Tensor = method(model, inputs["input_ids"], dict(inputs))
    return positions
