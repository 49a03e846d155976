"""What the OpenAPI document promises is what happens, with whatever is made up by it."""

from __future__ import annotations

from typing import Any

import pytest

from support.server.engine_processes import PATIENCE
from support.server.running_servers import RunningServer

PATHS = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
    "/v1/models",
    "/ready",
    "/metrics",
}


def test_the_document_names_what_is_served(api_server: RunningServer) -> None:
    document = api_server.http.get("/openapi.json").json()
    assert set(document["paths"]) >= PATHS
    chat = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert chat["functions"]["description"] == "Not served: give tools."
    answers = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert {"200", "400", "401", "429", "503"} <= set(answers)


@pytest.mark.whole
@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
def test_made_up_requests_get_promised_answers(api_server: RunningServer, right: bool, seed: int) -> None:
    schemathesis: Any = pytest.importorskip("schemathesis")
    import hypothesis
    from hypothesis import HealthCheck, given, settings
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    schema = schemathesis.openapi.from_url(f"{api_server.url}/openapi.json")
    failures = []
    # There is nothing wrong to ask of those that take nothing.
    chosen = schema if right else schema.include(method="POST")
    for operation in chosen.get_all_operations():
        mode = schemathesis.GenerationMode.POSITIVE if right else schemathesis.GenerationMode.NEGATIVE

        @hypothesis.seed(seed)
        @settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.ok().as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            response = case.call(base_url=api_server.url, timeout=PATIENCE)  # an answer goes on for long
            assert response.status_code < 500, response.text
            case.validate_response(response, excluded_checks=[positive_data_acceptance])  # a template may refuse it

        try:
            check()
        except Exception as error:
            failures.append(f"{operation.ok().label}: {error}")
    assert not failures, "\n\n".join(failures)
