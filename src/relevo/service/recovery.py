"""After a crash: what the journal holds becomes requests in memory again."""

from __future__ import annotations

import logging

import msgspec

from relevo.core.described import named
from relevo.core.events import Ask, Delta, Ended, Sampling
from relevo.core.request import TERMINAL, RequestState
from relevo.journal import EndAttempt, Journal
from relevo.journal.records import RequestRecord
from relevo.service.views import resumable_error
from relevo.service.work import Work

_log = logging.getLogger("relevo.recovery")


class StoredAsk(msgspec.Struct, frozen=True):
    """What the acceptance row keeps of a request, besides its prompt tokens."""

    ask: Ask
    sampling: Sampling
    outputs: list[int]

    @classmethod
    def of(cls, work: Work) -> StoredAsk:
        """What must be kept of a new request."""
        return cls(ask=work.ask, sampling=work.sampling, outputs=[c.max_output_tokens for c in work.choices])

    def encoded(self) -> bytes:
        """As the journal keeps it."""
        return msgspec.msgpack.encode(self)


async def restore(journal: Journal, record: RequestRecord) -> Work | None:
    """A request as the journal knows it; None when its payload was removed. An ended one carries its whole answer."""
    stored = record.ask
    if record.payload_path is not None:
        stored = await journal.load_body(record.payload_path)
    if not stored or record.prompt_tokens is None:
        return None
    return _work_of(record, msgspec.msgpack.decode(stored, type=StoredAsk), record.prompt_tokens)


def _work_of(record: RequestRecord, stored: StoredAsk, prompt_tokens: list[int]) -> Work:
    summary = record.summary
    work = Work(
        summary.id,
        stored.ask,
        created=summary.created,
        prompt_tokens=prompt_tokens,
        sampling=stored.sampling,
        outputs=stored.outputs,
    )
    work.state = named(RequestState, summary.state)
    work.reason = summary.reason
    work.ended_at = summary.ended
    work.kept_until = summary.kept_until
    work.attempt = max((a.attempt for a in record.attempts), default=0)
    work.route = record.attempts[-1].route if record.attempts else None
    work.standby = msgspec.json.decode(record.standby) if record.standby is not None else None
    if work.state in TERMINAL:
        _restore_answer(work, record)
    elif work.state is not RequestState.QUEUED or work.attempt:
        _restore_checkpoints(work, record)
    return work


def _restore_answer(work: Work, record: RequestRecord) -> None:
    result = msgspec.json.decode(record.result) if record.result is not None else {}
    for said in result.get("choices", []):
        choice = work.choices[said["index"]]
        choice.text, choice.text_bytes = [said["text"]], len(said["text"].encode())
        choice.tokens = [0] * said["output_tokens"]  # only their number is needed of an ended answer
        choice.finish = said["finish_reason"]
        work.events.append(Delta(choice=choice.index, text=said["text"], tokens=[], finish=choice.finish))
    work.error = result.get("error")
    work.events.append(
        Ended(
            state=str(work.state),
            usage=work.usage,
            relevo=result.get("relevo") or {},
            reason=work.reason,
            error=work.error,
        )
    )
    work.durable_events = len(work.events)


def _restore_checkpoints(work: Work, record: RequestRecord) -> None:
    for saved in record.checkpoints:
        choice = work.choices[saved.choice]
        choice.tokens = list(saved.tokens)
        choice.text = [saved.text]
        choice.text_bytes = saved.delivered_bytes
        choice.finish = saved.finish
        work.events.append(Delta(choice=saved.choice, text=saved.text, tokens=choice.tokens, finish=saved.finish))
    work.checkpointed_tokens = work.output_tokens
    work.delivered = work.ask.stream and work.output_tokens > 0  # unknown is treated as yes
    if work.state is RequestState.RESUMABLE:
        work.error = resumable_error(work, f"{work.reason} What was delivered so far is kept.")
        work.events.append(Ended(state="resumable", usage=work.usage, relevo={}, reason=work.reason, error=work.error))
    work.durable_events = len(work.events)


def cut_off_attempts(record: RequestRecord, at: float) -> list[EndAttempt]:
    """The ends of attempts that a crash cut off, so that the next attempt is not taken for a second one beside them."""
    return [
        EndAttempt(
            id=record.summary.id,
            attempt=a.attempt,
            outcome="lost",
            at=at,
            code="gateway",
            message="Relevo ended in the middle of this attempt.",
        )
        for a in record.attempts
        if a.ended is None
    ]
