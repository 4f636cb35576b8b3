"""After a crash: what the journal holds becomes requests in memory again."""

from __future__ import annotations

import logging

import msgspec

from relevo.core.described import named
from relevo.core.events import Ask, Delta, Ended, Sampling
from relevo.core.request import TERMINAL, RequestState
from relevo.journal.records import RequestRecord
from relevo.service.views import resumable_error
from relevo.service.work import Work

_log = logging.getLogger("relevo.recovery")


class StoredAsk(msgspec.Struct, frozen=True):
    """What the acceptance row keeps of a request, besides its prompt tokens."""

    ask: Ask
    sampling: Sampling
    outputs: list[int]


def work_from_record(record: RequestRecord) -> Work | None:
    """A request as the journal knows it; None when its payload was removed. An ended one carries its whole answer."""
    summary = record.summary
    if record.ask is None or record.prompt_tokens is None:
        return None
    stored = msgspec.msgpack.decode(record.ask, type=StoredAsk)
    work = Work(
        summary.id,
        stored.ask,
        created=summary.created,
        prompt_tokens=record.prompt_tokens,
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
    if work.state is RequestState.RESUMABLE:
        work.error = resumable_error(work, f"{work.reason} What was delivered so far is kept.")
        work.events.append(Ended(state="resumable", usage=work.usage, relevo={}, reason=work.reason, error=work.error))
    work.durable_events = len(work.events)
