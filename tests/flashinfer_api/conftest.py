from __future__ import annotations

from support.ops.compiling import own_cache

__all__ = ["own_cache"]
