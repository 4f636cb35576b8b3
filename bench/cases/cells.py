"""How the cells of a replica are used: what is held is live, what is set aside, who had to wait."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.cells_replay import Replay, Shape, drawn_lengths, read_trace
from bench.figures import Report

GOAL = 0.96
"""Least share of the held cells that hold a token."""

SHAPES = {
    "no limit named": Shape(),
    "no limit named, overloaded": Shape(load=3.0),
    "no limit named, half the cells": Shape(cells=4096, load=3.0),
    "no limit named, frames 8 steps late": Shape(load=3.0, late_steps=8),
    "every second names 1,024": Shape(load=3.0, named=0.5),
    "all name 1,024 (as much as a lease of the whole limit)": Shape(load=3.0, named=1.0),
}


def run(report: Report, *, quick: bool, traces: Sequence[Path] = ()) -> None:
    """The case. Raises AssertionError where less of what is held is live than the goal."""
    calls = 400 if quick else 3000
    mixes = {path.stem: read_trace(path, calls) for path in traces} or {
        f"{kind} (drawn from the trace's quantiles)": drawn_lengths(kind, calls) for kind in ("conversation", "code")
    }
    report.start(
        "Cells: how much of what is held is used",
        "The service's own classes with a played worker: a token a step, 64 prompt rows a step, 8 slots and 8,192 "
        "cells where nothing else is said; arrival times stretched to the load. Held: cells that hold a token, or may "
        "at any moment. Set aside: promised to a running request, and not held. Reserved and unused: held or set "
        "aside, and no token in it, as a share of the whole pool.\n\n"
        f"Goal: at least {GOAL:.0%} of the held cells are live.",
    )
    rows = []
    for mix, lengths in mixes.items():
        for name, shape in SHAPES.items():
            replay = Replay(lengths, shape)
            replay.run()
            found = replay.figures()
            report.keep("cells", mix=mix, shape=name, **found)
            assert found["live_of_held"] >= GOAL, f"{mix}, {name}: {found['live_of_held']:.1%} of the held cells live"
            rows.append([mix, name, *_row(found)])
    report.table(
        [
            "lengths",
            "asked",
            "live of held",
            "live of held and set aside",
            "reserved and unused, of the pool",
            "running",
            "wait, steps",
            "parks (share of time)",
            "gave way",
            "extensions a call",
            "waited for a frame",
        ],
        rows,
    )
    report.end()


def _row(found: dict[str, float]) -> list[str]:
    return [
        f"{found['live_of_held']:.1%}",
        f"{found['live_of_reserved']:.1%}",
        f"{found['reserved_unused_of_pool']:.1%}",
        f"{found['running']:.2f}",
        f"{found['wait_steps']:.0f}",
        f"{found['parks']:.0f} ({found['parked_of_running']:.2%})",
        f"{found['give_ways']:.0f} of {found['calls']:.0f}",
        f"{found['extensions_a_call']:.1f}",
        f"{found['late_of_drawn']:.2%}",
    ]
