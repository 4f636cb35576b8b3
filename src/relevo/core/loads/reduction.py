"""Taking less: the least harmful combination of smaller options with which a load fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Final

from msgspec.structs import replace

from relevo.core.events import StartModel
from relevo.core.loads.room import Scales
from relevo.core.loads.search import largest_that_fits
from relevo.core.loads.verdict import Change
from relevo.core.loads.wish import CONTEXT_STEP_TOKENS, LoadWish
from relevo.core.units import size_text

UBATCH_TOKENS: Final = (256, 128, 64)
"""The sizes a micro-batch is reduced to. It makes prompts slower, nothing else."""

FLASH_HARM: Final = 1.0
UBATCH_HARM: Final = 2.0
SLOTS_HARM: Final = 10.0
KV_HARM: Final = 35.0
CONTEXT_HARM: Final = 40.0
"""What each reduction costs whoever uses the model; micro-batch, slots and context for each halving, the context once
more for being touched at all. Only their order and rough distance matter: prompts a little slower, fewer answers side
by side, slightly other answers, conversations that do not fit."""

_VAIN: Final = 16
"""Fewer slots are not tried where all of them together free less than this part of what is missing."""


def floor_tokens(wish: LoadWish) -> int:
    """The context below which this load is never reduced."""
    least = max(wish.least_context_tokens, wish.wanted_context_tokens, 1)
    return min(wish.start.context_tokens, -(-least // CONTEXT_STEP_TOKENS) * CONTEXT_STEP_TOKENS)


Excess = Callable[[StartModel], "int | None"]
"""What a start is too large by; at most 0 where it fits; None where that is not known, and then it does not."""


def least_reduction(wish: LoadWish, start: StartModel, excess: Excess) -> StartModel | None:
    """The start that fits, reduced from `start` with the least harm; None where not even the least does.

    `excess` must be monotone in slots and context. In flash attention, KV type and micro-batch it need not be: a
    quantized cache can bring a copy larger than what it saves, and a smaller step can be laid out worse. So it can be
    had at all where one of the smallest forms fits.
    """
    if not any(_holds(excess(smallest)) for smallest in most_reduced(wish, start)):
        return None
    useful = _without_vain_slots(wish, start, excess)
    found = _least_harm(useful, start, excess)
    return found if found is not None or useful is wish else _least_harm(wish, start, excess)


def _holds(excess_bytes: int | None) -> bool:
    return excess_bytes is not None and excess_bytes <= 0


def _without_vain_slots(wish: LoadWish, start: StartModel, excess: Excess) -> LoadWish:
    """Without reducing slots where even the fewest free next to nothing of what is missing: a search ends sooner."""
    slots = _slots(wish, start)
    missing = excess(start)
    if len(slots) == 1 or missing is None:
        return wish
    fewest = excess(replace(start, slots=slots[-1]))
    vain = fewest is not None and missing - fewest < missing // _VAIN
    return replace(wish, allow=wish.allow - {"slots"}) if vain else wish


def _least_harm(wish: LoadWish, start: StartModel, excess: Excess) -> StartModel | None:
    floor = _floor(wish, start)
    found: StartModel | None = None
    least = math.inf
    for harm, candidate in sorted(_combinations(wish, start), key=lambda pair: pair[0]):
        if harm >= least:
            break
        # A context that costs too much does not help; and where the least that would help does not fit, more does not.
        tokens = _context_to_beat(start.context_tokens, floor, least - harm)
        context = _largest_context(candidate, tokens, excess)
        if context == start.context_tokens:
            return candidate  # in order of harm, and any context costs more than the least found so far
        if context is not None:
            found = replace(candidate, context_tokens=context)
            least = harm + _context_harm(start.context_tokens, context)
    return found


def changes_between(wish: LoadWish, start: StartModel, to: StartModel, scales: Scales) -> tuple[Change, ...]:
    """What differs, in the order of the ladder, each with what it frees of the device after those before it."""
    changes: list[Change] = []
    now = start
    for what in _ORDER:
        before, after = getattr(now, what), getattr(to, what)
        if before == after:
            continue
        then = replace(now, **{what: after})
        old, new = scales.load(now).device_bytes, scales.load(then).device_bytes
        frees = None if old is None or new is None else old - new
        changes.append(Change(what, before, after, frees, _sentence(wish, what, before, after, frees)))
        now = then
    return tuple(changes)


_ORDER: Final = (
    "flash_attention",
    "ubatch_tokens",
    "slots",
    "kv_type",
    "context_tokens",
    "host_expert_layers",
    "gpu_layers",
    "use_mmap",
    "repack",
    "route",
)


def _sentence(wish: LoadWish, what: str, before: object, after: object, frees: int | None) -> str:
    layers = wish.layers + 1
    words = {
        "flash_attention": "Flash attention is on",
        "ubatch_tokens": f"Prompts are read {after} tokens at a time instead of {before}",
        "slots": f"{after} answers side by side instead of {before}",
        "kv_type": f"The KV cache is kept as {after} instead of {before}",
        "context_tokens": f"A context of {after} tokens instead of {before}",
        "host_expert_layers": f"The experts of {after} layers stay in RAM",
        "gpu_layers": f"{after} of {layers} layers are on the device",
        "use_mmap": "The weights are mapped from the file",
        "repack": "The weights stay as they are in the file",
        "route": f"The {after} route instead of the {before} route",
    }[what]
    if frees is None:
        return f"{words}."
    return f"{words}, which frees {size_text(frees)}." if frees > 0 else f"{words}."


# -- the space of combinations


def _branches(wish: LoadWish, start: StartModel) -> list[StartModel]:
    """Flash attention and KV type as they may be. The strict profile fixes both; a quantized cache needs the first."""
    branches = [start]
    if start.profile == "strict":
        return branches
    if "flash_attention" in wish.allow and not start.flash_attention:
        branches.append(replace(start, flash_attention=True))
    if "kv_type" in wish.allow and start.kv_type == "f16":
        branches += [replace(branch, kv_type="q8_0") for branch in branches if branch.flash_attention]
    return branches


def _ubatches(wish: LoadWish, start: StartModel) -> list[int]:
    smaller = [tokens for tokens in UBATCH_TOKENS if tokens < start.ubatch_tokens] if "ubatch" in wish.allow else []
    return [start.ubatch_tokens, *smaller]


def _slots(wish: LoadWish, start: StartModel) -> list[int]:
    slots = [start.slots]
    while "slots" in wish.allow and slots[-1] > max(1, wish.least_slots):
        slots.append(max(1, wish.least_slots, slots[-1] // 2))
    return slots


def _floor(wish: LoadWish, start: StartModel) -> int:
    return floor_tokens(wish) if "context" in wish.allow else start.context_tokens


def most_reduced(wish: LoadWish, start: StartModel) -> list[StartModel]:
    """The smallest forms the load may have: of each choice of flash attention, KV type and micro-batch."""
    floor, slots = _floor(wish, start), _slots(wish, start)[-1]
    ubatches = _ubatches(wish, start)[::-1]
    return [
        replace(branch, ubatch_tokens=ubatch, slots=slots, context_tokens=floor)
        for branch, ubatch in product(_branches(wish, start), ubatches)
    ]


def _combinations(wish: LoadWish, start: StartModel) -> Iterator[tuple[float, StartModel]]:
    """All combinations but the context's, each with its harm."""
    for branch, ubatch, slots in product(_branches(wish, start), _ubatches(wish, start), _slots(wish, start)):
        harm = FLASH_HARM if branch.flash_attention != start.flash_attention else 0.0
        harm += KV_HARM if branch.kv_type != start.kv_type else 0.0
        harm += UBATCH_HARM * math.log2(start.ubatch_tokens / ubatch) + SLOTS_HARM * math.log2(start.slots / slots)
        yield harm, replace(branch, ubatch_tokens=ubatch, slots=slots)


def _context_harm(before_tokens: int, after_tokens: int) -> float:
    return CONTEXT_HARM * (1.0 + math.log2(before_tokens / after_tokens))


def _context_to_beat(before_tokens: int, floor: int, harm: float) -> int:
    """The smallest context whose harm is below this one, at least the floor; `before_tokens` where there is none."""
    if harm == math.inf:
        return floor
    if harm <= CONTEXT_HARM:
        return before_tokens
    tokens = before_tokens / math.exp2(harm / CONTEXT_HARM - 1.0)
    steps = math.floor(tokens / CONTEXT_STEP_TOKENS) + 1
    return max(floor, min(before_tokens, steps * CONTEXT_STEP_TOKENS))


def _largest_context(start: StartModel, least_tokens: int, excess: Excess) -> int | None:
    """The largest context that fits, from `least_tokens` to the start's own, in steps of 256; None: not even that."""
    step, whole = CONTEXT_STEP_TOKENS, start.context_tokens

    def excess_at(steps: int) -> int | None:
        return excess(replace(start, context_tokens=min(whole, steps * step)))

    steps = largest_that_fits(-(-least_tokens // step), -(-whole // step), excess_at)
    return None if steps is None else min(whole, steps * step)
