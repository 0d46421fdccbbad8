"""Count the running samples of each caller in each priority class."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tok_core.manager.sequences import Request


class Account:
    """Requests of one caller in one priority class.

    id       number of the account in the column `account` of the sequence table
    open     rids of its requests that have not ended
    running  samples that hold a slot or will fork from a prefilling leader
    holders  requests with at least one such sample
    looks    number of consecutive calls of `FairShares.look` that have found samples of it waiting
    """

    __slots__ = ("holders", "id", "looks", "open", "running")

    def __init__(self, account_id: int = 0) -> None:
        self.id = account_id
        self.open: set[int] = set()
        self.running = self.holders = 0
        self.looks = 0


class Accounts:
    """Accounts with open requests."""

    def __init__(self) -> None:
        self._classes: dict[int, dict[str, Account]] = {}  # by priority and tenant
        self._numbers = count(1)

    def open(self, request: Request) -> None:
        """Add a new request to its caller's account."""
        accounts = self._classes.setdefault(request.params.priority, {})
        account = accounts.get(request.tenant)
        if account is None:
            account = accounts[request.tenant] = Account(next(self._numbers))
        account.open.add(request.rid)
        request.account = account

    def close(self, request: Request) -> None:
        """Remove a request that has ended. Samples of it that still hold slots count until the slots are freed."""
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
        """Return the greatest priority number, which is the lowest class, with a running sample."""
        running = (one for one, accounts in self._classes.items() if any(each.running for each in accounts.values()))
        return max(running, default=None)
