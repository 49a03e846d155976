"""The package flash-attn behind our ops: version 2.8 from PyPI, or version 3 of the same repository on Hopper."""

# Read from its sources at 0251105 (2.8.4 and 3.0.0). On a GPU we have run version 3 alone, as vLLM 0.24 builds it. What
# is used is public: ``flash_attn.flash_attn_varlen_func``, and ``flash_attn_interface.flash_attn_with_kvcache``.
