from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.server.browser import CHROMIUM, Browser, browsing
from support.server.running_servers import RunningServer
from support.server.scripted import Script


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    with browsing() as browser:
        yield browser


@pytest.fixture
def tab(browser: Browser, api_server: RunningServer) -> Browser:
    """The page of a server with a model, with nothing kept."""
    browser.open_anew(api_server.url)
    return browser


@pytest.fixture
def talk(browser: Browser, speaker: RunningServer, script: Script) -> Browser:
    """The page of a server that says what ``script`` has."""
    browser.open_anew(speaker.url)
    browser.until_state("ready")
    return browser
