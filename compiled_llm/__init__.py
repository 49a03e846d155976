"""Run a HuggingFace causal language model as one compiled graph over FlashInfer's paged attention."""

from compiled_llm.config import WrapConfig
from compiled_llm.layers import UnsupportedModelError
from compiled_llm.page_table import OutOfPagesError
from compiled_llm.stats import Stats
from compiled_llm.wrap import unwrap, wrap

__version__ = "0.1.0"

__all__ = ["OutOfPagesError", "Stats", "UnsupportedModelError", "WrapConfig", "unwrap", "wrap"]
