"""Run in a process of its own: compare a kept fingerprint with a model made anew, after other imports; print JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import transformers.models.mixtral.modeling_mixtral  # noqa: F401 (imports come in another order)
from transformers.models.llama import modeling_llama  # noqa: F401

import compiled_llm
from compiled_llm.compilation.kept.fingerprint.fingerprint import Fingerprint
from support.compilation.fingerprinted import first_call
from support.parity import FEW_PAGES
from support.tiny_models import ONE_LAYER, tiny_qwen3


def main(kept: str) -> None:
    held = [bytearray(100_000) for _ in range(50)]  # other addresses
    model = compiled_llm.wrap(tiny_qwen3(**ONE_LAYER), **FEW_PAGES)
    call = first_call(model)
    differences = call.compared_with(Fingerprint.decoded(json.loads(Path(kept).read_text())))
    late = [name for name in ("torch._inductor.compile_fx", "torch._inductor.select_algorithm") if name in sys.modules]
    print(json.dumps({"differences": differences, "imported": late, "held": len(held)}))


if __name__ == "__main__":
    main(sys.argv[1])
