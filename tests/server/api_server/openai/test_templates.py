"""Whatever a model's chat template raises is told its client as what it is: a chat that it does not take."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.server.running_servers import RunningServer
from support.server.scripted import speaking_server, tool_tokenizer

RAISES = {
    "zero": "1 / 0",
    "type": "'a' + 1",
    "key": "'{b}'.format(a=1)",
    "value": "'a'.index('b')",
    "undefined": "messages[0].nothing.more",
    "too many": "range(10 ** 9)",
    "no end": "again(1)",
    "its own": "raise_exception('roles must alternate')",
    "no time": "strftime_now(7)",
}


@pytest.fixture(scope="module")
def api_server() -> Iterator[RunningServer]:
    tokenizer = tool_tokenizer()
    cases = "".join(f"{{% if how == '{how}' %}}{{{{ {raises} }}}}{{% endif %}}" for how, raises in RAISES.items())
    again = "{% macro again(x) %}{{ again(x) }}{% endmacro %}"
    tokenizer.chat_template = again + cases + str(tokenizer.chat_template)
    with speaking_server(tokenizer) as (_, api_server):
        yield api_server


@pytest.mark.parametrize("how", RAISES)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_what_a_template_raises_is_a_bad_request(api_server: RunningServer, how: str, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"how": how}}
    response = api_server.http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", "messages")
    assert error["message"].startswith("messages: the model's chat template does not take them: ")
    assert "roles must alternate" in error["message"] or how != "its own"
    assert api_server.http.post(path, json={**body, "chat_template_kwargs": {}}).status_code == 200
