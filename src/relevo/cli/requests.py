"""`relevo requests`: what was accepted, what became of it, and how to stop it or take it up again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import cyclopts
from cyclopts import Parameter

from relevo.cli.output import (
    ago_text,
    bytes_text,
    complain,
    console,
    duration_text,
    plain,
    print_json,
    say,
    short,
    table,
    time_text,
)
from relevo.cli.place import NO_SERVICE_PLACE, Json, ServicePlace

if TYPE_CHECKING:
    from relevo.cli.running import Service
    from relevo.journal.records import RequestRecord, RequestSummary

app = cyclopts.App(name="requests", help="List, show, cancel and resume requests.", result_action="return_value")

State = Literal["accepted", "queued", "running", "resumable", "completed", "cancelled", "failed"]
Id = Annotated[str, Parameter(name="ID", help="The request's id: `req_` and 32 digits, or a unique beginning of it.")]
Limit = Annotated[int, Parameter(validator=cyclopts.validators.Number(gte=1, lte=1000))]
_FROM_JOURNAL = "No service is running here: this is read from the journal in {state}."
_ID_LETTERS = 36
_SEARCHED = 1000
_CANCEL_S = 30.0
_RESUME_S = 3600.0  # the answer comes when the request has ended


@app.command(name="list")
def list_requests(
    *, place: ServicePlace = NO_SERVICE_PLACE, only: State | None = None, limit: Limit = 20, json: Json = False
) -> int:
    """List requests, newest first. Without a running service, from the journal.

    Parameters
    ----------
    only
        Only those in this state.
    limit
        At most so many.
    """
    from relevo.cli.running import ServiceDown, running

    source = "service"
    try:
        with running(place) as service:
            records = _list_of(service, limit, only)
    except ServiceDown as down:
        records = _journaled_list(place, limit, only, down)
        source = "journal"
    if json:
        print_json({"source": source, "requests": records})
        return 0
    if source == "journal":
        complain(_FROM_JOURNAL.format(state=place.paths().state))
    if not records:
        say("No requests." if only is None else f"No requests are {only}.")
        return 0
    made = table("", "id", "model", "state", "created", "took", "reason", numbers=("took",))
    for record in records:
        ended = record.get("ended")
        took = duration_text(ended - record.get("created", ended)) if isinstance(ended, int | float) else "-"
        made.add_row(
            plain(str(record["id"])), plain(str(record["model"])), plain(str(record["state"])),
            ago_text(record.get("created")), took, short(record.get("reason") or ""),
        )  # fmt: skip
    console().print(made)
    return 0


@app.command
def show(request_id: Id, /, *, place: ServicePlace = NO_SERVICE_PLACE, json: Json = False) -> int:
    """Show one request: its states, its routes and its answer. Without a running service, from the journal."""
    from relevo.cli.running import ServiceDown, running

    source = "service"
    try:
        with running(place) as service:
            record = dict(service.get(f"/relevo/v1/requests/{_whole_id(service, request_id)}"))
    except ServiceDown as down:
        record = _journaled(place, request_id, down)
        source = "journal"
    if json:
        print_json({**record, "source": source})
        return 0
    if source == "journal":
        complain(_FROM_JOURNAL.format(state=place.paths().state))
    _print_record(record)
    return 0


@app.command
def cancel(request_id: Id, /, *, place: ServicePlace = NO_SERVICE_PLACE, json: Json = False) -> int:
    """Cancel a request. Harmless when it has ended already."""
    return _change(place, request_id, "cancel", json)


@app.command
def resume(request_id: Id, /, *, place: ServicePlace = NO_SERVICE_PLACE, json: Json = False) -> int:
    """Take up a resumable request from its checkpoint (same id, next attempt), and show its answer."""
    return _change(place, request_id, "resume", json)


def _change(place: ServicePlace, request_id: str, verb: str, as_json: bool) -> int:
    from relevo.cli.running import running

    with running(place, timeout_s=_RESUME_S if verb == "resume" else _CANCEL_S) as service:
        whole = _whole_id(service, request_id)
        record = dict(service.post(f"/relevo/v1/requests/{whole}/{verb}"))
    if as_json:
        print_json(record)
    elif verb == "resume":
        _print_record(record)
    else:
        reason = f" ({short(record['reason'])})" if record.get("reason") else ""
        say(f"{plain(str(record.get('id', whole)))} is {plain(str(record.get('state', 'changed')))}{reason}.")
    return 0


def _list_of(service: Service, limit: int, state: str | None) -> list[dict[str, Any]]:
    answer = service.get("/relevo/v1/requests", limit=limit, state=state)
    found: list[dict[str, Any]] = answer["data"] if isinstance(answer, dict) else answer
    return found


def _whole_id(service: Service, given: str) -> str:
    """The id itself, or the only one that begins so. Raises RequestNotFound or Conflict."""
    if len(given) >= _ID_LETTERS or not given.startswith("req_"):
        return _safe(given)
    return _only(given, [str(record["id"]) for record in _list_of(service, _SEARCHED, None)])


def _safe(given: str) -> str:
    from relevo.core.errors import RequestNotFound

    if not given.replace("_", "").replace("-", "").isalnum() or not given.isascii():
        raise RequestNotFound(f"{given!r} is not a request id. `relevo requests list` shows them.")
    return given


def _only(beginning: str, ids: list[str]) -> str:
    from relevo.core.errors import Conflict, RequestNotFound

    fitting = [found for found in ids if found.startswith(beginning)]
    if not fitting:
        raise RequestNotFound(f"No request begins with {beginning}. `relevo requests list` shows them.")
    if len(fitting) > 1:
        raise Conflict(f"{len(fitting)} requests begin with {beginning}. Give more of the id.")
    return fitting[0]


# ---------------------------------------------------------------- without a service


def _journaled_list(place: ServicePlace, limit: int, state: str | None, down: Exception) -> list[dict[str, Any]]:
    from relevo.journal.reader import JournalReader

    _check_journal(place, down)
    with JournalReader(place.paths().state) as reader:
        return [_summary_view(summary) for summary in reader.summaries(limit=limit, state=state)]


def _journaled(place: ServicePlace, request_id: str, down: Exception) -> dict[str, Any]:
    from relevo.core.errors import RequestNotFound
    from relevo.journal.reader import JournalReader

    _check_journal(place, down)
    with JournalReader(place.paths().state) as reader:
        whole = request_id
        if len(request_id) < _ID_LETTERS and request_id.startswith("req_"):
            whole = _only(request_id, [summary.id for summary in reader.summaries(limit=_SEARCHED)])
        record = reader.get(whole)
        if record is None:
            raise RequestNotFound(
                f"No request has the id {request_id!r} here. It may be older than the retention time."
            )
        return _record_view(record)


def _check_journal(place: ServicePlace, down: Exception) -> None:
    """The journal stands in for the service only where this very service was meant and has one. Raises ServiceDown."""
    import os

    from relevo.cli.running import URL_VARIABLE
    from relevo.journal.database import FILE
    from relevo.journal.folder import read_holder

    if read_holder(place.paths().state) is not None:
        raise down
    if place.url or os.environ.get(URL_VARIABLE) or not (place.paths().state / FILE).is_file():
        raise down


def _summary_view(summary: RequestSummary) -> dict[str, Any]:
    """A row of the list, in the outer contract's words."""
    return {
        "id": summary.id,
        "state": summary.state,
        "model": summary.model,
        "kind": summary.kind,
        "created": summary.created,
        "ended": summary.ended,
        "reason": summary.reason,
        "kept_until": summary.kept_until,
        "idempotency_key": summary.idempotency_key,
    }


def _record_view(record: RequestRecord) -> dict[str, Any]:
    """The record as the service would give it, and what exists of an answer that has no end yet."""
    from relevo.service.views import past_record

    partial = [{"choice": c.choice, "text": c.text, "tokens": len(c.tokens)} for c in record.checkpoints]
    return {**past_record(record), "partial": partial}


# ---------------------------------------------------------------- for people


def _print_record(record: dict[str, Any]) -> None:
    relevo = record.get("relevo") or {}
    lines = [
        ("request", record.get("id")),
        ("state", record.get("state")),
        ("reason", record.get("reason")),
        ("model", record.get("model")),
        ("route", _route_text(relevo)),
        ("policy", record.get("policy")),
        ("priority", record.get("priority")),
        ("created", time_text(record.get("created"))),
        ("ended", time_text(record.get("ended")) if record.get("ended") else None),
        ("attempts", record.get("attempts")),
        ("weighed", weighed_text(record.get("weighed"))),
        ("parked", (relevo.get("parked") or {}).get("reason")),
        ("kept until", time_text(record["kept_until"]) if record.get("kept_until") else None),
    ]
    for name, value in lines:
        if value not in (None, "", "-"):
            say(f"{name:<11} {plain(str(value))}")
    for handover in relevo.get("handovers") or []:
        say(f"{'handover':<11} {_handover_text(handover)}")
    for event in record.get("events") or []:
        line = _event_text(event)
        if line is not None:
            say(f"{'history':<11} {time_text(event.get('at'))}  {line}")
    error = record.get("error")
    if isinstance(error, dict) and error.get("message"):
        say(f"{'error':<11} {plain(str(error['message']))}")
    if record.get("state") == "resumable":
        say(f"{'resume':<11} relevo requests resume {record.get('id')}")
    _print_answer(record)


def _event_text(event: dict[str, Any]) -> str | None:
    """One line of a request's history; None for what other lines say already."""
    if event.get("kind") == "attempt":
        cause = f": {event['cause']}" if event.get("cause") else ""
        return plain(f"attempt {event.get('attempt')} on the {event.get('route')} route, {event.get('device')}{cause}")
    if event.get("kind") == "attempt_ended":
        message = f": {event['message']}" if event.get("message") else ""
        return plain(f"attempt {event.get('attempt')} ended, {event.get('outcome')}{message}")
    if event.get("kind") == "state":
        return plain(f"{event.get('to')}" + (f": {event['reason']}" if event.get("reason") else ""))
    return None


def _route_text(relevo: dict[str, Any]) -> str | None:
    if not relevo.get("route"):
        return None
    device = f" on {relevo['device']}" if relevo.get("device") else ""
    reason = f", degraded: {relevo['reason']}" if relevo.get("degraded") and relevo.get("reason") else ""
    return f"{relevo['route']}{device}{reason}"


def weighed_text(weighed: dict[str, Any] | None) -> str | None:
    """By which figures a request was admitted, in a line."""
    if not weighed:
        return None
    size = "" if weighed.get("need_bytes") is None else f" ({bytes_text(weighed['need_bytes'])})"
    free, total = weighed.get("free_cells"), weighed.get("total_cells")
    text = f"{weighed.get('verdict')}: {weighed.get('need_cells')} cells{size} of {free} free, {total} in all"
    standby = weighed.get("standby")
    return text + (f"; standby {standby}" if standby else f"; no standby: {weighed.get('no_standby_reason')}")


def _handover_text(handover: dict[str, Any]) -> str:
    text = f"{handover.get('from')} to {handover.get('to') or 'nowhere yet'} at token {handover.get('at_token')}"
    text += f", {str(handover.get('cause')).rstrip('.')}"
    if handover.get("gap_ms") is not None:
        text += f", {duration_text(handover['gap_ms'] / 1000)} without output"
    return plain(text)


def _print_answer(record: dict[str, Any]) -> None:
    result = record.get("result")
    choices = result.get("choices") if isinstance(result, dict) else None
    choices = choices or record.get("partial") or []
    for choice in choices:
        if len(choices) > 1:
            say(f"\n[{choice.get('index', choice.get('choice'))}]")
        else:
            say()
        say(plain(str(choice.get("text", choice.get("message", {}).get("content", "") if "message" in choice else ""))))
    if not choices and record.get("payload_removed_at"):
        say("The answer was removed after the retention time.")
