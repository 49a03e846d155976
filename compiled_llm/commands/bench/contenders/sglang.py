"""SGLang, in a process and if need be in an environment of its own."""

from __future__ import annotations

from compiled_llm.commands.bench.peer import PeerContender


class SGLang(PeerContender):
    """SGLang's ``Engine.generate``: offline, CUDA graphs, everything as it chooses by itself."""

    name = "sglang"
    summary = "SGLang, offline"
