"""A real Chromium against the console in this process, on the test's own database."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client


@pytest.fixture
def signed_in(live_server: Any, context: Any) -> Iterator[Callable[[User], Any]]:
    """signed_in(user) -> a page in which that person is signed in. Anything that the console complains of fails."""
    complaints: list[str] = []

    def page_of(user: User) -> Any:
        client = Client()
        client.force_login(user)
        context.add_cookies(
            [{"name": "sessionid", "value": client.cookies["sessionid"].value, "url": live_server.url}],
        )
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        return page

    yield page_of
    # What the network does is no fault of a page.
    assert [each for each in complaints if not re.search("Failed to (load resource|fetch)", each)] == []


@pytest.fixture
def visit(browser: Any, live_server: Any) -> Iterator[Callable[..., Any]]:
    """visit(user) -> a page of a browser of their own; what the console complains of fails the test."""
    opened, complaints = [], []

    def visit(user: User, *, javascript: bool = True) -> Any:
        client = Client()
        client.force_login(user)
        context = browser.new_context(base_url=live_server.url, java_script_enabled=javascript, timezone_id="UTC")
        session = {"name": "sessionid", "value": client.cookies["sessionid"].value, "url": live_server.url}
        context.add_cookies([session, {"name": "zone", "value": "UTC", "url": live_server.url}])
        context.set_default_timeout(10_000)
        opened.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        return page

    yield visit
    for context in opened:
        context.close()
    assert [each for each in complaints if "Failed to load resource" not in each] == []
