"""FlashInfer's API over our ops: its names and arguments, on a CPU, too, and under ``torch.compile(fullgraph=True)``.

``import compiled_llm_ops.flashinfer_api as flashinfer`` in place of ``import flashinfer``.
"""

from compiled_llm_ops.flashinfer_api.quantization import packbits, segment_packbits

__all__ = ["packbits", "segment_packbits"]
