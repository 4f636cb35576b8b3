"""What a model load asks for, and what it finds: the records that the ladder reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from relevo.core.events import StartModel
from relevo.core.memory.demand import Demand

Weigh = Callable[[StartModel], tuple[Demand, Demand]]
"""What a load takes: (of its device, of the host besides). Of a start on the cpu route all is in one of the two."""

CPU_ROUTES: Final = frozenset({"cpu", "backup"})
"""Routes that need no accelerator."""

REDUCIBLE: Final = frozenset({"flash_attention", "ubatch", "slots", "kv_type", "context"})
"""All that a load may be allowed to take less of."""

CONTEXT_STEP_TOKENS: Final = 256
"""The engine rounds a context up to this, so nothing between is worth trying."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody who holds memory of a device."""

    holder: str
    bytes_: int
    idle: bool = False
    """No request runs or waits on it."""
    idle_s: float = 0.0
    priority: int = 0
    reload_s: float | None = None
    """How long its model takes to load again; None: not measured."""
    evictable: bool = False
    """Whether it may be ended while it is idle."""
    frees_in_s: float | None = None
    """It gives its memory back by itself within this time; None: not known to."""
    shrinks_to_bytes: int | None = None
    """What it would hold after parking its work and loading smaller; None: it cannot shrink."""


class DeviceView(msgspec.Struct, frozen=True, kw_only=True):
    """A device's memory as its ledger sees it at this moment."""

    name: str
    available_bytes: int | None
    """What a lease could take now; None: not known, which is treated as nothing."""
    reason: str | None = None
    """Why it is not known."""
    total_bytes: int | None = None
    largest_block_bytes: int | None = None
    """The largest piece that one allocation can have; None: not known to be less than what is available."""
    pressure: str = "calm"
    """calm | tight | critical | unknown."""
    holders: tuple[Holder, ...] = ()


class LoadWish(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is to be loaded, how it would like to be, and what it can do with less of."""

    holder: str
    start: StartModel
    """As configured: the most it wants."""
    layers: int
    """Repeating layers of the model."""
    expert_layers: int = 0
    """Of these, layers with experts; 0: it has none."""
    allow: frozenset[str] = frozenset()
    """What may be reduced: names of REDUCIBLE."""
    least_context_tokens: int = CONTEXT_STEP_TOKENS
    wanted_context_tokens: int = 0
    """What requests that wait for it need. The context is never reduced below this or `least_context_tokens`."""
    least_slots: int = 1
    offload: bool = False
    """Whether some of its layers or experts may stay in the host's RAM."""
    redirect: bool = True
    """Whether its requests may go to its CPU route instead."""
    from_storage: bool = False
    """Whether weights on the host may exceed its RAM: mapped, and read from storage again and again."""
    priority: int = 0
    deadline_s: float = 5.0
    """How long it may wait for memory that is coming back anyway. A drained lease is back within 5 s."""
    restore_slack: float = 0.1
    """Share of the full demand that must be free beyond it before a load that was reduced goes up again."""
    most_context_tokens: int | None = None
    """The context the model was trained for; None: the header does not say."""
    cpu_start: StartModel | None = None
    """Its CPU route's load; None: `start` without a device."""
    cpu_held_bytes: int = 0
    """What its CPU route has leased of the host already, which is then all it needs; 0: it is not loaded."""
    recovery_budget_s: float = 10.0
    cpu_load_s: float | None = None
    """Measured load of its CPU route from storage; None: not measured."""
    cpu_mapped_load_s: float | None = None
    """The same with the file's pages in the cache."""

    @property
    def on_cpu(self) -> bool:
        """Whether it is the CPU route itself that is to be loaded; nothing is left to offload or redirect to then."""
        return self.start.route in CPU_ROUTES
