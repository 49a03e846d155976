"""PyTorch's attention over packed queries as a backend of prefill; see ``protocol.Backend``."""

from __future__ import annotations

from torch import Tensor

from compiled_llm_ops.contracts import Geometry
from compiled_llm_ops.protocol import Installation
from compiled_llm_ops.varlen.rows import PackedRows, VarlenKernels, wrong_page_size
from compiled_llm_ops.varlen.torch.install import TorchInstallation, varlen


class TorchVarlen(VarlenKernels):
    """``varlen_attn_out``, which is ``varlen_attn`` into a tensor that is there; it has no soft cap."""

    # It launches the kernels of flash-attn 2 that PyTorch has taken over. They wait for nothing, so that a CUDA graph
    # may capture them. Rows are not split (``num_splits=1``): parts of packed rows are not added up rightly there
    # (https://github.com/Dao-AILab/flash-attention/issues/1217, https://github.com/pytorch/pytorch/issues/194167).

    installation: Installation = TorchInstallation()

    def missing_kernel(self, geometry: Geometry) -> str | None:
        if geometry.logits_soft_cap > 0:
            return f"torch.nn.attention.varlen does not cap logits, and these are capped at {geometry.logits_soft_cap}"
        return super().missing_kernel(geometry) or wrong_page_size(geometry)

    def attend(self, rows: PackedRows, out: Tensor, wants_lse: bool) -> Tensor | None:
        module = varlen()
        found = module.varlen_attn_out(
            out,
            rows.query,
            rows.keys,
            rows.values,
            cu_seq_q=rows.query_starts,
            cu_seq_k=rows.keys_of.starts,
            max_q=rows.most_queries,
            max_k=rows.most_keys,
            return_aux=module.AuxRequest(lse=wants_lse),
            scale=rows.scale,
            window_size=rows.window,
            enable_gqa=True,
            seqused_k=rows.keys_of.lengths,
            block_table=rows.keys_of.table,
            num_splits=1,
        )
        if not wants_lse:
            return None
        lse: Tensor = found[1]  # [H, T], whatever its docstring says
        return lse


BACKEND = TorchVarlen()
