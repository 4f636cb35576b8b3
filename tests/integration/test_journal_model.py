"""Random lives of requests against a naive model: what the journal takes, refuses and shows is what the model says."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from relevo.core.errors import RelevoError
from relevo.journal import (
    ENDED_STATES,
    AcceptRequest,
    AddEvent,
    ChangeState,
    EndAttempt,
    EndRequest,
    Journal,
    Operation,
    SaveCheckpoint,
    StartAttempt,
)
from relevo.journal.audit import audit

from .fakes.journal_kit import accept, end, move, opened

NAMES = st.sampled_from(["a", "b", "c"])
OPEN = st.sampled_from(["accepted", "queued", "running", "resumable"])
ENDS = st.sampled_from(["completed", "cancelled", "failed"])
ATTEMPT = st.integers(1, 3)

OPERATIONS: st.SearchStrategy[Operation] = st.one_of(
    st.builds(accept, NAMES, idempotency_key=st.sampled_from([None, None, "k"])),
    st.builds(move, NAMES, OPEN, OPEN),
    st.builds(end, NAMES, ENDS),
    st.builds(
        lambda name, attempt: StartAttempt(
            id=f"req_{name}", attempt=attempt, route="gpu", device="gpu0", replica_pid=1, at=1.0
        ),
        NAMES,
        ATTEMPT,
    ),
    st.builds(
        lambda name, attempt: EndAttempt(id=f"req_{name}", attempt=attempt, outcome="failed", at=2.0), NAMES, ATTEMPT
    ),
    st.builds(lambda name: AddEvent(id=f"req_{name}", kind="x", at=1.0, payload=b"1"), NAMES),
    st.builds(
        lambda name, n: SaveCheckpoint(
            id=f"req_{name}", choice=0, tokens=[1] * n, text="x" * n, delivered_bytes=0, at=1.0
        ),
        NAMES,
        st.integers(0, 5),
    ),
)


@dataclass
class Life:
    """A request as the model knows it."""

    states: list[str] = field(default_factory=lambda: ["accepted"])
    key: str | None = None
    attempts: list[bool] = field(default_factory=list)  # still running?
    events: int = 0
    checkpoint: int | None = None


class Model:
    """The journal's rules, as plainly as they can be said."""

    def __init__(self) -> None:
        self.lives: dict[str, Life] = {}

    def takes(self, o: Operation) -> bool:
        """Apply, or answer False and change nothing."""
        if isinstance(o, AcceptRequest):
            taken = {life.key for life in self.lives.values() if life.key}
            if o.id in self.lives or o.idempotency_key in taken:
                return False
            self.lives[o.id] = Life(key=o.idempotency_key)
            return True
        life = self.lives.get(getattr(o, "id", ""))
        if life is None:
            return False
        ended = life.states[-1] in ENDED_STATES
        match o:
            case ChangeState():
                good = life.states[-1] == o.old
                if good and o.old != o.new:
                    life.states.append(o.new)
            case EndRequest():
                if good := not ended:
                    life.states.append(o.state)
            case StartAttempt():
                if good := not ended and o.attempt == len(life.attempts) + 1:
                    life.attempts.append(True)
            case EndAttempt():
                if good := o.attempt <= len(life.attempts) and life.attempts[o.attempt - 1]:
                    life.attempts[o.attempt - 1] = False
            case AddEvent():
                good, life.events = True, life.events + 1
            case SaveCheckpoint():
                if good := not ended:
                    life.checkpoint = len(o.tokens)
            case _:
                raise AssertionError(o)
        return good


async def compare(journal: Journal, model: Model) -> None:
    assert {r.summary.id for r in await journal.open_requests()} == {
        name for name, life in model.lives.items() if life.states[-1] not in ENDED_STATES
    }
    for name, life in model.lives.items():
        record = await journal.get(name)
        assert record is not None
        assert [m.new for m in record.moves] == life.states
        assert record.summary.state == life.states[-1]
        assert [a.ended is None for a in record.attempts] == life.attempts
        assert [len(c.tokens) for c in record.checkpoints] == ([] if life.checkpoint is None else [life.checkpoint])
        assert [e.seq for e in await journal.events(name)] == list(range(1, life.events + 1))


@settings(max_examples=20, deadline=None)
@given(st.lists(OPERATIONS, max_size=40), st.integers(1, 40))
def test_the_journal_agrees_with_a_naive_model(operations: list[Operation], together: int) -> None:
    async def run(folder: Path) -> None:
        model = Model()
        async with opened(folder) as journal:
            for at in range(0, len(operations), together):
                batch = operations[at : at + together]
                answers = await asyncio.gather(*(journal.submit(o) for o in batch), return_exceptions=True)
                for operation, answer in zip(batch, answers, strict=True):
                    if model.takes(operation):
                        assert answer is None, operation
                    else:
                        assert isinstance(answer, RelevoError), operation
            await compare(journal, model)
        async with opened(folder) as journal:
            await compare(journal, model)
        with Journal.open_reader(folder) as reader:
            findings = {f.rule for f in audit(reader)}
            overlapping = any(any(life.attempts[:-1]) for life in model.lives.values())
            assert findings == ({"attempts"} if overlapping else set())

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))
