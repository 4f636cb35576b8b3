"""Who is given the next cells of a replica, who is parked, and who gives way when nobody could go on.

Pure: the same standings give the same outcome. The rules:

- An answer is extended ahead of its need, by steps in proportion to what its request holds. Up to what was set aside
  for it this costs nobody.
- Beyond that it takes free cells, the request accepted first before the others. One that gets none is parked: it
  keeps its cells, draws nothing, and its neighbours go on. While anybody is parked nothing new is started there.
- Where every answer of every request is parked, nothing would ever end: one request gives way. Never the oldest. Of
  the others, those of the lowest priority; of these, one whose answer can be taken up again without its client
  noticing, before one that would have to rest as resumable; of these, the newest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

LEAST_AHEAD_TOKENS: Final = 16
MOST_AHEAD_TOKENS: Final = 64
AHEAD_SHARE: Final = 32
"""An extension reaches one 32nd of prompt and output beyond the last token drawn, within these bounds: on average
three quarters of that are held and not used, about 2 % of a lease."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """One unfinished answer of a running request, as its lease and its last piece show it."""

    holder: str
    choice: int
    accepted: float
    """When its request was accepted; wall time, in seconds."""
    prompt_tokens: int
    drawn: int
    """Output tokens so far."""
    held: int
    set_aside: int
    limit: int
    priority: int = 0
    unseen: bool = True
    """Its request can be taken up again without its client noticing: nothing was delivered, or it may be continued."""


class Extension(msgspec.Struct, frozen=True):
    """This answer holds cells for so many output tokens from here on."""

    holder: str
    choice: int
    tokens: int


class Outcome(msgspec.Struct, frozen=True):
    """What is to be done; nothing was changed."""

    extend: tuple[Extension, ...] = ()
    parked: frozenset[tuple[str, int]] = frozenset()
    """(holder, choice) of each answer that waits for a cell."""
    gives_way: str | None = None


def ahead_tokens(prompt_tokens: int, drawn: int) -> int:
    """How far an extension of this answer reaches."""
    return min(MOST_AHEAD_TOKENS, max(LEAST_AHEAD_TOKENS, (prompt_tokens + drawn) // AHEAD_SHARE))


def reach(prompt_tokens: int, drawn: int, limit: int) -> int:
    """How many output tokens an extended answer holds cells for, where there are enough."""
    return min(limit, drawn + ahead_tokens(prompt_tokens, drawn))


def is_due(prompt_tokens: int, drawn: int, held: int, limit: int) -> bool:
    """Whether an answer should be extended now: half of a step is left, so that the worker draws on meanwhile."""
    return held < limit and 2 * (held - drawn) <= ahead_tokens(prompt_tokens, drawn)


def share_out(standings: Sequence[Standing], free_cells: int, *, somebody_leaves: bool = False) -> Outcome:
    """Give out cells, oldest request first. `somebody_leaves`: cells of a request that is ending are on their way.

    `standings`: of all running requests of one pool.
    """
    extend: list[Extension] = []
    parked: set[tuple[str, int]] = set()
    for one in sorted(standings, key=lambda s: (s.accepted, s.holder, s.choice)):
        held = one.held
        if is_due(one.prompt_tokens, one.drawn, held, one.limit):
            wanted = reach(one.prompt_tokens, one.drawn, one.limit)
            beyond = min(max(0, wanted - one.set_aside), free_cells)
            held = max(held, min(wanted, one.set_aside + beyond))
            free_cells -= max(0, held - one.set_aside)
            if held > one.held:
                extend.append(Extension(one.holder, one.choice, held))
        if held <= one.drawn < one.limit:
            parked.add((one.holder, one.choice))
    gives_way = None
    if standings and len(parked) == len(standings) and not somebody_leaves:
        gives_way = _who_gives_way(standings)
    return Outcome(tuple(extend), frozenset(parked), gives_way)


def _who_gives_way(standings: Sequence[Standing]) -> str | None:
    """None where there is only one request: with everything to itself it is never stuck."""
    oldest = min(standings, key=lambda s: (s.accepted, s.holder)).holder
    others = [s for s in standings if s.holder != oldest]
    if not others:
        return None
    return min(others, key=lambda s: (s.priority, not s.unseen, -s.accepted, s.holder)).holder
