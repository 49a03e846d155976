"""What is known of transformers' decisions: their pieces are there, and work where torch is not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from compiled_llm.compat.decisions import decision_config, decisions_of_transformers, variables_of, written

pytest.importorskip("transformers.decision", reason="new in 5.24")

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from compiled_llm.compat.decisions import decision_config, decisions_of_transformers, written
known = decisions_of_transformers()
question = known.Question.from_request("a", {"type": "noul"}, decision_config(None))
print(written(known.DECISION_PROMPT, state="the state", question=question))
"""


def test_prompts_are_written_without_torch() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True)
    assert run.stdout.endswith("the state\n\n\nAnswer Yes or No only.\n")


def test_templates_say_what_they_read() -> None:
    assert variables_of("{% for question in questions %}{{ question.name }}{{ state }}{% endfor %}") == {
        "questions",
        "state",
    }
    assert {"state", "question"} <= variables_of(decisions_of_transformers().DECISION_PROMPT)
    assert written("{{ state | tojson }}", state={"a": 1}) == '{"a": 1}'


def test_a_model_without_settings_has_the_defaults() -> None:
    config = decision_config(None)
    assert (config.labels, config.temperature, config.chat_template, config.adapter) == ({}, {}, None, None)
