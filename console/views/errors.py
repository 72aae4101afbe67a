"""Pages that say what is wrong and what to do next."""

import sys
from typing import Any

from django.core.exceptions import BadRequest, RequestDataTooBig
from django.db import InterfaceError, OperationalError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from console import access


def page(request: HttpRequest, status: int, title: str, why: str, next: str = "", **more: str) -> HttpResponse:
    """An error page: what happened, why, what next."""
    facts = {"status": status, "title": title, "why": why, "next": next, **more}
    return render(request, "errors/page.html", facts, status=status)


def bad_request(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    why = "Something in the request cannot be read."
    if isinstance(exception, RequestDataTooBig):
        why = "That is more than one form can carry. Nothing was done."
    elif isinstance(exception, BadRequest) and str(exception):  # others speak of settings and hosts
        why = str(exception)
    return page(request, 400, "That cannot be read", why, "Go back and use the page's own links and buttons.")


def forbidden(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    why = str(exception) if exception and str(exception) else "Your role does not allow this."
    return page(request, 403, "Your role does not allow this", why, "An administrator of the tenant gives roles.")


def not_found(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    """The same words for a missing address, a missing row and a row of others."""
    next = "Check the number, or search for an order, a key or a provider's id."
    return page(request, 404, "Not found", access.NOT_FOUND, next)


def only_pressed(request: HttpRequest) -> HttpResponse:
    """An address of a button, opened like a page."""
    why = (
        "This is the address of a button. Opening it does nothing, and what was pressed before signing in was not done."
    )
    answer = page(request, 405, "Nothing was done", why, "Open the page with the button again, and press it there.")
    answer["Allow"] = "POST"
    return answer


def csrf(request: HttpRequest, reason: str = "") -> HttpResponse:
    why = "The form is too old, was sent from another site, or your browser keeps no cookies. Nothing was changed."
    return page(request, 403, "This form is no longer valid", why, "Open the page again and press the button there.")


def server_error(request: HttpRequest, *args: Any) -> HttpResponse:
    """Rendered without the bar, which may be what broke. A database that is away has words of its own (503)."""
    if not database_away(sys.exc_info()[1]):
        return render(None, "500.html", status=500)
    facts = {"only_read": request.method in {"GET", "HEAD", "OPTIONS"}}
    answer = render(None, "503.html", facts, status=503)
    answer["Retry-After"] = "5"
    return answer


def database_away(error: BaseException | None) -> bool:
    """Whether this says that the server is not there, and not that it refused one statement (a deadlock, a time-out).

    The driver has no SQLSTATE where the server said nothing; 08 and 57P are connections that failed or were ended,
    53300 is a server that takes no more of them.
    """
    if not isinstance(error, OperationalError | InterfaceError):
        return False
    state = getattr(error.__cause__, "sqlstate", None)
    return state is None or state.startswith(("08", "57P")) or state == "53300"
