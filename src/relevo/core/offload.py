"""A part of the model stays in RAM: experts first, because attention and its cache gain most from the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from relevo.core.events import StartModel
from relevo.core.room import Room, Scales
from relevo.core.wish import LoadWish

LEAST_GPU_LAYERS: Final = 2
"""The output head and one layer. With less on the device the CPU route is as good, and simpler."""


def least_offload(wish: LoadWish, start: StartModel, room: Room, scales: Scales) -> StartModel | None:
    """The start with the fewest layers (of a mixture of experts, first the fewest experts) in RAM that fits.

    Both halves of the search are monotone: what leaves the device goes to the host. So the first placement that fits
    the device leaves the host the least, and where the host has no room for it, no other placement helps.
    """

    def on_device(candidate: StartModel) -> bool:
        return room.device_holds(scales.load(candidate))

    hybrid = replace(start, route="hybrid", gpu_layers=min(start.gpu_layers, wish.layers + 1))
    found = None
    if wish.expert_layers > hybrid.host_expert_layers:
        without = replace(hybrid, host_expert_layers=wish.expert_layers)
        if on_device(without):
            low, high = hybrid.host_expert_layers + 1, wish.expert_layers
            least = _first(low, high, lambda n: on_device(replace(hybrid, host_expert_layers=n)))
            found = replace(hybrid, host_expert_layers=least)
        hybrid = without
    if found is None:
        most = hybrid.gpu_layers - 1
        if most < LEAST_GPU_LAYERS or not on_device(replace(hybrid, gpu_layers=LEAST_GPU_LAYERS)):
            return None
        fewer = _first(0, most - LEAST_GPU_LAYERS, lambda n: on_device(replace(hybrid, gpu_layers=most - n)))
        found = replace(hybrid, gpu_layers=most - fewer)
    return found if room.holds(scales.load(found)) else None


def _first(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The first number that fits, where all after it do and `high` does."""
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return low
