"""A model's route at run time: its lane, its cells, its worker, what was learned of its speed."""

from __future__ import annotations

from dataclasses import dataclass, field

from relevo.config import LaneConfig, ModelConfig
from relevo.core.cells import CellPool
from relevo.core.events import Ready
from relevo.core.forecast import Forecast
from relevo.core.lane import Lane
from relevo.models.gguf import GgufHeader
from relevo.replicas.replica import Replica
from relevo.replicas.state import ReplicaState
from relevo.replicas.text import TextProcess
from relevo.service.work import Work


@dataclass(frozen=True, slots=True)
class Placement:
    """The device a route computes on, by name, and whether it is emulated."""

    device: str
    emulated: bool


class Route:
    """One way to run one model. The dispatcher owns what runs on it."""

    def __init__(
        self,
        name: str,
        model: str,
        *,
        held: Placement,
        lane: LaneConfig,
        pool: tuple[int, int, bool],
        forecast: Forecast,
    ) -> None:
        cells, slots, shared = pool
        self.name = name
        self.model = model
        self.device = held.device
        self.emulated = held.emulated
        self.lane_config = lane
        self.shared = shared
        self.context_tokens = cells
        self.slots = slots
        self.lane = Lane(f"{model}/{name}", queue_limit=lane.queue, concurrency=lane.concurrency or slots)
        self.cells = CellPool(cells, slots, shared)
        self.forecast = forecast
        self.load_ms: float | None = None
        """How long its last load took."""
        self.cell_bytes: float | None = None
        """What one cell takes of the device's memory; None while it is not known."""
        self.running: dict[str, Work] = {}
        self.used_at = 0.0
        """When work last began or ended on it; monotonic."""
        self.replica: Replica  # set once by whoever builds the house
        self.fingerprint: str | None = None
        self.waiting_reason: str | None = None
        """Why its worker is not started now, as a sentence."""
        self.closed_reason: str | None = None
        """Why it gets no new work although its worker runs, as a sentence."""

    def __repr__(self) -> str:
        return f"<Route {self.model}/{self.name}: {self.replica.state}, {self.lane!r}>"

    @property
    def serving(self) -> bool:
        """Whether its worker takes work now."""
        return self.replica.state is ReplicaState.SERVING and self.closed_reason is None

    def renew_cells(self, ready: Ready) -> None:
        """A new worker has a new pool. Everything that ran on the old one was let go before."""
        self.load_ms = ready.load_ms
        self.context_tokens = ready.cells
        self.slots = ready.slots
        self.cells = CellPool(ready.cells, ready.slots, self.shared)

    @property
    def parked(self) -> bool:
        """Whether a request that runs here waits for cells."""
        return any(work.parked is not None for work in self.running.values())

    @property
    def live_cells(self) -> int:
        """Cells that hold a token."""
        return sum(work.live_cells(self.shared) for work in self.running.values())


@dataclass(slots=True)
class ServedModel:
    """A model of the configuration, with its text process and its routes by name."""

    name: str
    config: ModelConfig
    header: GgufHeader
    text: TextProcess
    created: float
    flash_attention: bool = False
    """As both routes have it."""
    routes: dict[str, Route] = field(default_factory=dict)

    @property
    def preferred(self) -> Route:
        """The route that requests take when nothing is wrong."""
        return next(iter(self.routes.values()))

    @property
    def degraded(self) -> bool:
        """Whether the preferred route does not serve."""
        return not self.preferred.serving
