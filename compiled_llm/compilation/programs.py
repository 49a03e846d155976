"""The compiled programs of one model: a symbolic prefill, a decode step for batch 1 and one for all larger batches.

Each ends with the choice of the next tokens, greedy or drawn by each row's own settings. A second prefill reads
embeddings in place of token ids, for those who give ``inputs_embeds``.

Shapes: B rows, T packed tokens, L tokens whose logits are wanted, C of them after which a token is chosen, V
vocabulary, N entries of the page table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm.compat import forget_when_gone, graph_count, own_copy
from compiled_llm.compilation.backend import Inductor, Pass
from compiled_llm.compilation.graphs.validity import Guards
from compiled_llm.compilation.inputs import DecodeInputs, PrefillInputs
from compiled_llm.compilation.outline import KnownState, Outline
from compiled_llm.compilation.passes.normed_products import NormedProducts
from compiled_llm.compilation.passes.products import (
    FusedProducts,
    NormedSums,
    OuterProducts,
    PreparedInAttention,
    SkinnyProducts,
)
from compiled_llm.compilation.sampling import SamplingTables, choose
from compiled_llm.config import WrapConfig
from compiled_llm.model.attention import BATCH_ARGUMENT, PackedTokens, PagedBatch
from compiled_llm.model.fused_weights import FusedWeights

Forward = Callable[..., Any]

PREFILL, DECODE_ONE, DECODE_MANY = "prefill", "decode, batch 1", "decode, larger batches"
PREFILL_EMBEDDED = "prefill from embeddings"


def _prefill(
    model: PreTrainedModel,
    forward: Forward,
    inputs: PrefillInputs,
    tables: SamplingTables,
    pages: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """Run packed tokens through the model.

    Args:
        model: the model.
        forward: its class's own ``forward``.
        inputs: the tokens.
        tables: how rows choose tokens.
        pages: one ``[P, 2, K, S, D]`` a layer.

    Returns:
        ``[L, V]`` logits in the model's dtype and ``[C]`` int64, the next tokens.
    """
    batch = PagedBatch(
        pages=pages,
        indptr=inputs.indptr,
        indices=inputs.indices,
        last_page_len=inputs.last_page_len,
        packed=PackedTokens(inputs.token_rows, inputs.token_positions, inputs.qo_indptr),
    )
    out = forward(
        model,
        position_ids=inputs.positions,
        use_cache=False,
        logits_to_keep=inputs.keep,
        **{"inputs_embeds" if inputs.ids.dim() == 3 else "input_ids": inputs.ids},
        **{BATCH_ARGUMENT: batch},
    )
    logits: Tensor = out.logits[0]
    chosen_at = inputs.positions[0, inputs.keep[inputs.ends]] + 1
    return logits, choose(logits[inputs.ends], inputs.slots, chosen_at, tables)


def _decode(
    model: PreTrainedModel, forward: Forward, inputs: DecodeInputs, tables: SamplingTables, pages: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Run one token of each row through the model, choose the next, and advance the buffers in place.

    Args:
        model: the model.
        forward: its class's own ``forward``.
        inputs: the bucket's buffers; ``tokens``, ``positions`` and ``last_page_len`` advance.
        tables: how rows choose tokens.
        pages: one ``[P, 2, K, S, D]`` a layer.

    Returns:
        ``[B, V]`` logits in the model's dtype and ``[B]`` int64, the next tokens, ``NOT_A_TOKEN`` where there is none.
    """
    batch = PagedBatch(pages, inputs.indptr, inputs.indices, inputs.last_page_len)
    out = forward(
        model,
        input_ids=inputs.tokens[:, None],
        position_ids=inputs.positions[:, None],
        use_cache=False,
        **{BATCH_ARGUMENT: batch},
    )
    logits: Tensor = out.logits[:, -1]
    inputs.positions.add_(1)
    inputs.last_page_len.add_(1)  # not before the layers: decode attention reads the table early
    chosen = choose(logits, inputs.slots, inputs.positions, tables)
    inputs.tokens.copy_(chosen.clamp(min=0))
    return logits, chosen


class Programs:
    """A model's compiled functions; each is called in the model's executor only.

    Attributes:
        recorded: whether Inductor records decode steps as CUDA graphs and replays them.
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
        self._device = device
        self._outlines: dict[Callable[..., Any], Outline] = {}
        self._known_state = KnownState()
        self.recorded = config.uses_trees_on(device.type)
        self.prefill_function = own_copy(_prefill)
        self.decode_one_function = own_copy(_decode)
        self.decode_many_function = own_copy(_decode)
        self._embedded_function = own_copy(_prefill)
        forget_when_gone(self, [*self.functions.values(), self._embedded_function])
        self._fused: list[Pass] = [FusedProducts(weights)] if weights is not None and weights.groups else []
        shared = _options(device)
        decode = {**shared, **_fewer_kernels(device), "triton.cudagraphs": self.recorded}
        options = {
            PREFILL: {**shared, "triton.cudagraphs": False},
            DECODE_ONE: {**decode, **(_few_rows(config, device) or _one_row(device))},
            DECODE_MANY: {**decode, **_few_rows(config, device)},
        }
        made = {name: self.compile(name, function, options[name]) for name, function in self.functions.items()}
        self._prefill, self._decode_one, self._decode_many = made.values()
        # Not what ``explain`` watches.
        self._embedded = self._compiled(self._embedded_function, options[PREFILL])

    def compile(self, name: str, function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
        """Return one of ``functions`` compiled with Inductor ``options``."""
        return self._compiled(function, options)

    def _compiled(self, function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
        decodes = function in (self.decode_one_function, self.decode_many_function)
        passes = _passes(self._config, self._device, self._fused, decodes)
        backend = Inductor(options, passes, in_pieces=self._config.records_on(self._device.type))
        if backend.in_pieces:
            self._outlines[function] = Outline(function, self._known_state)
        return compiled(function, self._config, backend)

    def prefill(
        self, model: PreTrainedModel, inputs: PrefillInputs, tables: SamplingTables, pages: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Run ``_prefill``; T, B, L and C are symbolic and must be at least 2."""
        _mark_symbolic(inputs)
        program = self._embedded if inputs.ids.dim() == 3 else self._prefill
        model = self._outlined(model, inputs, tables, pages)
        logits, tokens = program(model, self._forward, inputs, tables, pages)
        return logits, tokens

    def decode(
        self, model: PreTrainedModel, inputs: DecodeInputs, tables: SamplingTables, pages: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Run ``_decode``; its results are overwritten by the next call where CUDA graphs replay."""
        program = self._decode_one if inputs.tokens.shape[0] == 1 else self._decode_many
        if self.recorded:
            torch.compiler.cudagraph_mark_step_begin()
        model = self._outlined(model, inputs, tables, pages)
        logits, tokens = program(model, self._forward, inputs, tables, pages)
        return logits, tokens

    def guards(
        self,
        model: PreTrainedModel,
        inputs: PrefillInputs | DecodeInputs,
        tables: SamplingTables,
        pages: list[Tensor],
    ) -> Guards:
        """Return what the program that serves ``inputs`` takes for granted; it has run with them before.

        Layers whose tensors have been replaced since then are for ``Weights`` to notice.
        """
        function = self._function_for(inputs)
        arguments = self._arguments(model, inputs, tables, pages)
        outline = self._outlines.get(function)
        if outline is None:
            return Guards(function, arguments)
        return Guards(function, arguments, lambda glance: {"model": outline.of(arguments, glance)})

    def drop_tensors(self) -> None:
        """Hold no tensors of the model between calls, until the next one."""
        for outline in self._outlines.values():
            outline.drop_tensors()

    def _outlined(
        self,
        model: PreTrainedModel,
        inputs: PrefillInputs | DecodeInputs,
        tables: SamplingTables,
        pages: list[Tensor],
    ) -> PreTrainedModel:
        """Return what the program that serves ``inputs`` is called with in place of the model."""
        outline = self._outlines.get(self._function_for(inputs))
        return model if outline is None else outline.prepare(self._arguments(model, inputs, tables, pages))

    def _arguments(self, model: PreTrainedModel, *others: Any) -> dict[str, Any]:
        return dict(
            zip(("model", "forward", "inputs", "tables", "pages"), (model, self._forward, *others), strict=True)
        )

    def _function_for(self, inputs: PrefillInputs | DecodeInputs) -> Callable[..., Any]:
        if isinstance(inputs, PrefillInputs):
            return self._embedded_function if inputs.ids.dim() == 3 else self.prefill_function
        return self.decode_one_function if inputs.tokens.shape[0] == 1 else self.decode_many_function

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


def _passes(config: WrapConfig, device: torch.device, fused: Sequence[Pass], decodes: bool) -> list[Pass]:
    """Return what is done to a program's graph before Inductor sees it; ``fused`` makes one product of several."""
    if device.type == "cpu":  # what Inductor makes of a norm is faster than the op
        return list(fused)
    if not decodes:
        return [OuterProducts(), *fused]
    if config.mode == "compile":  # launching an op's kernel costs the host more than launching one of Inductor's
        return [OuterProducts(), PreparedInAttention(), *fused]
    return [OuterProducts(), PreparedInAttention(), NormedSums(), *fused, NormedProducts()]


def _options(device: torch.device) -> dict[str, Any]:
    """Return Inductor's options for all programs."""
    if device.type == "cpu":
        return {"post_grad_custom_pre_pass": SkinnyProducts()}
    # A kernel begins while the one before it ends (programmatic dependent launch), from Hopper on.
    return {"triton.enable_pdl": torch.cuda.get_device_capability(device) >= (9, 0)}


def _fewer_kernels(device: torch.device) -> dict[str, Any]:
    """Return Inductor's further options for steps whose kernels take as long to start as to run."""
    # Such as norm and rotary embedding of queries, and those of keys, where they are not left to attention.
    return {"combo_kernels": True} if device.type == "cuda" else {}


def _few_rows(config: WrapConfig, device: torch.device) -> dict[str, Any]:
    """Return Inductor's further options for decode steps with the op's kernels, if they have those."""
    # Recorded only: launching the op's kernels costs the host more than launching cuBLAS's.
    recorded = device.type == "cuda" and config.mode != "compile"
    return {"post_grad_custom_pre_pass": SkinnyProducts()} if recorded else {}


def _one_row(device: torch.device) -> dict[str, Any]:
    """Return Inductor's further options for decode steps of one row without the op's kernels."""
    # A product is a matrix-vector one, whose Triton reduction this search brings near the bandwidth.
    return {"coordinate_descent_tuning": True} if device.type == "cuda" else {}


def _mark_symbolic(inputs: PrefillInputs) -> None:
    """Say which sizes of a prefill's inputs change from call to call."""
    for name, tensor in inputs._asdict().items():
        if name != "indices":
            torch._dynamo.mark_dynamic(tensor, 1 if name in ("ids", "positions") else 0)


def compiled(function: Callable[..., Any], config: WrapConfig, backend: Inductor) -> Callable[..., Any]:
    """Return the function compiled as ``config.mode`` says."""
    if config.mode == "eager":
        return function
    return torch.compile(function, fullgraph=True, dynamic=False, backend=backend)
