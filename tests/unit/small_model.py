"""A model small enough to reckon by head: round figures, the same shape of formula as the real one."""

from __future__ import annotations

from dataclasses import dataclass

from relevo.core.events import StartModel
from relevo.core.loads.ladder import DeviceView, Holder, LoadWish
from relevo.core.memory.demand import Demand

MIB = 2**20


@dataclass(frozen=True)
class SmallModel:
    """Ten layers of 100 MiB, 1 MiB of KV for every 256 tokens of a layer, an output head of 50 MiB."""

    layers: int = 10
    layer_bytes: int = 100 * MIB
    expert_bytes: int = 0
    head_bytes: int = 50 * MIB
    kv_bytes: int = 1 * MIB
    copies_quantized_kv: bool = False

    def weigh(self, start: StartModel) -> tuple[Demand, Demand]:
        on_device = start.route not in ("cpu", "backup")
        here = max(0, min(start.gpu_layers, self.layers + 1) - 1) if on_device else 0
        left = min(here, start.host_expert_layers) * self.expert_bytes
        head = on_device and start.gpu_layers > 0
        weights = here * self.layer_bytes - left + (self.head_bytes if head else 0)
        all_weights = self.layers * self.layer_bytes + self.head_bytes
        device = Demand(
            weights_bytes=weights,
            kv_bytes=self._kv(start, here),
            compute_bytes=self._compute(start) if on_device else 0,
            context_bytes=20 * MIB if on_device else 0,
            margin_bytes=10 * MIB if on_device else 0,
        )
        host = Demand(
            weights_bytes=all_weights - weights,
            mapped_bytes=all_weights - weights if start.use_mmap and not start.repack else 0,
            kv_bytes=self._kv(start, self.layers - here),
            compute_bytes=0 if on_device else self._compute(start),
            output_bytes=start.slots * MIB,
            context_bytes=10 * MIB,
        )
        return device, host

    def _kv(self, start: StartModel, layers: int) -> int:
        streams = start.slots if start.profile == "strict" else 1
        cells = -(-start.context_tokens // 256)
        whole = streams * cells * layers * self.kv_bytes
        if start.kv_type == "f16":
            return whole
        return whole // 2 + (streams * cells * self.kv_bytes if self.copies_quantized_kv else 0)

    def _compute(self, start: StartModel) -> int:
        scores = 0 if start.flash_attention else -(-start.context_tokens // 256) * MIB
        return start.ubatch_tokens * MIB // 4 + scores


DENSE = SmallModel()
EXPERTS = SmallModel(layer_bytes=500 * MIB, expert_bytes=400 * MIB)

# On the device: weights 1050, KV 320, compute 128, context 20, margin 10: 1528 MiB.
START = StartModel(
    model="chat",
    route="gpu",
    path="chat.gguf",
    libraries="",
    device="CUDA0",
    gpu_layers=11,
    context_tokens=8192,
    slots=8,
    batch_tokens=512,
    ubatch_tokens=512,
)
FULL = 1528 * MIB


def wish(model: SmallModel = DENSE, **more: object) -> LoadWish:
    """A wish that allows nothing but what is named."""
    fields: dict[str, object] = {
        "holder": "chat/gpu",
        "start": START,
        "layers": model.layers,
        "expert_layers": model.layers if model.expert_bytes else 0,
    }
    return LoadWish(**{**fields, **more})  # type: ignore[arg-type]


def gpu(mib: int | None, *holders: Holder, **more: object) -> DeviceView:
    """An accelerator with so many MiB available."""
    return DeviceView(name="gpu0", available_bytes=None if mib is None else mib * MIB, holders=holders, **more)  # type: ignore[arg-type]


def ram(mib: int | None = 8000, *holders: Holder, **more: object) -> DeviceView:
    """The host with so many MiB available."""
    return DeviceView(name="host", available_bytes=None if mib is None else mib * MIB, holders=holders, **more)  # type: ignore[arg-type]


def holder(name: str, mib: int, **more: object) -> Holder:
    """Somebody busy, unless said otherwise."""
    return Holder(holder=name, bytes_=mib * MIB, **more)  # type: ignore[arg-type]


def idle(name: str, mib: int, **more: object) -> Holder:
    """An idle replica that may be ended."""
    return holder(name, mib, **{"idle": True, "evictable": True, "reload_s": 5.0, **more})
