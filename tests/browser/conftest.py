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
