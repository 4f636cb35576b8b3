"""What the outer contract shows of a request: the `relevo` object and the request record."""

from __future__ import annotations

from typing import Any

import msgspec

from relevo.core.admission import Admit, Delay, NoStandby, Redirect
from relevo.core.request import RequestState
from relevo.journal.records import RequestRecord
from relevo.service.routes import Route
from relevo.service.work import Work

CANCEL_PATH = "/relevo/v1/requests/{}/cancel"
RESUME_PATH = "/relevo/v1/requests/{}/resume"


def relevo_object(
    work: Work,
    *,
    device: str | None,
    limits: dict[str, Any] | None,
    queue: dict[str, Any] | None,
    eta: dict[str, Any] | None,
) -> dict[str, Any]:
    """The `relevo` object: route, device, model, limits, cause, estimate and how to cancel."""
    return {
        "request_id": work.request_id,
        "route": work.route or "pending",
        "device": device,
        "model": work.ask.model,
        "backup_model": work.backup_model,
        "degraded": work.degraded_reason is not None,
        "reason": work.degraded_reason,
        "standby": work.standby if work.standby is not None else "none",
        "limits": limits,
        "queue": queue,
        "eta": eta,
        "attempt": work.attempt,
        "parked": None if work.parked is None else work.parked.view(),
        "handovers": [h.view() for h in work.handovers],
        "cancel": CANCEL_PATH.format(work.request_id),
    }


def weighed_view(work: Work, verdict: Admit | Delay | Redirect, route: Route) -> dict[str, Any]:
    """By which figures it was admitted: what it needs, and what was free on its route at that moment."""
    outputs = list(verdict.outputs)
    cells = route.cells.need_cells(len(work.prompt_tokens), outputs)
    return {
        "verdict": type(verdict).__name__.lower(),
        "policy": work.ask.policy,
        "priority": work.ask.priority,
        "route": verdict.route,
        "device": verdict.device,
        "prompt_tokens": len(work.prompt_tokens),
        "output_tokens": outputs,
        "need_cells": cells,
        "need_bytes": None if route.cell_bytes is None else round(cells * route.cell_bytes),
        "free_cells": route.cells.free_cells,
        "total_cells": route.cells.total_cells,
        "position": verdict.position,
        "standby": None if isinstance(verdict.standby, NoStandby) else verdict.standby.route,
        "no_standby_reason": verdict.standby.reason if isinstance(verdict.standby, NoStandby) else None,
    }


def result_of(work: Work) -> dict[str, Any]:
    """The answer as it stands: every choice with its text and how it ended."""
    usage = work.usage
    return {
        "kind": work.ask.kind,
        "choices": [
            {"index": c.index, "text": c.whole_text, "finish_reason": c.finish, "output_tokens": len(c.tokens)}
            for c in work.choices
        ],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }


def live_record(work: Work, relevo: dict[str, Any], record: RequestRecord) -> dict[str, Any]:
    """The record of a request that is in memory. Partial output is shown before the end, too."""
    partial = work.output_tokens > 0 or work.state is RequestState.COMPLETED
    return {
        "id": work.request_id,
        "state": str(work.state),
        "model": work.ask.model,
        "kind": work.ask.kind,
        "n": len(work.choices),
        "policy": work.ask.policy,
        "priority": work.ask.priority,
        "created": work.created,
        "ended": work.ended_at,
        "reason": work.reason,
        "error": work.error,
        "result": result_of(work) if partial else None,
        "attempts": work.attempt,
        "events": history(record),
        "forecast": relevo.get("eta"),
        "weighed": _decoded(record.weighed),
        "kept_until": work.kept_until,
        "relevo": relevo,
    }


def past_record(record: RequestRecord) -> dict[str, Any]:
    """The record of a request that is no longer in memory."""
    summary = record.summary
    result = msgspec.json.decode(record.result) if record.result is not None else None
    relevo = result.pop("relevo", None) if result is not None else None
    error = result.pop("error", None) if result is not None else None
    weighed = _decoded(record.weighed)
    return {
        "id": summary.id,
        "state": summary.state,
        "model": summary.model,
        "kind": summary.kind,
        "n": None if result is None else len(result.get("choices", [])),
        "policy": (weighed or {}).get("policy"),
        "priority": (weighed or {}).get("priority"),
        "created": summary.created,
        "ended": summary.ended,
        "reason": summary.reason,
        "error": error,
        "result": result,
        "attempts": len(record.attempts),
        "events": history(record),
        "forecast": None,
        "weighed": weighed,
        "kept_until": summary.kept_until,
        "relevo": relevo,
        "payload_removed_at": summary.blanked,
    }


def _decoded(stored: bytes | None) -> dict[str, Any] | None:
    """A JSON object of the record; None where it was not stored, or removed after its time."""
    return msgspec.json.decode(stored) or None if stored else None


def history(record: RequestRecord) -> list[dict[str, Any]]:
    """States and attempts in the order they happened."""
    moves = [{"at": m.at, "kind": "state", "from": m.old, "to": m.new, "reason": m.reason} for m in record.moves]
    started = [
        {
            "at": a.started,
            "kind": "attempt",
            "attempt": a.attempt,
            "route": a.route,
            "device": a.device,
            "cause": a.cause,
        }
        for a in record.attempts
    ]
    ended = [
        {"at": a.ended, "kind": "attempt_ended", "attempt": a.attempt, "outcome": a.outcome, "message": a.message}
        for a in record.attempts
        if a.ended is not None
    ]
    return sorted([*moves, *started, *ended], key=lambda e: e["at"])


def resumable_error(work: Work, message: str) -> dict[str, Any]:
    """The one error event of a stream that stopped half-way and can go on."""
    return {
        "message": message,
        "type": "server_error",
        "code": "resumable",
        "param": None,
        "checkpoint": f"{work.request_id}:{work.attempt}:{work.output_tokens}",
        "resume": RESUME_PATH.format(work.request_id),
        "kept_until": work.kept_until,
    }
