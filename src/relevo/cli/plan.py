"""`relevo plan`: what a model file would take, where it fits now, and how it would have to be loaded to fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from relevo.cli.place import NO_SERVICE_PLACE, Json, ServicePlace

if TYPE_CHECKING:
    from relevo.cli.planning.planner import Plan, Planner


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWishes:
    """How the model is to be loaded; what is not named is as configured, or the default."""

    context: Annotated[int | None, Parameter(help="Tokens of context. Else 8192, or what it was trained for.")] = None
    slots: Annotated[int | None, Parameter(help="Requests computed together, 1 to 255. Else 8.")] = None
    kv_type: Annotated[Literal["f16", "q8_0"] | None, Parameter(help="How keys and values are kept. Else f16.")] = None
    batch: Annotated[int | None, Parameter(help="Rows of one step, 32 to 8192. Else 512.")] = None
    ubatch: Annotated[int | None, Parameter(help="Rows of one micro-batch, 32 to 4096. Else 128.")] = None
    flash_attention: Annotated[
        bool | None, Parameter(help="Else on where a card computes, off where only CPUs do.")
    ] = None
    gpu_layers: Annotated[int | None, Parameter(help="Layers on the device, the output head being one. Else all.")] = (
        None
    )
    profile: Annotated[Literal["fast", "strict"] | None, Parameter(help="Numeric profile. Else fast.")] = None
    cpu_context: Annotated[int | None, Parameter(help="Tokens of context of the CPU twin. Else the same.")] = None
    cpu_slots: Annotated[int | None, Parameter(help="Slots of the CPU twin. Else the same.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Where:
    device: str | None
    memory_bytes: int | None
    dry_run: bool


NO_WISHES = LoadWishes()
Device = Annotated[
    str | None,
    Parameter(help="A described device, or a kind: nvidia, amd, vulkan, emulated, cpu. Else the model's, or any."),
]
Memory = Annotated[str | None, Parameter(help="Plan for a device of this size that isn't here, like 8GiB.")]
DryRun = Annotated[
    bool, Parameter(help="Ask the engine where the formulas do not know a part. It reads the header and loads nothing.")
]
Check = Annotated[
    bool,
    Parameter(negative=(), show_default=False, help="Really load it, use it, and compare. Takes up to some minutes."),
]


def plan(
    model: Annotated[
        str, Parameter(name="MODEL", help="A model file in GGUF form, or the name of a configured model.")
    ],
    /,
    *,
    wishes: LoadWishes = NO_WISHES,
    device: Device = None,
    device_memory: Memory = None,
    dry_run: DryRun = True,
    check: Check = False,
    place: ServicePlace = NO_SERVICE_PLACE,
    json: Json = False,
) -> int:
    """Will it fit? Memory by part on the device, on the host and for the CPU twin, before anything is loaded.

    Reads the file's header only. Says what fits on each device now, the largest context that fits, and where it
    does not fit as asked, what would have to change. Of a split model any part may be named.
    Exits 0 when the plan is made, whatever it says, and 1 when it cannot be, or a check fails.
    """
    from relevo.cli.output import print_json
    from relevo.cli.planning.planner import Planner
    from relevo.cli.planning.sizing import parse_size
    from relevo.cli.planning.view import plan_view, print_check, print_plan

    memory = None if device_memory is None else parse_size(device_memory, "--device-memory")
    planner = Planner(place)
    made = _plan(planner, model, wishes, _Where(device=device, memory_bytes=memory, dry_run=dry_run))
    if not json:
        print_plan(made)
    if not check:
        if json:
            print_json(plan_view(made))
        return 0
    from relevo.cli.planning.check import check_plan

    checked = check_plan(planner, made)
    if json:
        print_json({**plan_view(made), "check": [one.view() for one in checked]})
    else:
        print_check(checked)
    return 0 if all(one.failed is None for one in checked) else 1


def _plan(planner: Planner, model: str, wishes: LoadWishes, where: _Where) -> Plan:
    fields = {
        "context_tokens": wishes.context,
        "slots": wishes.slots,
        "kv_type": wishes.kv_type,
        "batch_tokens": wishes.batch,
        "ubatch_tokens": wishes.ubatch,
        "flash_attention": wishes.flash_attention,
        "gpu_layers": wishes.gpu_layers,
        "profile": wishes.profile,
        "cpu_context_tokens": wishes.cpu_context,
        "cpu_slots": wishes.cpu_slots,
    }
    return planner.plan(model, fields, device=where.device, memory_bytes=where.memory_bytes, dry_run=where.dry_run)
