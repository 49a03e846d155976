"""``explain``: trace a model's programs, whatever state it is in, and say what stands in the way."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from compiled_llm.config import WrapConfig
from compiled_llm.execution.lifecycle.runtime import Runtime, runtime_of
from compiled_llm.execution.reporting.inner_reasons import OTHER_OUTPUTS, asked_by_config, inner_reasons
from compiled_llm.explaining.checks import breaks
from compiled_llm.explaining.checks.graph_checks import uncapturable
from compiled_llm.explaining.checks.recompiles import environment_in, recompiles_of
from compiled_llm.explaining.dump import Dump, new_folder
from compiled_llm.explaining.findings import Finding, Findings, general
from compiled_llm.explaining.history import history_of, timings_of
from compiled_llm.explaining.profile.timings import Timing
from compiled_llm.explaining.report import Report
from compiled_llm.explaining.tracing import Sandbox, Trace
from compiled_llm.kinds.refusals import UnsupportedModelError
from compiled_llm.kinds.registry import packing
from compiled_llm.model.attention import BATCH_ARGUMENT
from compiled_llm.model.attention_switch import paged_attention_in
from compiled_llm.model.checks import check_model, check_placement
from compiled_llm.model.facts import ModelFacts
from compiled_llm.model.inputs import check_prompt
from compiled_llm.model.layer_probe import UnpagedCallError, probe_layers
from compiled_llm.model.places import blame, stack_of
from compiled_llm.model.probes.mask_probe import check_patterns
from compiled_llm.model.restore import restored
from compiled_llm.model.traced.stand_ins import StandIns, stand_ins_for
from compiled_llm.model.weights.foreign_weights import changes_in_first_call, check_weights
from compiled_llm.model.weights.fused_weights import LinearRecorder

_INTERFACE = (
    "Use the model unwrapped; or let its attention layers call ALL_ATTENTION_FUNCTIONS[config._attn_implementation], "
    "and its forward hand keyword arguments on to them, as the Llama of transformers does."
)
_DEFAULT_PROMPTS = ([1, 2, 3], [4, 5, 6, 7, 8], [9, 10])


def explain(
    model: PreTrainedModel,
    example_inputs: Mapping[str, Tensor] | Tensor | None = None,
    *,
    timings: bool | Sequence[int] = False,
    dump: str | PathLike[str] | None = None,
) -> Report:
    """Find what keeps a model from running as one graph, line by line, and say what to do about it.

    The model's forward runs a few times, over a few pages of its own, as prefill and as decode step. It stays as it
    was: wrapped or not, with its attention, hooks and buffers.

    Args:
        model: a causal language model, wrapped or not, working or broken.
        example_inputs: what a tokenizer returns, or token ids ``[B, T]``, to run it on; some tokens if None.
        timings: also say where the time of prefill and of decode steps goes: at these batch sizes; if True, at those
            that a wrapped model has ready, else at 1. A model that is not wrapped is compiled for it, which takes as
            long as the first call of a wrapped one.
        dump: a folder to write what is made of the model on the way to kernels: bytecode, guards, graphs and
            Inductor's code, and the report. It is compiled again for it.

    Raises:
        TypeError: ``model`` is no HuggingFace model.
        ValueError: ``example_inputs`` hold no token ids, there is something in the folder ``dump``, or a batch size in
            ``timings`` is not possible.

    Example:
        >>> print(compiled_llm.explain(model))  # doctest: +SKIP
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"explain: model is a {type(model).__name__}; give a transformers PreTrainedModel")
    prompts = _prompts(model, example_inputs)
    runtime = runtime_of(model)
    sizes = [1] if isinstance(timings, bool) else list(timings)
    if runtime is None and min(sizes, default=1) < 1:
        raise ValueError(f"timings: {min(sizes)} rows cannot be timed; give batch sizes from 1")
    findings = Findings()
    traces = list[Trace]()
    timed = list[Timing]()
    dumped = None if dump is None else Dump(new_folder(Path(dump)))
    history, happened = (None, []) if runtime is None else history_of(runtime)
    with restored(model), ExitStack() as stack:
        subject = _Subject(model, runtime)
        facts = subject.facts(findings)
        if facts is not None:
            happened += _slower_now(runtime, facts, happened)
            stack.enter_context(_without_other_outputs(model.config))
            sandbox = Sandbox(facts, subject.config, prompts)
            with packing(model) if runtime is None else nullcontext():
                traces = _trace(model, dumped, sandbox, findings)
                if timings and _whole(traces):
                    given = None if example_inputs is None else prompts
                    timed = sandbox.timed(sizes, given) if runtime is None else timings_of(runtime, timings, given)
    if not findings.entries and subject.refusal:
        findings.add(general("refused", subject.refusal, "Use the model unwrapped, or report this as a bug."))
    findings.extend(happened)
    notes = [] if dumped is None else dumped.notes
    if timings and not timed:
        notes = [*notes, "Nothing was timed: that takes programs that are one graph each."]
    packed_weights = {} if facts is None else facts.packed_weights
    report = Report.collect(model, findings.sorted(), traces, history, timed, notes, packed_weights)
    if dumped is not None:
        dumped.finish(report)
    return report


class _Subject:
    """A model, wrapped or not; ``refusal`` says why ``wrap`` would not take it."""

    def __init__(self, model: PreTrainedModel, runtime: Runtime | None) -> None:
        self.model = model
        self._runtime = runtime
        self.config = WrapConfig() if runtime is None else runtime.config
        self.refusal = ""
        self._stand_ins: StandIns | None = None
        self._tried = model

    def facts(self, findings: Findings) -> ModelFacts | None:
        """Return the facts of the model; None, and a finding, if it cannot run over pages."""
        if self._runtime is not None:
            return self._runtime.facts
        try:
            check_model(self.model)
            check_placement(self.model, self.config)
            self._stand_ins = stand_ins_for(self.model, self.config.packed)
            if self._stand_ins is not None:
                self._tried = self._stand_ins.standing_in(self.model)
            check_weights(self._tried, self.config)
        except (ValueError, RuntimeError) as error:
            findings.add(general("refused", str(error), "Change what the message names; then explain again."))
            return None
        return self._probed(findings)

    def _probed(self, findings: Findings) -> ModelFacts | None:
        """Watch the layers as ``wrap`` does, and on real tensors if forward cannot run on fake ones."""
        cause: Exception | None = None
        for fake in (False,) if changes_in_first_call(self._tried) else (True, False):
            try:
                # No fake tensor may stay.
                with restored(self._tried), paged_attention_in(self.model), LinearRecorder() as recorder:
                    layers = probe_layers(self._tried, BATCH_ARGUMENT, fake)
                layers = check_patterns(self._tried, layers)
                groups = recorder.groups(self.model)
                if self._stand_ins is not None:
                    self._stand_ins.note(recorder.of_ours)
                return ModelFacts.of(self.model, type(self.model), layers, groups, stand_ins=self._stand_ins)
            except UnsupportedModelError as error:
                self.refusal = str(error)
                cause = error.cause
                if cause is None:
                    break
        if cause is None or isinstance(cause, UnpagedCallError):
            findings.add(general("refused", self.refusal, _INTERFACE))
        elif _bypasses_interface(self.model):
            reason = (
                f"{type(self.model).__name__} computes attention by itself: its layers do not reach the attention "
                "interface of transformers (AttentionInterface), and would run without pages."
            )
            findings.add(general("refused", reason, _INTERFACE, detail=self.refusal))
        else:
            findings.add(_raised(cause))
        return None


def _trace(model: PreTrainedModel, dump: Dump | None, sandbox: Sandbox, findings: Findings) -> list[Trace]:
    traces: list[Trace] = []
    try:
        traces = sandbox.whole()
        if not _whole(traces):
            findings.extend(breaks.findings_in(sandbox.broken(None if dump is None else dump.add_frames)))
    except Exception as error:  # the model's own: this is the error to explain
        findings.add(_raised(error))
    if dump is not None:
        dump.add_programs(traces, sandbox)
    for trace in traces:
        if trace.error is not None:
            findings.add(breaks.finding_of(trace.error, trace.name))
        findings.extend(recompiles_of(trace.function, trace.name, model))
        findings.extend(environment_in(trace.function, trace.name))
        findings.extend(uncapturable(trace, model.device))
    return traces


def _slower_now(runtime: Runtime | None, facts: ModelFacts, known: Sequence[Finding]) -> Iterator[Finding]:
    """Yield why calls would take a slower path as the model is, unless it is among those that have taken it."""
    # Programs that are one graph each do not show it: what has hooks, say, is not run by them.
    reasons = chain(inner_reasons(facts), asked_by_config(facts.model.config))
    reason = next(reasons, None) if runtime is None else runtime.obstacle()
    if reason is not None and reason.advice not in [finding.advice for finding in known]:
        yield general("slow path", f"Calls take a slower path as the model is: {reason}.", reason.advice)


@contextmanager
def _without_other_outputs(config: PreTrainedConfig) -> Iterator[None]:
    """Let a config ask for no more than logits: calls that get more take a slower path, and no program runs in them."""
    text = config.get_text_config(decoder=True)
    asked = [(each, name) for each in (config, text) for name in OTHER_OUTPUTS if getattr(each, name, False)]
    try:
        for each, name in asked:
            setattr(each, name, False)
        yield
    finally:
        for each, name in asked:
            setattr(each, name, True)


def _whole(traces: Sequence[Trace]) -> bool:
    return bool(traces) and all(trace.error is None for trace in traces)


def _bypasses_interface(model: PreTrainedModel) -> bool:
    return not hasattr(sys.modules.get(type(model).__module__), "ALL_ATTENTION_FUNCTIONS")


def _raised(error: BaseException) -> Finding:
    place = blame(stack_of(error.__traceback__))
    reason = f"forward raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    advice = "Make the model run first: the same happens without compiled_llm, or with packed tokens and no mask."
    return general("error", reason, advice, place)


def _prompts(model: PreTrainedModel, inputs: Mapping[str, Tensor] | Tensor | None) -> list[NDArray[np.int64]]:
    if inputs is None:
        vocabulary = getattr(model.config.get_text_config(decoder=True), "vocab_size", 2)
        return [np.array(prompt, dtype=np.int64) % vocabulary for prompt in _DEFAULT_PROMPTS]
    given: Mapping[str, Any] = {"input_ids": inputs} if isinstance(inputs, Tensor) else inputs
    ids: Any = given.get("input_ids")
    mask = given.get("attention_mask")
    check_prompt(model, ids, mask)
    rows = torch.as_tensor(ids, device="cpu").numpy()
    kept = np.ones_like(rows) if mask is None else torch.as_tensor(mask, device="cpu").numpy()
    return [row[keep != 0].astype(np.int64) for row, keep in zip(rows, kept, strict=True)]
