"""Accounts: how many samples of each caller run, in each class of requests."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tok_core.manager.sequences import Request


class Account:
    """Requests of one caller in one class.

    id       stands for the account in the sequence table
    open     rids of its requests that have not ended
    running  samples that hold a slot, or will fork from one that prefills
    holders  requests of which any sample does
    looks    how many looks of `FairShares` in a row have found samples of it waiting
    """

    __slots__ = ("holders", "id", "looks", "open", "running")

    def __init__(self, account_id: int = 0) -> None:
        self.id = account_id
        self.open: set[int] = set()
        self.running = self.holders = 0
        self.looks = 0


class Accounts:
    """The accounts that have open requests."""

    def __init__(self) -> None:
        self._classes: dict[int, dict[str, Account]] = {}  # by priority and tenant
        self._numbers = count(1)

    def open(self, request: Request) -> None:
        """Enter a new request into its caller's account."""
        accounts = self._classes.setdefault(request.params.priority, {})
        account = accounts.get(request.tenant)
        if account is None:
            account = accounts[request.tenant] = Account(next(self._numbers))
        account.open.add(request.rid)
        request.account = account

    def close(self, request: Request) -> None:
        """Remove a request that has ended. Its samples that still hold slots count until they give them back."""
        account = request.account
        account.open.discard(request.rid)
        accounts = self._classes.get(request.params.priority, {})
        if not account.open and accounts.get(request.tenant) is account:
            del accounts[request.tenant]
            if not accounts:
                del self._classes[request.params.priority]

    def of_class(self, priority: int) -> Iterable[Account]:
        """Return the accounts of one class."""
        return self._classes.get(priority, {}).values()

    def lowest_running(self) -> int | None:
        """Return the greatest priority number of which a sample runs."""
        running = (one for one, accounts in self._classes.items() if any(each.running for each in accounts.values()))
        return max(running, default=None)
