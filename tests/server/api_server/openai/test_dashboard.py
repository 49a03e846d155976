"""The dashboard of deploy/ asks for metrics that a server has, by labels and values that they have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.imports import CHECKOUT
from support.server.running_servers import RunningServer

DASHBOARD = CHECKOUT / "deploy" / "grafana" / "dashboards" / "compiled-llm.json"
TARGETS = [
    (panel["title"], target["expr"], target["legendFormat"])
    for panel in json.loads(DASHBOARD.read_text())["panels"]
    for target in panel["targets"]
]
_MATCHER = re.compile(r'(\w+)(=~|=)"([^"]*)"')

Served = dict[str, list[dict[str, str]]]
"""The labels of each sample, by the names of metrics."""


@pytest.fixture(scope="module")
def served(api_server: RunningServer) -> Served:
    api_server.post("/v1/completions", prompt="a", max_tokens=3, ignore_eos=True)
    found: Served = {}
    for family in text_string_to_metric_families(api_server.http.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def wrong(query: str, legend: str, served: Served) -> Iterator[str]:
    """Yield what a query of Prometheus and its legend name that the server does not have."""
    bare = re.sub(r"\{.*?\}|\[.*?\]|\bby \(.*?\)", "", query)
    metrics = re.findall(r"\b[a-z_]\w+\b(?! *\()", bare)
    assert metrics, query
    yield from (name for name in metrics if name not in served)
    samples = [labels for name in metrics for labels in served.get(name, [])]
    grouped = [label for labels in re.findall(r"\bby \((.*?)\)", query) for label in re.findall(r"\w+", labels)]
    told = re.findall(r"\{\{(\w+)\}\}", legend)
    yield from (label for label in [*grouped, *told] if not any(label in labels for labels in samples))
    yield from (label for label in told if grouped and label not in grouped)
    for label, kind, value in _MATCHER.findall(query):
        pattern = value if kind == "=~" else re.escape(value)
        if not any(re.fullmatch(pattern, labels.get(label, "")) for labels in samples):
            yield f"{label}{kind}{value}"


@pytest.mark.parametrize(("title", "query", "legend"), TARGETS, ids=[query for _, query, _ in TARGETS])
def test_a_panel_asks_for_what_there_is(title: str, query: str, legend: str, served: Served) -> None:
    assert list(wrong(query, legend, served)) == [], title


@pytest.mark.parametrize(
    ("query", "legend", "said"),
    [
        ("rate(compiled_llm_new_token_total[5m])", "", "compiled_llm_new_token_total"),
        ("compiled_lm_running", "", "compiled_lm_running"),
        ("compiled_llm_pages", "{{status}}", "status"),
        ('compiled_llm_pages{state="lost"}', "", "state=lost"),
        ('compiled_llm_http_requests_total{route=~"/v1/.*"}', "", "route=~/v1/.*"),
        ("sum by (path, code) (rate(compiled_llm_http_requests_total[5m]))", "{{path}}", "code"),
        ("sum by (path) (rate(compiled_llm_http_requests_total[5m]))", "{{status}}", "status"),
    ],
)
def test_what_is_wrong_in_a_panel_is_seen(query: str, legend: str, said: str, served: Served) -> None:
    assert list(wrong(query, legend, served)) == [said]


def test_the_dashboard_shows_most_that_is_served(served: Served) -> None:
    queries = " ".join(query for _, query, _ in TARGETS)
    families = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in served}
    shown = {name for name in families if name in queries}
    assert len(TARGETS) > 10
    assert len(shown) > 10
