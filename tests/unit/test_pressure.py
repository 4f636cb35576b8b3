"""Stages of pressure: worse at once, better slowly, and no flapping between two thresholds."""

from __future__ import annotations

import pytest

from relevo.core.leases.pressure import PressureGauge, PressureStage, next_stage

CALM, TIGHT, CRITICAL, UNKNOWN = PressureStage


@pytest.mark.parametrize(
    ("stage", "slack", "then"),
    [
        (CALM, 100, CALM),
        (CALM, 75, CALM),
        (CALM, 74, TIGHT),
        (CALM, 25, TIGHT),
        (CALM, 24, CRITICAL),
        (CALM, -10, CRITICAL),
        (TIGHT, 99, TIGHT),
        (TIGHT, 100, CALM),
        (TIGHT, 24, CRITICAL),
        (CRITICAL, 49, CRITICAL),
        (CRITICAL, 50, TIGHT),
        (CRITICAL, 99, TIGHT),
        (CRITICAL, 100, CALM),
    ],
)
def test_each_stage_has_a_threshold_to_enter_and_a_higher_one_to_leave(
    stage: PressureStage, slack: int, then: PressureStage
) -> None:
    assert next_stage(stage, slack, 100) is then


def test_worse_is_believed_at_once_and_better_after_the_stay() -> None:
    gauge = PressureGauge(stay_s=5.0)
    assert gauge.update(100, 100, 0.0).stage is CALM
    assert gauge.update(10, 100, 1.0).stage is CRITICAL
    assert gauge.update(100, 100, 5.9).stage is CRITICAL
    assert gauge.update(100, 100, 6.0).stage is CALM
    assert gauge.update(70, 100, 6.1).stage is TIGHT
    assert (gauge.pressure.since, gauge.pressure.slack_bytes, gauge.pressure.headroom_bytes) == (6.1, 70, 100)


def test_figures_that_swing_around_one_threshold_do_not_move_the_stage() -> None:
    gauge = PressureGauge(stay_s=0.0)
    stages = [gauge.update(slack, 100, float(now)).stage for now, slack in enumerate((80, 74, 76, 74, 99, 74))]
    assert stages == [CALM, TIGHT, TIGHT, TIGHT, TIGHT, TIGHT]


def test_unknown_is_a_stage_with_a_reason_and_forgets_nothing() -> None:
    gauge = PressureGauge(stay_s=5.0)
    assert (gauge.pressure.stage, gauge.pressure.reason) == (UNKNOWN, "It was not read yet.")
    gauge.update(10, 100, 1.0)
    unknown = gauge.update(None, 100, 2.0, "The driver does not answer.")
    assert (unknown.stage, unknown.reason, unknown.since) == (UNKNOWN, "The driver does not answer.", 2.0)
    assert gauge.update(100, 100, 3.0).stage is CRITICAL  # it was critical two seconds ago
    assert gauge.update(100, 100, 6.0).stage is CALM


def test_without_a_headroom_only_a_deficit_is_pressure() -> None:
    assert next_stage(CALM, 0, 0) is CALM
    assert next_stage(CALM, -1, 0) is CRITICAL
    assert next_stage(CRITICAL, 0, 0) is CALM


def test_every_stage_has_a_sentence() -> None:
    assert all(stage.sentence.endswith(".") for stage in PressureStage)
