"""What every experiment does: one contender after the other; one that fails does not take the others with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from compiled_llm.commands.bench.contender import Participant, Setup
from compiled_llm.commands.bench.report import Report

Save = Callable[[], object]
C = TypeVar("C", bound=Participant)


def run_each(
    contenders: Iterable[C],
    setup: Setup,
    report: Report,
    save: Save,
    measure: Callable[[C], None],
) -> None:
    """Measure every contender that can take part.

    Args:
        contenders: who was asked for.
        setup: model, device and workloads.
        report: gets obstacles and failures.
        save: called after each contender.
        measure: measures one, into the report.
    """
    for contender in contenders:
        reason = contender.obstacle(setup)
        if reason is not None:
            report.unavailable[contender.name] = reason
            continue
        try:
            measure(contender)
        except Exception as error:
            report.failures.append(failure(contender.name, error))
            setup.drop_model()  # its state is in doubt
        save()


def failure(what: str, error: BaseException) -> str:
    """Return one line that says what failed and why."""
    message = " ".join(str(error).split())[:1000]
    return f"{what}: {type(error).__name__}: {message}"
