"""Kinds of layers: what each keeps of a token, how it attends, and what works with it."""

# Nobody else names a kind: all ask ``layer.kind``.
