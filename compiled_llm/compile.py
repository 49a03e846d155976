"""The compiled programs of one model: a symbolic prefill, a decode step for batch 1 and one for all larger batches.

A second prefill reads embeddings in place of token ids, for those who give ``inputs_embeds``.

Shapes: B rows, T packed tokens, L tokens whose logits are wanted, V vocabulary, N entries of the page table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm.attention import BATCH_ARGUMENT, PagedBatch
from compiled_llm.compat import before_cache_lookup, forget_when_gone, graph_count, own_copy
from compiled_llm.config import WrapConfig
from compiled_llm.fused import FusedWeights
from compiled_llm.kv_cache import DecodeInputs
from compiled_llm.passes import FusedProducts, SkinnyProducts

Forward = Callable[..., Any]

PREFILL, DECODE_ONE, DECODE_MANY = "prefill", "decode, batch 1", "decode, larger batches"
PREFILL_EMBEDDED = "prefill from embeddings"


def _prefill(
    model: PreTrainedModel,
    forward: Forward,
    ids: Tensor | None,
    positions: Tensor,
    keep: Tensor,
    batch: PagedBatch,
    embeddings: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run packed tokens through the model.

    Args:
        model: the model.
        forward: its class's own ``forward``.
        ids: ``[1, T]`` int64; None where there are embeddings.
        positions: ``[1, T]`` int64, rotary positions.
        keep: ``[L]`` int64, the tokens whose logits are wanted.
        batch: the page table; ``[T]`` and ``[B]`` columns.
        embeddings: ``[1, T, hidden]`` in the model's dtype, or None.

    Returns:
        ``[L, V]`` logits in the model's dtype and ``[L]`` int64, the most likely next tokens.
    """
    out = forward(
        model,
        position_ids=positions,
        use_cache=False,
        logits_to_keep=keep,
        **({"input_ids": ids} if embeddings is None else {"inputs_embeds": embeddings}),
        **{BATCH_ARGUMENT: batch},
    )
    logits = out.logits[0]
    return logits, logits.argmax(dim=-1)


def _decode(model: PreTrainedModel, forward: Forward, inputs: DecodeInputs, pages: list[Tensor]) -> Tensor:
    """Run one token of each row through the model and advance the buffers in place.

    Args:
        model: the model.
        forward: its class's own ``forward``.
        inputs: the bucket's buffers; ``tokens``, ``positions`` and ``last_page_len`` advance.
        pages: one ``[P, 2, K, S, D]`` a layer.

    Returns:
        ``[B, V]`` logits in the model's dtype.
    """
    page_size = pages[0].shape[3]
    inputs.last_page_len.add_(1)
    full_pages = inputs.indptr[1:] - inputs.indptr[:-1] - 1
    batch = PagedBatch(
        pages=pages,
        token_rows=inputs.token_rows,
        token_positions=full_pages * page_size + inputs.last_page_len - 1,
        qo_indptr=inputs.qo_indptr,
        indptr=inputs.indptr,
        indices=inputs.indices,
        last_page_len=inputs.last_page_len,
    )
    out = forward(
        model,
        input_ids=inputs.tokens[:, None],
        position_ids=inputs.positions[:, None],
        use_cache=False,
        **{BATCH_ARGUMENT: batch},
    )
    logits: Tensor = out.logits[:, -1]
    inputs.tokens.copy_(logits.argmax(dim=-1))
    inputs.positions.add_(1)
    return logits


class Programs:
    """A model's compiled functions; each is called on the model's device thread only.

    Attributes:
        recorded: whether decode steps are recorded as CUDA graphs and replayed.
    """

    def __init__(
        self, config: WrapConfig, forward: Forward, device: torch.device, weights: FusedWeights | None = None
    ) -> None:
        """Prepare; compiling happens at the first call of each program.

        Args:
            config: the options of ``wrap``.
            forward: the model class's own ``forward``.
            device: where the model lives.
            weights: what is multiplied as one; it must be ``intact`` at each call.
        """
        self._forward = forward
        self._config = config
        self.recorded = config.mode == "reduce-overhead" and device.type == "cuda"
        self.prefill_function = own_copy(_prefill)
        self.decode_one_function = own_copy(_decode)
        self.decode_many_function = own_copy(_decode)
        graphs = {"triton.cudagraphs": self.recorded}
        # At batch 1 a product is a matrix-vector one, whose Triton reduction this search brings near the bandwidth.
        tuned = {"coordinate_descent_tuning": True} if device.type == "cuda" else {}
        self._embedded_function = own_copy(_prefill)
        forget_when_gone(self, [*self.functions.values(), self._embedded_function])
        products: dict[str, Any] = {"post_grad_custom_pre_pass": SkinnyProducts()} if device.type == "cpu" else {}
        if weights is not None and weights.groups:
            products |= {"pre_grad_custom_pass": FusedProducts(weights), **before_cache_lookup()}
        options = {
            PREFILL: {"triton.cudagraphs": False, **products},
            DECODE_ONE: {**graphs, **tuned, **products},
            DECODE_MANY: {**graphs, **products},
        }
        made = {name: self.compile(name, function, options[name]) for name, function in self.functions.items()}
        self._prefill, self._decode_one, self._decode_many = made.values()
        self._embedded = compiled(self._embedded_function, config, options[PREFILL])  # not what ``explain`` watches

    def compile(self, name: str, function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
        """Return one of ``functions`` compiled with Inductor ``options``."""
        return compiled(function, self._config, options)

    def prefill(
        self, model: PreTrainedModel, ids: Tensor, positions: Tensor, keep: Tensor, batch: PagedBatch
    ) -> tuple[Tensor, Tensor]:
        """Run ``_prefill``; T, B and L are symbolic and must be at least 2."""
        _mark_symbolic(ids, positions, keep, batch)
        logits, tokens = self._prefill(model, self._forward, ids, positions, keep, batch)
        return logits, tokens

    def prefill_embedded(
        self, model: PreTrainedModel, embeddings: Tensor, positions: Tensor, keep: Tensor, batch: PagedBatch
    ) -> tuple[Tensor, Tensor]:
        """Run ``_prefill`` over embeddings; sizes as in ``prefill``."""
        _mark_symbolic(embeddings, positions, keep, batch)
        logits, tokens = self._embedded(model, self._forward, None, positions, keep, batch, embeddings)
        return logits, tokens

    def decode(self, model: PreTrainedModel, inputs: DecodeInputs, pages: list[Tensor]) -> Tensor:
        """Run ``_decode``; its logits are overwritten by the next call where CUDA graphs replay."""
        program = self._decode_one if inputs.tokens.shape[0] == 1 else self._decode_many
        torch.compiler.cudagraph_mark_step_begin()
        logits: Tensor = program(model, self._forward, inputs, pages)
        return logits

    @property
    def decode_many_is_new(self) -> bool:
        """Whether decode for larger batches has not been compiled yet."""
        return graph_count(self.decode_many_function) == 0

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """What is compiled, by name; prefill from embeddings once it was needed."""
        embedded = {PREFILL_EMBEDDED: self._embedded_function} if graph_count(self._embedded_function) else {}
        return {
            PREFILL: self.prefill_function,
            **embedded,
            DECODE_ONE: self.decode_one_function,
            DECODE_MANY: self.decode_many_function,
        }

    def graph_counts(self) -> dict[str, int]:
        """Return how many graphs each program has been compiled into; more than one is a recompile."""
        return {name: graph_count(function) for name, function in self.functions.items()}


def _mark_symbolic(inputs: Tensor, positions: Tensor, keep: Tensor, batch: PagedBatch) -> None:
    """Say which sizes of a prefill's inputs change from call to call; ``inputs`` are token ids or embeddings."""
    for tensor in (keep, *batch[1:5], batch.last_page_len):
        torch._dynamo.mark_dynamic(tensor, 0)
    for tensor in (inputs, positions):
        torch._dynamo.mark_dynamic(tensor, 1)


def compiled(function: Callable[..., Any], config: WrapConfig, options: dict[str, Any]) -> Callable[..., Any]:
    """Return the function compiled as ``config.mode`` says, with Inductor ``options`` of its own."""
    if config.mode == "eager":
        return function
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)
