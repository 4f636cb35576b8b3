"""Heartbeats, silence, and whose fault the silence is."""

from __future__ import annotations

from relevo.replicas.liveness import TICK_S, Liveness, LivenessLimits, Sign

LIMITS = LivenessLimits(suspect_s=1.0, fence_s=3.0, step_deadline_s=60.0)


def tick_for(liveness: Liveness, now_s: float, length_s: float, step_s: float = TICK_S) -> tuple[float, list[Sign]]:
    signs = []
    for _ in range(round(length_s / step_s)):
        now_s += step_s
        signs.append(liveness.tick(now_s))
    return now_s, signs


def test_silence_makes_suspect_after_one_second_and_silent_after_three() -> None:
    _, signs = tick_for(Liveness(LIMITS, 0.0), 0.0, 3.2)
    assert signs.count(Sign.ALIVE) in range(18, 21)
    assert signs.count(Sign.SUSPECT) in range(39, 42)
    assert signs[-1] is Sign.SILENT
    assert signs == sorted(signs, key=[Sign.ALIVE, Sign.SUSPECT, Sign.SILENT].index)


def test_a_heartbeat_ends_the_suspicion() -> None:
    liveness = Liveness(LIMITS, 0.0)
    now_s, signs = tick_for(liveness, 0.0, 2.0)
    assert signs[-1] is Sign.SUSPECT
    liveness.heard(0.0)
    assert liveness.tick(now_s + TICK_S) is Sign.ALIVE


def test_time_in_which_we_could_not_listen_is_not_silence() -> None:
    liveness = Liveness(LIMITS, 0.0)
    assert liveness.tick(100.0) is Sign.ALIVE
    assert liveness.excused_s > 99
    _, signs = tick_for(liveness, 100.0, 10.0, step_s=2.0)  # a gateway that is starved all the time
    assert set(signs) == {Sign.ALIVE}


def test_a_starved_gateway_still_finds_a_dead_worker_in_the_end() -> None:
    _, signs = tick_for(Liveness(LIMITS, 0.0), 0.0, 80.0, step_s=2.0)
    assert signs[-1] is Sign.SILENT


def test_a_clock_that_steps_back_blames_nobody() -> None:
    liveness = Liveness(LIMITS, 100.0)
    assert liveness.tick(1.0) is Sign.ALIVE
    assert liveness.silent_s == 0.0


def test_an_endless_step_is_found_though_the_heart_beats() -> None:
    liveness = Liveness(LIMITS, 0.0)
    liveness.heard(59_999.0)
    assert liveness.tick(TICK_S) is Sign.ALIVE
    liveness.heard(60_000.0)
    assert liveness.tick(2 * TICK_S) is Sign.STUCK
    liveness.heard(0.0)
    assert liveness.tick(3 * TICK_S) is Sign.ALIVE
