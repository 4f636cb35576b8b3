"""What `relevo serve --demo` adds to the configuration: a small model, and a device to run it on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from relevo.config import Config, DeviceConfig, ModelConfig

if TYPE_CHECKING:
    from relevo.setup.machine import Machine

DEMO_MODEL = "smollm2-135m"
DEMO_DEVICE = "gpu0"
EMULATED_BYTES = 3 * 2**29
"""1.5 GiB: the model's 98 MB of weights, 180 MiB of KV and its buffers fit several times over."""


def demo_config(base: Config, machine: Machine | None = None) -> Config:
    """The configuration with the demo model, on a GPU route and its CPU twin. `machine` None: this one.

    A device described in the file is used as it is. Else a graphics card, where there is one, and no other stands in
    for it: if it cannot be used, the start fails with the reason. Only without any card is the device emulated.
    Raises ModelFileError where the demo model was not fetched.
    """
    from relevo.setup.demo import find

    model = ModelConfig(path=str(find()), device=DEMO_DEVICE, aliases=_free(base, "demo"), context_tokens=8192, slots=8)
    devices = dict(base.devices)
    devices.setdefault(DEMO_DEVICE, _demo_device(machine))
    return msgspec.structs.replace(base, devices=devices, models={**base.models, DEMO_MODEL: model})


def _demo_device(machine: Machine | None) -> DeviceConfig:
    from relevo.setup.machine import look_at_machine

    seen = machine or look_at_machine()
    if seen.cards or seen.nvidia_driver is not None:
        return DeviceConfig(kind="auto")
    return DeviceConfig(kind="emulated", total_bytes=EMULATED_BYTES)


def _free(base: Config, alias: str) -> list[str]:
    """The alias, unless a model of the file has it."""
    taken = {name for key, model in base.models.items() for name in (key, *model.aliases)}
    return [] if alias in taken else [alias]
