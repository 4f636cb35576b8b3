"""What people see: sizes, times, tables; what is unknown says so, and what strangers wrote steers nothing."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from relevo.cli.output import bytes_text, duration_text, figure, plain, short
from relevo.cli.requests import _only, _print_record, weighed_text
from relevo.cli.running import local_url
from relevo.cli.serve import curl_line, render_announcement
from relevo.cli.status import breaker_text, certificate_text, kind_text, render_status
from relevo.core.errors import Conflict, RequestNotFound
from relevo.service.run import Announcement

GIB = 2**30
GPU = {
    "name": "gpu0", "kind": "emulated", "emulated": True, "total_bytes": 2 * GIB, "leased_bytes": GIB,
    "external_bytes": None, "external_reason": "The driver reports no processes.", "available_bytes": GIB,
    "headroom_bytes": 0, "read_at": 1.0,
    "breaker": {"state": "open", "cause": "A worker was killed.", "since": 0.0, "next_probe_s": 3.0},
}  # fmt: skip
STATUS: dict[str, Any] = {
    "state": "degraded", "version": "0.1.0", "reasons": ["[red]out of memory[/red]"], "devices": [GPU],
    "replicas": [{"model": "m", "task": "chat", "route": "gpu", "device": "gpu0", "state": "failed",
                  "pid": None, "engine": None}],
    "lanes": [{"name": "m/cpu", "queued": 2, "running": 1, "oldest_age_ms": 1500, "limit": 16}],
    "certificate": None,
}  # fmt: skip


def shown(*parts: Any) -> str:
    screen = Console(file=io.StringIO(), width=220, markup=False, highlight=False)
    for part in parts:
        screen.print(part)
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in text
    return str(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (98 * 2**20, "98.0 MiB"), (3 * GIB // 2, "1.5 GiB"),
     (None, "unknown"), ("many", "unknown")],
)  # fmt: skip
def test_sizes_have_binary_units(count: Any, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12 ms"), (1.26, "1.3 s"), (61, "1 min 1 s"), (3700, "1 h 1 min"), (90000, "1 d 1 h"), (None, "unknown")],
)
def test_spans_have_their_two_largest_units(seconds: Any, text: str) -> None:
    assert duration_text(seconds) == text


def test_what_would_steer_a_terminal_is_replaced() -> None:
    assert "\x1b" not in plain("a\x1b[2Jb")
    assert short("x" * 100, 10) == "x" * 9 + "…"


def test_an_unknown_figure_gives_its_reason() -> None:
    assert figure(GPU, "external_bytes") == "unknown: The driver reports no processes."
    assert figure(GPU, "total_bytes") == "2.0 GiB"


def test_status_shows_emulation_causes_and_lanes_and_obeys_no_markup() -> None:
    text = shown(*render_status(STATUS, "http://127.0.0.1:8377"))
    assert "degraded" in text and "emulated" in text
    assert "unknown: The driver reports no processes." in text
    assert "open: A worker was killed." in text and "next probe in 3.0 s" in text
    assert "[red]out of memory[/red]" in text
    assert "m/cpu" in text and "1.5 s" in text
    assert "Certificate: none." in text


def test_status_shows_how_cells_are_used_and_why_somebody_is_parked() -> None:
    cells = {"cells_live": 1, "cells_leased": 22, "cells_set_aside": 333, "cells_total": 4444}
    lane = STATUS["lanes"][0] | cells | {"parked": 1, "parked_reason": "All cells are taken."}
    text = shown(*render_status(STATUS | {"lanes": [lane]}, "u"))
    assert "1 / 22 / 333 / 4444" in text and "m/cpu: parked: All cells are taken." in text


def test_status_survives_fields_that_are_missing() -> None:
    assert "ok" in shown(
        *render_status({"state": "ok", "devices": [{"name": "x"}], "replicas": [{}], "lanes": [{}]}, "u")
    )


def test_an_emulated_device_never_passes_for_a_real_one() -> None:
    assert "emulated" in kind_text({"kind": "gpu", "emulated": True})
    assert "emulated" not in kind_text({"kind": "nvidia", "emulated": False})


def test_a_closed_breaker_is_one_word() -> None:
    assert breaker_text({"state": "closed", "cause": "old"}) == "closed"
    assert certificate_text({"verdict": "APPROVE", "expires": None}) == "Certificate: APPROVE."


def announcement(**changes: Any) -> Announcement:
    fields: dict[str, Any] = {
        "url": "http://127.0.0.1:8377", "state": "/state", "keys": False, "recovered": 0, "warnings": [],
        "models": [{"id": "it's", "routes": [{"route": "gpu", "device": "gpu0"}, {"route": "cpu", "device": "host"}]}],
        "devices": [GPU],
    }  # fmt: skip
    return Announcement(**{**fields, **changes})


def test_the_announcement_says_where_what_and_how_to_try_it() -> None:
    text = render_announcement(announcement(recovered=2, warnings=["gpu is late"]))
    for part in (
        "http://127.0.0.1:8377",
        "emulated",
        "gpu on gpu0 and cpu on host",
        "/state",
        "2 request",
        "gpu is late",
    ):
        assert part in text
    assert "curl http://127.0.0.1:8377/v1/chat/completions" in text and "Authorization" not in text


def test_the_curl_line_is_safe_in_a_shell_and_keeps_the_key_out() -> None:
    import shlex

    words = shlex.split(curl_line("http://h:1", "it's", keys=True))
    assert words[0] == "curl" and "Authorization: Bearer $RELEVO_KEY" in words
    assert '"it\'s"' in words[-1]


def test_all_addresses_are_reached_by_loopback() -> None:
    assert local_url("0.0.0.0", 1) == "http://127.0.0.1:1"
    assert local_url("::", 1) == "http://[::1]:1"
    assert local_url("192.168.1.5", 1) == "http://192.168.1.5:1"


def test_the_beginning_of_an_id_must_fit_one_request() -> None:
    assert _only("req_a", ["req_ab", "req_bc"]) == "req_ab"
    with pytest.raises(Conflict):
        _only("req_", ["req_ab", "req_bc"])
    with pytest.raises(RequestNotFound):
        _only("req_x", ["req_ab"])


def test_a_record_shows_its_handover_and_answer(capsys: pytest.CaptureFixture[str]) -> None:
    record = {
        "id": "req_1", "state": "completed", "model": "m", "created": 1.0, "ended": 2.0, "attempts": 2, "reason": None,
        "result": {"choices": [{"index": 0, "text": "Paris.\x1b[0m"}]},
        "relevo": {"route": "cpu", "device": "host", "degraded": True, "reason": "The GPU is gone.",
                   "handovers": [{"from": "gpu", "to": "cpu", "at_token": 0, "cause": "killed", "gap_ms": 120}]},
    }  # fmt: skip
    _print_record(record)
    text = capsys.readouterr().out
    for part in ("Paris.", "gpu to cpu at token 0", "killed", "120 ms", "The GPU is gone."):
        assert part in text
    assert "\x1b" not in text


def test_a_request_says_by_which_figures_it_was_admitted() -> None:
    weighed = {"verdict": "admit", "need_cells": 36, "need_bytes": 855_360, "free_cells": 8000, "total_cells": 8192}
    said = weighed_text({**weighed, "standby": "cpu"})
    assert said == "admit: 36 cells (835 KiB) of 8000 free, 8192 in all; standby cpu"
    alone = weighed_text({**weighed, "standby": None, "no_standby_reason": "This model has no other route."})
    assert alone is not None and alone.endswith("; no standby: This model has no other route.")
    assert weighed_text(None) is None
