"""Asks a policy, which may be a user's own, in the engine's thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from compiled_llm.execution.threads.interrupts import allowed
from compiled_llm.requests.awaited_code import awaited
from compiled_llm.requests.users_code import described, raise_interrupt

logger = logging.getLogger("compiled_llm.engine")

Decision = TypeVar("Decision")


def decision_of(
    policy: Any, state: Any, check: Callable[[Any], Decision], option: str, otherwise: str
) -> Decision | None:
    """Return the decision of ``policy.plan``, checked; None if it failed, which is logged: it is asked no more."""
    try:
        with allowed(), awaited(option, policy.plan):
            said = policy.plan(state)
        return check(said)
    except BaseException as error:
        raise_interrupt(error)
        what = "compiled_llm: %s: %s.plan has failed, and the engine goes on with %s: %s"
        logger.error(what, option, type(policy).__name__, otherwise, described(error), exc_info=error)
        return None
