"""What of allauth is ours: nobody signs up by himself."""

from allauth.account.adapter import DefaultAccountAdapter
from django.http import HttpRequest


class GivenAccounts(DefaultAccountAdapter):
    """An administrator gives accounts; the sign-up page is closed."""

    def is_open_for_signup(self, request: HttpRequest) -> bool:
        return False
