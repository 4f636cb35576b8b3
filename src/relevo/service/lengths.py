"""How long a model's answers are, over a restart: a new start need not learn anew how many cells to set aside."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from relevo.journal import Journal, PutFact
from relevo.service.records import log_failure
from relevo.service.routes import ServedModel

_log = logging.getLogger("relevo.lengths")

LENGTHS_FACT = "lengths:"
WORTH_KEEPING = 16
"""So many new answers are worth a write."""


class AnswerLengths:
    """Keeps what the forecasts know of the lengths of answers in the journal's facts."""

    def __init__(self, journal: Journal, models: Mapping[str, ServedModel]) -> None:
        self._journal = journal
        self._models = models
        self._kept: dict[str, int] = {}

    async def recall(self) -> None:
        """Give every model what it knew before."""
        for name, model in self._models.items():
            kept = await self._journal.fact(LENGTHS_FACT + name)
            try:
                lengths = [] if kept is None else msgspec.json.decode(kept, type=list[int])
            except msgspec.MsgspecError as e:
                _log.warning("the lengths of answers of %s are not readable and are learned anew: %s", name, e)
                continue
            for tokens in lengths:
                model.preferred.forecast.outputs.add(tokens)
            self._kept[name] = model.preferred.forecast.outputs.added

    def keep(self, *, worth: int = WORTH_KEEPING) -> None:
        """Write down what is new, where it is `worth` it."""
        for name, model in self._models.items():
            outputs = model.preferred.forecast.outputs
            if outputs.added - self._kept.get(name, 0) < worth:
                continue
            self._kept[name] = outputs.added
            fact = PutFact(key=LENGTHS_FACT + name, value=msgspec.json.encode(outputs.values))
            self._journal.submit(fact).add_done_callback(log_failure(f"the lengths of answers of {name}"))
