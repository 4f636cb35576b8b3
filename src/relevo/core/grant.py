"""What a key gives its requests: their usual policy, and how far they may put themselves before others.

The most particular word counts: the request's own, else its key's, else its model's configuration. A priority is the
key's, or a lower one that the request names; a key that could be outbid by its own requests would order nothing.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from relevo.core.errors import NotGranted

LOWEST_PRIORITY: Final = -100
HIGHEST_PRIORITY: Final = 100

PolicyName = Literal["auto", "gpu-only", "cpu-only"]
"""The values of `Policy`, for records that are read from files."""


class Grant(msgspec.Struct, frozen=True):
    """What one key says of its requests. The default is that of everybody who needs no key."""

    policy: PolicyName | None = None
    """Of requests that name none. None: their model's."""
    policy_fixed: bool = False
    """Whether a request that names another policy is refused."""
    priority: int = 0
    """Of requests that name none, and the highest that one may name."""

    def policy_for(self, asked: PolicyName | None) -> PolicyName | None:
        """A request's policy; None: its model's. Raises NotGranted where the key's is fixed and another was asked."""
        if asked is None or asked == self.policy:
            return self.policy
        if self.policy_fixed and self.policy is not None:
            raise NotGranted(
                f"Requests of this key have the policy {self.policy} for good, and {asked} was asked for. "
                "Leave x-relevo-policy out.",
                param="x-relevo-policy",
            )
        return asked

    def priority_for(self, asked: int | None) -> int:
        """A request's priority. Raises NotGranted where it asks for more than its key has."""
        if asked is None:
            return self.priority
        if asked > self.priority:
            raise NotGranted(
                f"The priority {asked} was asked for, and requests here have at most {self.priority}: the priority of "
                "their key (0 without one). Ask for that or less, or leave x-relevo-priority out.",
                param="x-relevo-priority",
            )
        return asked
