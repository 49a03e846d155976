"""The op that attends as a variant says by a backend's kernels, and how plans of FlashInfer and the reference do it."""

# Shapes: B rows, T packed tokens, H query heads, K kv heads, D head dimension, P pages, S page size, N page numbers of
# all rows.

from __future__ import annotations

from typing import Any

from torch import Tensor

from compiled_llm_ops.attention import prefill
from compiled_llm_ops.attention.lse import kernel_of_both, over_pages, with_lse
from compiled_llm_ops.contracts import Geometry
from compiled_llm_ops.library import define_op
from compiled_llm_ops.protocol import KERNELS, launch_of, owner_of, plan_of
from compiled_llm_ops.variants.contracts import PlannedAttentionVariant
from compiled_llm_ops.variants.flashinfer_source import flashinfer_arguments, flashinfer_variant
from compiled_llm_ops.variants.packed import check
from compiled_llm_ops.variants.plain import attend_packed
from compiled_llm_ops.variants.registry import variant_named


@define_op(PlannedAttentionVariant, writes=("workspace",))
def planned_attention_variant(args: PlannedAttentionVariant) -> Tensor:
    """``paged_attention_variant`` by the kernels of a backend that has ``functions``, which are planned.

    Args:
        query: ``[T, H, D]``, any strides; H a multiple of K.
        pages: ``[P, 2, K, S, D']`` with D' >= D; columns past D are zero. For values of another size E
            ``[P, K, S, D + E]``, each key followed by its value, on a CPU only.
        qo_indptr: ``[B + 1]`` int32, where each row's queries begin.
        indptr: ``[B + 1]`` int32, where each row's pages begin in ``indices``.
        indices: ``[N]`` int32, page numbers.
        last_page_len: ``[B]`` int32, tokens in each row's last page, 1 to S.
        plan: ``[N]`` uint8, as of ``paged_attention``, made with the variant's key as ``function``.
        workspace: ``[M]`` uint8, belongs to ``plan``, written.
        name: of a variant that ``register_variant`` has registered, or its ``key``.
        tensors: those of the variant, as of ``paged_attention_variant``.
        scale: factor on the logits, before the variant has them.
        window_left: tokens visible to the left of each query, of which the variant may hide some; -1 for all.
        key_scale: ``[K]`` float32, by kv head, for pages of ``torch.float8_e4m3fn`` only: what keys in the pages are to
            be multiplied with. None for 1.
        value_scale: ``[K]`` float32, the same for values.

    Returns:
        ``[T, H, D]``, contiguous, of the query's dtype; ``[T, H, E]`` for values of another size.

    Raises:
        ValueError: shapes or dtypes do not fit together, or the variant is not registered.
        RuntimeError: on CUDA, ``plan`` holds no plan.

    Source:
        FlashInfer's ``BatchPrefillWithPagedKVCacheWrapper`` with ``jit_args``
        (https://docs.flashinfer.ai/api/attention.html).
    """
    variant_named("planned_attention_variant", args.name)
    return over_pages(args.query, args.pages)


planned_attention_variant_lse = with_lse(planned_attention_variant)


@kernel_of_both(planned_attention_variant, "CPU")
def _cpu(args: PlannedAttentionVariant, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    if plan_of(args.plan) is not None:
        return _as_planned(args, wants_lse)
    return attend_packed(check("planned_attention_variant", args, wants_lse), args)


@kernel_of_both(planned_attention_variant, "CUDA")
def _as_planned(args: PlannedAttentionVariant, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    variant, plan = check("planned_attention_variant", args, wants_lse), owner_of(args.plan)
    launch = launch_of("planned_attention_variant", plan, "functions")
    tensors = [tensor.contiguous() for tensor in args.tensors]

    def planned(query: Tensor, out: Tensor, lse: Tensor | None) -> None:
        launch(plan, args._replace(query=query, name=variant.key, tensors=tensors), out, lse)

    return prefill.launch(planned, args.query, args.pages, wants_lse)


class FunctorsOfVariants:
    """FlashInfer's kernels with the functor of a variant; see ``flashinfer.functors.Functors``."""

    def __call__(self, plan: Any, args: PlannedAttentionVariant, out: Tensor, lse: Tensor | None) -> None:
        plan.launch_functor(args, flashinfer_arguments(args.name, args.tensors, args.scale), out, lse)

    def jit_args(self, geometry: Geometry) -> list[Any]:
        return flashinfer_variant(geometry.function).jit_args(geometry.dtype, geometry.kv_dtype, geometry.head_dim)

    def has_softmax(self, geometry: Geometry) -> bool:
        return variant_named("plan_paged_attention", geometry.function).softmax


def _in_plain_pytorch(plan: Any, args: PlannedAttentionVariant, out: Tensor, lse: Tensor | None) -> None:
    result, result_lse = attend_packed(variant_named("planned_attention_variant", args.name), args)
    out.copy_(result)
    if lse is not None:
        lse.copy_(result_lse)


KERNELS["flashinfer"]["functions"] = FunctorsOfVariants()
KERNELS["reference"]["functions"] = _in_plain_pytorch
