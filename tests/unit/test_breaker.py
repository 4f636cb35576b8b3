"""The breaker trips on the kind of a fault, and trust comes back by numbered probes."""

from __future__ import annotations

import msgspec
import pytest

from relevo.core.breaker import (
    DEVICE_THRESHOLDS,
    REPLICA_THRESHOLDS,
    Breaker,
    BreakerRecord,
    BreakerSettings,
    BreakerState,
    FaultKind,
    Hold,
    Permit,
)

K = FaultKind
OPEN, HALF_OPEN, CLOSED = BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED
AT_ONCE = [K.STICKY_DEVICE, K.DEVICE_LOST, K.RESET_CLASS, K.DEVICE_CHANGED, K.WORKER_KILLED_BY_DEVICE]


def probe(breaker: Breaker, now: float) -> Permit:
    permit, _ = breaker.permit_probe(now)
    assert permit is not None, breaker
    return permit


def opened(now: float = 0.0, **settings: float) -> Breaker:
    breaker = Breaker("gpu0", settings=BreakerSettings(**settings))  # type: ignore[arg-type]
    breaker.fault(K.DEVICE_LOST, now)
    return breaker


def returned(breaker: Breaker, now: float) -> None:
    """Let it close by probes alone."""
    breaker.report_probe(probe(breaker, now), True, now)
    breaker.report_probe(probe(breaker, now), True, now)
    assert breaker.state is CLOSED


def test_every_kind_of_fault_has_a_sentence_and_a_threshold() -> None:
    for kind in FaultKind:
        assert kind.sentence.endswith(".")
        assert kind in DEVICE_THRESHOLDS
        assert kind in REPLICA_THRESHOLDS


@pytest.mark.parametrize("kind", AT_ONCE)
def test_a_fault_of_the_device_itself_opens_at_once(kind: FaultKind) -> None:
    breaker = Breaker("gpu0")
    (opening,) = breaker.fault(kind, 7.0)
    assert (opening.from_, opening.to, opening.at, opening.kind) == (CLOSED, OPEN, 7.0, kind)
    assert opening.cause == kind.sentence
    assert not breaker.allow_work(7.0)


def test_a_second_failed_allocation_within_a_minute_opens() -> None:
    breaker = Breaker("gpu0")
    assert breaker.fault(K.ALLOCATION, 0.0) == ()
    assert breaker.fault(K.ALLOCATION, 61.0) == ()
    assert len(breaker.fault(K.ALLOCATION, 100.0)) == 1


@pytest.mark.parametrize("kind", [K.PROBE_FAILED, K.STALL, K.CUT_SHORT])
def test_the_third_of_the_softer_faults_opens(kind: FaultKind) -> None:
    breaker = Breaker("gpu0")
    assert breaker.fault(kind, 0.0) == ()
    assert breaker.fault(kind, 1.0) == ()
    assert breaker.allow_work(1.0)
    assert len(breaker.fault(kind, 2.0)) == 1


def test_kinds_are_counted_apart() -> None:
    breaker = Breaker("gpu0")
    for kind in (K.STALL, K.CUT_SHORT, K.ALLOCATION, K.STALL, K.CUT_SHORT):
        assert breaker.fault(kind, 0.0) == ()


def test_one_replica_that_keeps_dying_does_not_open_its_device() -> None:
    device = Breaker("gpu0")
    for at in range(5):
        assert device.fault(K.UNCLASSIFIED_DEATH, float(at), source="chat/gpu") == ()
    assert len(device.fault(K.UNCLASSIFIED_DEATH, 5.0, source="speech/gpu")) == 1


def test_two_replicas_that_die_long_apart_do_not_open_their_device() -> None:
    device = Breaker("gpu0")
    device.fault(K.UNCLASSIFIED_DEATH, 0.0, source="chat/gpu")
    assert device.fault(K.UNCLASSIFIED_DEATH, 601.0, source="speech/gpu") == ()


def test_a_second_unclassified_death_opens_the_replica() -> None:
    replica = Breaker("chat/gpu", REPLICA_THRESHOLDS)
    assert replica.fault(K.UNCLASSIFIED_DEATH, 0.0) == ()
    assert len(replica.fault(K.UNCLASSIFIED_DEATH, 500.0)) == 1


def test_open_sends_nothing_until_a_probe_is_due() -> None:
    breaker = opened()
    assert breaker.next_probe_s(2.0) == 3.0
    assert breaker.permit_probe(4.9) == (None, ())
    permit, (change,) = breaker.permit_probe(5.0)
    assert permit == Permit("gpu0", 1)
    assert (change.from_, change.to) == (OPEN, HALF_OPEN)
    assert not breaker.allow_work(5.0)


def test_one_probe_at_a_time() -> None:
    breaker = opened()
    probe(breaker, 5.0)
    assert breaker.permit_probe(6.0) == (None, ())


def test_consecutive_good_probes_close_it() -> None:
    breaker = opened()
    assert breaker.report_probe(probe(breaker, 5.0), True, 5.5) == ()
    (closing,) = breaker.report_probe(probe(breaker, 5.5), True, 6.0)
    assert (closing.from_, closing.to) == (HALF_OPEN, CLOSED)
    assert closing.cause == "2 probes in a row gave the known answer."
    assert breaker.allow_work(6.0)
    assert repr(breaker) == "<Breaker gpu0 closed>"


def test_a_bad_probe_opens_it_again_for_twice_as_long() -> None:
    breaker = opened()
    breaker.report_probe(probe(breaker, 5.0), True, 5.0)
    (opening,) = breaker.report_probe(probe(breaker, 5.0), False, 6.0)
    assert (opening.from_, opening.to, opening.next_probe_s) == (HALF_OPEN, OPEN, 10.0)
    assert repr(breaker) == (
        "<Breaker gpu0 open since 6: A small real inference with a known answer did not give it, next probe at 16>"
    )


def test_reopening_backs_off_up_to_a_cap() -> None:
    breaker, now, waits = opened(longest_open_s=60.0), 0.0, []
    for _ in range(6):
        wait = breaker.next_probe_s(now)
        assert wait is not None
        waits.append(wait)
        now += wait
        breaker.report_probe(probe(breaker, now), False, now)
    assert waits == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]


def test_a_late_answer_of_an_overtaken_probe_is_counted_and_ignored() -> None:
    breaker = opened(probe_timeout_s=10.0)
    slow = probe(breaker, 5.0)
    latest = probe(breaker, 15.0)
    assert (slow.number, latest.number) == (1, 2)
    assert breaker.report_probe(slow, True, 15.5) == ()
    assert breaker.report_probe(slow, False, 15.5) == ()
    assert (breaker.overtaken_probes, breaker.state) == (2, HALF_OPEN)
    assert breaker.report_probe(latest, True, 16.0) == ()
    assert len(breaker.report_probe(probe(breaker, 16.0), True, 16.0)) == 1


def test_an_answer_counts_once() -> None:
    breaker = opened()
    permit = probe(breaker, 5.0)
    breaker.report_probe(permit, True, 5.0)
    assert breaker.report_probe(permit, True, 5.0) == ()
    assert breaker.state is HALF_OPEN


def test_a_good_answer_from_before_an_opening_does_not_count() -> None:
    breaker = Breaker("gpu0")
    permit = probe(breaker, 0.0)
    breaker.fault(K.DEVICE_LOST, 0.1)
    assert breaker.report_probe(permit, True, 0.2) == ()
    assert (breaker.state, breaker.overtaken_probes) == (OPEN, 1)


def test_any_fault_while_half_open_opens_it_again() -> None:
    breaker = opened()
    probe(breaker, 5.0)
    (opening,) = breaker.fault(K.UNCLASSIFIED_DEATH, 6.0, source="chat/gpu")
    assert opening.to is OPEN


def test_probes_go_while_it_is_closed_and_three_bad_ones_in_a_row_open_it() -> None:
    breaker = Breaker("gpu0")
    for ok in (False, False, True, False, False):
        assert breaker.report_probe(probe(breaker, 1.0), ok, 1.0) == ()
    (opening,) = breaker.report_probe(probe(breaker, 1.0), False, 1.0)
    assert opening.kind is K.PROBE_FAILED


def test_coming_back_and_falling_again_makes_the_next_wait_longer() -> None:
    breaker = opened()
    returned(breaker, 5.0)
    (again,) = breaker.fault(K.DEVICE_LOST, 10.0)
    assert again.next_probe_s == 10.0
    returned(breaker, 20.0)
    (third,) = breaker.fault(K.DEVICE_LOST, 21.0)
    assert (third.next_probe_s, breaker.unforced_returns) == (20.0, 2)


def test_returns_of_long_ago_are_forgotten() -> None:
    breaker = opened()
    returned(breaker, 5.0)
    (again,) = breaker.fault(K.DEVICE_LOST, 4000.0)
    assert (again.next_probe_s, breaker.unforced_returns) == (5.0, 0)


def test_a_return_forced_by_the_operator_is_no_unforced_return() -> None:
    breaker = opened()
    (closing,) = breaker.force_close(1.0)
    assert (closing.to, closing.cause) == (CLOSED, "An operator closed it.")
    (again,) = breaker.fault(K.DEVICE_LOST, 2.0)
    assert again.next_probe_s == 5.0


def test_what_an_operator_opened_no_probe_closes() -> None:
    breaker = Breaker("gpu0")
    (opening,) = breaker.force_open(1.0, "The card is being replaced.")
    assert (opening.cause, opening.next_probe_s) == ("The card is being replaced.", None)
    assert breaker.permit_probe(1e9) == (None, ())
    assert not breaker.probe_soon(2.0)
    assert breaker.next_probe_s(2.0) is None
    breaker.force_close(3.0)
    assert breaker.allow_work(3.0)


def test_an_operator_may_hold_what_is_open_already_and_an_answer_under_way_does_not_count() -> None:
    breaker = opened()
    permit = probe(breaker, 5.0)
    breaker.drain(5.5)
    assert breaker.hold is Hold.DRAINING
    assert breaker.report_probe(permit, True, 6.0) == ()
    assert breaker.state is OPEN
    assert "draining by an operator" in repr(breaker)


def test_an_operator_can_have_a_probe_at_once() -> None:
    breaker = opened()
    assert breaker.permit_probe(1.0)[0] is None
    assert breaker.probe_soon(1.0)
    assert probe(breaker, 1.0).number == 1
    assert not Breaker("gpu0").probe_soon(1.0)


def test_the_state_survives_a_restart() -> None:
    breaker = opened(now=100.0)
    returned(breaker, 105.0)
    breaker.fault(K.DEVICE_LOST, 110.0)
    wire = msgspec.json.encode(breaker.export().shifted(1000.0))
    again = Breaker("gpu0")
    again.restore(msgspec.json.decode(wire, type=BreakerRecord).shifted(-1100.0))
    assert (again.state, again.since, again.next_probe_s(10.0)) == (OPEN, 10.0, 10.0)
    assert again.cause == K.DEVICE_LOST.sentence
    assert probe(again, 20.0).number == 3  # numbering goes on, so an answer from before cannot be taken for a new one


def test_half_open_is_taken_up_as_open_with_a_probe_due() -> None:
    breaker = opened()
    old = probe(breaker, 5.0)
    again = Breaker("gpu0")
    again.restore(breaker.export())
    assert (again.state, again.next_probe_s(5.0)) == (OPEN, 0.0)
    assert again.report_probe(old, True, 5.0) == ()
    assert probe(again, 5.0).number == 2


def test_a_hold_survives_a_restart() -> None:
    breaker = Breaker("gpu0")
    breaker.force_open(1.0)
    again = Breaker("gpu0")
    again.restore(breaker.export())
    assert again.permit_probe(1e9) == (None, ())
    assert again.hold is Hold.OPENED


def test_faults_are_remembered_across_a_restart() -> None:
    breaker = Breaker("gpu0")
    breaker.fault(K.ALLOCATION, 0.0)
    again = Breaker("gpu0")
    again.restore(breaker.export())
    assert len(again.fault(K.ALLOCATION, 1.0)) == 1
