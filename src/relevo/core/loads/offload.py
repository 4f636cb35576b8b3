"""A part of the model stays in RAM: experts first, because attention and its cache gain most from the device."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from relevo.core.events import StartModel
from relevo.core.loads.room import Room, Scales
from relevo.core.loads.search import largest_that_fits
from relevo.core.loads.wish import LoadWish

LEAST_GPU_LAYERS: Final = 2
"""The output head and one layer. With less on the device the CPU route is as good, and simpler."""


def least_offload(wish: LoadWish, start: StartModel, room: Room, scales: Scales) -> StartModel | None:
    """The start with the fewest layers (of a mixture of experts, first the fewest experts) in RAM that fits.

    Both halves of the search are monotone: what leaves the device goes to the host. So the first placement that fits
    the device leaves the host the least, and where the host has no room for it, no other placement helps.
    """

    def excess(candidate: StartModel) -> int | None:
        return room.device_excess_bytes(scales.load(candidate))

    hybrid = replace(start, route="hybrid", gpu_layers=min(start.gpu_layers, wish.layers + 1))
    found = None
    if wish.expert_layers > hybrid.host_expert_layers:
        # As a number that grows with what it takes: how many layers keep their experts on the device.
        most = wish.expert_layers - hybrid.host_expert_layers - 1
        kept = largest_that_fits(0, most, lambda n: excess(_without_experts(hybrid, wish.expert_layers - n)))
        hybrid = _without_experts(hybrid, wish.expert_layers - (kept or 0))
        found = None if kept is None else hybrid
    if found is None:
        most = hybrid.gpu_layers - 1
        if most < LEAST_GPU_LAYERS:
            return None
        layers = largest_that_fits(LEAST_GPU_LAYERS, most, lambda n: excess(replace(hybrid, gpu_layers=n)))
        if layers is None:
            return None
        found = replace(hybrid, gpu_layers=layers)
    return found if room.holds(scales.load(found)) else None


def _without_experts(start: StartModel, layers: int) -> StartModel:
    return replace(start, host_expert_layers=layers)
