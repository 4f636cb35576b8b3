"""Enums whose members carry a sentence, and the one way to move along a transition table."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Self, TypeVar

from relevo.core.errors import OurBug


class Described(StrEnum):
    """A text enum; each member is written `NAME = "value", "What it means, in a sentence."`."""

    sentence: str

    def __new__(cls, value: str, sentence: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.sentence = sentence
        return member


class IllegalTransition(OurBug):
    """Something moved between two states that its published table does not join. This is our bug."""


State = TypeVar("State", bound=Described)


def named(states: type[State], value: str) -> State:
    """The member with this value. Raises OurBug where there is none: values from outside were checked before."""
    for member in states:
        if member.value == value:
            return member
    raise OurBug(f"{value!r} is no {states.__name__}.")


def move(what: str, table: Mapping[State, frozenset[State]], old: State, new: State) -> State:
    """Return `new` where the table joins it to `old`. Raises IllegalTransition, naming what would be right."""
    if new not in table[old]:
        allowed = ", ".join(sorted(table[old])) or "nowhere: it is an end"
        raise IllegalTransition(f"{what} cannot move from {old} to {new} (from {old} it may move to {allowed}).")
    return new
