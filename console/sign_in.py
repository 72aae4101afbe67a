"""One-time sign-in links: a random token that the database knows by its hash only."""

import hashlib
import secrets
from datetime import timedelta

from django.contrib.auth.models import User
from django.db.models import DateTimeField, Func
from django.urls import reverse

from console.models import SignInLink

LIFE = timedelta(minutes=30)  # long enough to fetch a coffee after `make run`, too short to be found in a log


class Now(Func):
    """The one clock that decides."""

    function = "aftercall_now"
    output_field = DateTimeField()


def make_link(user: User, *, life: timedelta = LIFE) -> str:
    """Return the path of a new link for `user`. The token is in the path and nowhere else."""
    token = secrets.token_urlsafe(32)
    SignInLink.objects.create(token_hash=_hash(token), user=user, expires_at=Now() + life)
    return reverse("sign_in_link", args=[token])


def is_usable(token: str) -> bool:
    """Whether the link would let somebody in now. Looking does not use it up: mail and chat clients look too."""
    return _usable(token).exists()


def use(token: str) -> User | None:
    """Use the link up and return its person; None when it is unknown, over or used.

    Two presses at once race here: the update's row count says who was first.
    """
    if _usable(token).update(used_at=Now()) != 1:
        return None
    return SignInLink.objects.select_related("user").get(token_hash=_hash(token)).user


def _usable(token: str):
    return SignInLink.objects.filter(token_hash=_hash(token), used_at=None, expires_at__gt=Now(), user__is_active=True)


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
