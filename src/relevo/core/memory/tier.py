"""Where a predicted figure comes from, from the quickest to the surest."""

from __future__ import annotations

from relevo.core.described import Described


class Tier(Described):
    """How far a demand can be trusted."""

    CLOSED_FORM = "closed form", "Formulas on the file's header; what they cannot give is said to be unknown."
    DRY_RUN = "dry run", "The engine itself planned its buffers for these options, and allocated next to nothing."
    LEARNED = "learned", "An earlier load with these options on this machine was observed."
