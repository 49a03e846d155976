"""The settings of an engine's loop, as a user of ``Engine`` gives them."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from compiled_llm.engine.admission.policies import AdmissionName
from compiled_llm.engine.chunks.policies import MaxStep

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
"""Of what the model says, or of what tokens are drawn from: after penalties, biases, masks, temperature and filters."""

Mixed = Literal["auto"] | bool


class LoopSettings(NamedTuple):
    """The user's settings of an engine's loop, as of ``Engine``; features read their own."""

    max_num_seqs: int
    max_step_ms: MaxStep = None
    prefix_cache: bool = True
    logprobs_mode: LogprobsMode = "raw_logprobs"
    watch_model: bool = True
    mixed: Mixed = "auto"
    admission: AdmissionName = "auto"
    speculation: Any = None  # its ``SpeculativeConfig``
    max_model_len: int | None = None
