"""What a model file will take on this machine, before anything is written or started."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relevo.cli.output import bytes_text
from relevo.config import Config, ModelConfig
from relevo.core.demand import Demand
from relevo.core.errors import ConfigError, ModelFileError
from relevo.models.gguf import GgufHeader, read_header
from relevo.models.shape import shape_of
from relevo.service.plans import cpu_plan, demand_on_card, demand_on_host, gpu_plan

if TYPE_CHECKING:
    from relevo.cli.place import Place

_CONTEXT_TOKENS = 8192
_MOST_SLOTS = 255


@dataclass(frozen=True, slots=True)
class Sizing:
    """A model as it would be configured, and its demand on both routes."""

    name: str
    config: Config
    header: GgufHeader
    model: ModelConfig
    cpu: Demand
    """On the host, of the CPU route."""
    ram_available_bytes: int
    device: Demand | None = None
    """On the device, of the GPU route; None where it will be served on the CPU only."""
    device_host: Demand | None = None
    """On the host, of the GPU route's worker."""
    new_devices: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def has_template(self) -> bool:
        """Whether it can chat."""
        return self.header.chat_template is not None or self.model.chat_template is not None

    def lines(self) -> list[str]:
        """The plan for people."""
        lines = [f"on the CPU: {_demand_text(self.cpu)}; {bytes_text(self.ram_available_bytes)} of RAM are available"]
        if self.device is not None:
            lines.insert(0, f"on {self.model.device}: {_demand_text(self.device)}")
        else:
            lines.append("no GPU is described or found: it will be served on the CPU only")
        return lines

    def view(self) -> dict[str, Any]:
        """The plan for programs; a part that is not known is null, with its reason."""
        return {
            "file": self.model.path,
            "architecture": self.header.architecture,
            "device": self.model.device,
            "context_tokens": self.model.context_tokens,
            "slots": self.model.slots,
            "parts": None if self.device is None else self.device.parts(),
            "host_parts": None if self.device_host is None else self.device_host.parts(),
            "cpu_parts": self.cpu.parts(),
            "reasons": {**self.cpu.reasons, **(self.device.reasons if self.device is not None else {})},
            "ram_available_bytes": self.ram_available_bytes,
        }

    def check_fits(self) -> None:
        """Raises ModelFileError where the CPU route cannot fit into the RAM that is available."""
        needed = self.cpu.known_bytes
        if needed > self.ram_available_bytes:
            weights = self.cpu.weights_bytes or 0
            change = (
                "Choose a smaller context with --context."
                if weights < self.ram_available_bytes
                else "Choose a smaller model, or one with fewer bits a weight."
            )
            raise ModelFileError(
                f"It does not fit: it takes at least {bytes_text(needed)} of RAM on the CPU, and "
                f"{bytes_text(self.ram_available_bytes)} are available. {change}"
            )


def size_up(place: Place, path: Path, *, name: str | None, context_tokens: int | None, slots: int) -> Sizing:
    """Read the header and plan both routes. Raises ModelFileError for the file, ConfigError for the wishes."""
    import psutil  # type: ignore[import-untyped]

    from relevo.cli.models import name_from

    header = read_header(path)
    config = place.load(may_be_missing=True)
    chosen = name or name_from(path.stem)
    _check_name(config, chosen, given=name is not None)
    if not 1 <= slots <= _MOST_SLOTS:
        raise ConfigError(f"--slots {slots} is not possible: 1 to {_MOST_SLOTS}.")
    device, new_devices = _choose_device(config)
    model = ModelConfig(
        path=str(path.expanduser().absolute()),
        device=device,
        context_tokens=_context(header, context_tokens),
        slots=slots,
    )
    shape = shape_of(header)
    kind = config.devices[device].kind if device in config.devices else "auto"
    plan = cpu_plan(
        chosen, model, Path(model.path), Path(), on_card=device is not None and kind != "emulated", threads=1
    )
    cpu = demand_on_host(shape, plan)
    on_device: Demand | None = None
    device_host: Demand | None = None
    if device is not None:
        kind = "nvidia" if kind == "auto" else kind
        on_device, device_host = demand_on_card(shape, gpu_plan(plan, model, shape, kind), kind)
    return Sizing(
        name=chosen,
        config=config,
        header=header,
        model=model,
        cpu=cpu,
        ram_available_bytes=psutil.virtual_memory().available,
        device=on_device,
        device_host=device_host,
        new_devices=new_devices,
    )


def _context(header: GgufHeader, wanted: int | None) -> int:
    trained = header.context_trained_tokens
    if wanted is None:
        return min(_CONTEXT_TOKENS, trained or _CONTEXT_TOKENS)
    if wanted < 1:
        raise ConfigError(f"--context {wanted} is not possible: at least 1 token.")
    if trained is not None and wanted > trained:
        raise ConfigError(f"--context {wanted} is more than the model was trained for: {trained} tokens at most.")
    return wanted


def _check_name(config: Config, name: str, *, given: bool) -> None:
    for other, model in config.models.items():
        if name in (other, *model.aliases):
            how = "Choose another with --name" if given else "Give it one with --name"
            raise ConfigError(f"There is a model named {name!r} already ({model.path}). {how}.")


def _choose_device(config: Config) -> tuple[str | None, dict[str, dict[str, Any]]]:
    """A described device, else the graphics card of this machine, else none. Nothing is emulated here unasked."""
    from relevo.setup.machine import look_at_machine

    if config.devices:
        return ("gpu0" if "gpu0" in config.devices else next(iter(config.devices))), {}
    machine = look_at_machine()
    if machine.cards or machine.nvidia_driver is not None:
        return "gpu0", {"gpu0": {"kind": "auto"}}
    return None, {}


def _demand_text(demand: Demand) -> str:
    total = demand.total_bytes
    parts = ", ".join(
        f"{name.removesuffix('_bytes')} {bytes_text(value)}" for name, value in demand.parts().items() if value
    )
    if total is not None:
        return f"{bytes_text(total)} ({parts})"
    why = next(iter(demand.reasons.values()), "a part is not known")
    return f"at least {bytes_text(demand.known_bytes)} ({parts}; {why.rstrip('.')})"
