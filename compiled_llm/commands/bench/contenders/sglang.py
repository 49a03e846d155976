"""SGLang, in a process of its own, and in an environment of its own if need be."""

from __future__ import annotations

from compiled_llm.commands.bench.peer import PeerContender


class SGLang(PeerContender):
    """SGLang's ``Engine.generate``: offline, CUDA graphs, everything as it chooses by itself."""

    name = "sglang"
    summary = "SGLang, offline"
