"""How a plan is shown: for programs, every figure in bytes with its reasons; for people, a page to quote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relevo.cli.output import bytes_text, console, duration_text, plain, say, table
from relevo.core.memory.tier import Tier

if TYPE_CHECKING:
    from relevo.cli.planning.check import Checked
    from relevo.cli.planning.places import StoragePlace
    from relevo.cli.planning.planner import Fits, Plan
    from relevo.core.events import StartModel
    from relevo.core.loads.verdict import Change, LoadVerdict
    from relevo.core.memory.demand import Demand

MIB = 2**20
WORDS = {
    "weights_bytes": "weights",
    "kv_bytes": "KV cache",
    "state_bytes": "state",
    "compute_bytes": "compute buffer",
    "output_bytes": "output",
    "projector_bytes": "projector",
    "context_bytes": "driver and process",
    "pool_bytes": "pool",
    "fragmentation_bytes": "fragmentation",
    "margin_bytes": "margin",
}
_TIERS = {
    Tier.CLOSED_FORM: "formulas on the file's header; nothing was loaded",
    Tier.DRY_RUN: "the engine's own dry run, where formulas do not know a part; nothing was loaded",
    Tier.LEARNED: "what an earlier load with these options took on this machine",
}


# ------------------------------------------------------------------- for programs


def plan_view(plan: Plan) -> dict[str, Any]:
    """The plan in the shape of the outer contract, and more."""
    from relevo.core.memory.demand import Demand

    sizing, header = plan.sizing, plan.sizing.header
    # What is planned for the CPU alone takes nothing of any device.
    device, host = (plan.device, plan.host) if sizing.gpu is not None else (Demand(), plan.device)
    whole = device if sizing.gpu is not None else host
    return {
        "file": header.path,
        "files": [part.path for part in header.parts],
        "name": sizing.name,
        "architecture": header.architecture,
        "quantization": header.quantization,
        "file_bytes": header.file_bytes,
        "layers": sizing.shape.layer_count,
        "context_trained_tokens": header.context_trained_tokens,
        "tier": str(plan.tier),
        "tier_reason": plan.engine_reason,
        "learned": {
            "basis": str(plan.learned.basis),
            "observations": plan.learned.observations,
            "failed_allocations": plan.learned.failures,
            "reason": plan.lessons_reason,
        },
        "device": sizing.target.name,
        "options": options_view(sizing.start),
        "parts": device.parts(),
        "host_parts": host.parts(),
        "reasons": {"parts": device.reasons, "host_parts": host.reasons},
        "total_bytes": whole.total_bytes,
        "at_least_bytes": whole.known_bytes,
        "host_total_bytes": host.total_bytes,
        "standby": _standby_view(plan),
        "fits": [_fits_view(row) for row in plan.fits],
        "choice": _choice_view(plan.asked.verdict),
        "places": [_place_view(place) for place in plan.places],
    }


def options_view(start: StartModel) -> dict[str, Any]:
    """How it is loaded."""
    names = (
        "route", "device", "context_tokens", "slots", "batch_tokens", "ubatch_tokens", "kv_type", "flash_attention",
        "gpu_layers", "host_expert_layers", "profile", "use_mmap", "repack",
    )  # fmt: skip
    return {name: getattr(start, name) for name in names}


def _standby_view(plan: Plan) -> dict[str, Any] | None:
    if plan.sizing.gpu is None:
        return None
    kept = plan.asked.verdict.standby
    return {
        "route": "cpu",
        "options": options_view(plan.sizing.cpu),
        "parts": plan.cpu.parts(),
        "reasons": plan.cpu.reasons,
        "total_bytes": plan.cpu.total_bytes,
        "mapped_bytes": plan.cpu.mapped_bytes,
        "spent_bytes": plan.cpu.spent_bytes,
        "private_bytes": plan.cpu.private_bytes,
        "readiness": None if kept is None else str(kept.readiness),
        "lease_bytes": None if kept is None else kept.lease_bytes,
        "reason": None if kept is None else kept.reason,
    }


def _fits_view(row: Fits) -> dict[str, Any]:
    target = row.target
    return {
        "device": target.name,
        "kind": target.kind,
        "emulated": target.emulated,
        "here": target.here,
        "verdict": str(row.verdict.step),
        "reason": row.verdict.reason,
        "need_bytes": row.need_bytes,
        "available_bytes": target.available_bytes,
        "available_reason": target.reason,
        "total_bytes": target.total_bytes,
        "headroom_bytes": target.headroom_bytes,
        "largest_block_bytes": target.largest_block_bytes,
        "pressure": target.pressure,
        "read_from": target.source,
        "holders": [{"holder": held.holder, "bytes": held.bytes_} for held in target.holders],
        "max_context_tokens": row.max_context_tokens,
        "max_context_reason": row.max_context_reason,
        "max_context_q8_tokens": row.max_context_q8_tokens,
    }


def _choice_view(verdict: LoadVerdict) -> dict[str, Any]:
    return {
        "verdict": str(verdict.step),
        "reason": verdict.reason,
        "options": options_view(verdict.start),
        "changes": [_change_view(change) for change in verdict.changes],
        "parts": verdict.device_demand.parts(),
        "host_parts": verdict.host_demand.parts(),
        "total_bytes": verdict.device_demand.total_bytes,
        "host_total_bytes": verdict.host_demand.total_bytes,
        "storage_bytes": verdict.storage_bytes,
        "missing_bytes": verdict.missing_bytes,
        "would_fit": [_change_view(change) for change in verdict.would_fit],
    }


def _change_view(change: Change) -> dict[str, Any]:
    return {
        "what": change.what,
        "from": change.from_,
        "to": change.to,
        "frees_bytes": change.frees_bytes,
        "sentence": change.sentence,
    }


def _place_view(place: StoragePlace) -> dict[str, Any]:
    return {
        "place": place.place,
        "weights_bytes": place.weights_bytes,
        "read_bytes_a_token": place.read_bytes,
        "bytes_a_s": None if place.bytes_a_s is None else round(place.bytes_a_s),
        "token_s": place.token_s,
        "how": place.how,
    }


# --------------------------------------------------------------------- for people


def print_plan(plan: Plan) -> None:
    """The page."""
    for line in head_lines(plan):
        say(line)
    say()
    console().print(parts_table(plan))
    for line in unknown_lines(plan):
        say(line)
    say()
    console().print(fits_table(plan))
    if sources := list(dict.fromkeys(row.target.source for row in plan.fits)):
        say(f"({'; '.join(sources)}. What is kept free for others is taken off.)")
    for line in choice_lines(plan):
        say(line)
    if plan.places:
        say()
        for line in place_lines(plan.places):
            say(line)


def head_lines(plan: Plan) -> list[str]:
    """What the model is, how it would be loaded, and how far the figures can be trusted."""
    sizing, header, start = plan.sizing, plan.sizing.header, plan.sizing.start
    files = "" if len(header.parts) == 1 else f" in {len(header.parts)} files"
    trained = header.context_trained_tokens
    context = "" if trained is None else f", trained for {trained} tokens"
    lines = [
        f"{plain(header.name or sizing.name)}: {plain(header.architecture)}, mostly {header.quantization}, "
        f"{bytes_text(header.file_bytes)}{files}{context}",
        f"To load: {load_text(start, sizing.shape.layer_count + 1)}",
    ]
    target = sizing.target
    if not target.here and target.total_bytes is None:
        lines.append(f"No device of kind {target.kind} is here: the figures are what one would be charged.")
    if trained is not None and start.context_tokens > trained:
        lines.append(f"Beware: {start.context_tokens} tokens are more than the {trained} it was trained for.")
    lines.append(f"Figures: {plan.tier}: {_TIERS[plan.tier]}.")
    if plan.learned.observations:
        count = plan.learned.observations
        seen = "one load" if count == 1 else f"{count} loads"
        lines.append(
            f"What process or driver take, and the margin, follow from {seen} seen here. {plan.learned.basis.sentence}"
        )
    if plan.lessons_reason:
        lines.append(plain(plan.lessons_reason))
    return lines


def load_text(start: StartModel, layers: int) -> str:
    """The options that cost memory, in a line."""
    attention = "on" if start.flash_attention or start.profile == "strict" else "off"
    where = "" if start.device == "cpu" else f", {min(start.gpu_layers, layers)} of {layers} layers on the device"
    experts = f", experts of {start.host_expert_layers} layers in RAM" if start.host_expert_layers else ""
    slots = f"{start.slots} at once" if start.profile == "fast" else f"for each of {start.slots} at once"
    return (
        f"{start.context_tokens} tokens of context, {slots}, KV {start.kv_type}, flash attention {attention}, "
        f"micro-batch {start.ubatch_tokens} of {start.batch_tokens}, profile {start.profile}{where}{experts}"
    )


def demand_text(demand: Demand) -> str:
    """A demand in a line: the sum, and what it is made of."""
    parts = ", ".join(f"{WORDS[name]} {bytes_text(value)}" for name, value in demand.parts().items() if value)
    if demand.total_bytes is not None:
        return f"{bytes_text(demand.total_bytes)} ({parts})"
    why = next(iter(demand.reasons.values()), "a part is not known")
    return f"at least {bytes_text(demand.known_bytes)} ({parts}; {why.rstrip('.')})"


def parts_table(plan: Plan) -> Any:
    """Memory by part, in MiB as the engine prints it."""
    columns: list[tuple[str, Demand]] = []
    sizing = plan.sizing
    if sizing.gpu is not None:
        short = "the device" if not sizing.target.here else sizing.target.name
        columns.append((f"on {plain(short)}", plan.device))
        if plan.host.known_bytes:
            columns.append(("on the host beside", plan.host))
        columns.append(("CPU twin (standby)", plan.cpu))
    else:
        columns.append(("on the host", plan.device))
    made = table("", "MiB", *(name for name, _ in columns), numbers=tuple(name for name, _ in columns))
    for part, word in WORDS.items():
        figures = [demand.parts()[part] for _, demand in columns]
        if part == "weights_bytes":  # what the CPU keeps twice is shown apart, or nobody would know the file again
            copies = [_repacked(demand) for _, demand in columns]
            made.add_row(word, *(_mib(None if v is None else v - c) for v, c in zip(figures, copies, strict=True)))
            if any(copies):
                made.add_row("weights repacked", *(_mib(copy) for copy in copies))
        elif any(value != 0 for value in figures):
            made.add_row(word, *(_mib(value) for value in figures))
    if any(demand.spent_bytes for _, demand in columns):
        made.add_row(
            "  file pages read once", *(f"-{_mib(d.spent_bytes)}" if d.spent_bytes else "-" for _, d in columns)
        )
    made.add_section()
    totals = [demand.total_bytes for _, demand in columns]
    made.add_row("total", *(_total(total, demand) for total, (_, demand) in zip(totals, columns, strict=True)))
    if any(demand.cached_bytes for _, demand in columns):
        made.add_row("  of it pages of the file", *(_mib(demand.cached_bytes) for _, demand in columns))
    return made


def _repacked(demand: Demand) -> int:
    """Of the weights, the copy in an order of the CPU's own, beside the pages of the file."""
    return 0 if demand.weights_bytes is None or not demand.mapped_bytes else demand.weights_bytes - demand.mapped_bytes


def _mib(value: int | None) -> str:
    return "unknown" if value is None else "-" if value == 0 else f"{value / MIB:.2f}"


def _total(total: int | None, demand: Demand) -> str:
    return _mib(total) if total is not None else f"over {demand.known_bytes / MIB:.2f}"


def unknown_lines(plan: Plan) -> list[str]:
    """A sentence for each part that is not known, and why the engine could not help."""
    said: dict[str, None] = {}
    for demand in (plan.device, plan.host, plan.cpu):
        for part, why in demand.reasons.items():
            said[f"Unknown: {WORDS.get(part, part)}. {plain(why)}"] = None
    lines = list(said)
    if plan.engine_reason and lines:
        lines.append(f"The engine's dry run: {plain(plan.engine_reason)}")
    return lines


def fits_table(plan: Plan) -> Any:
    """Every device with what is free of it now."""
    numbers = ("free to lease", "it needs", "largest context")
    made = table("", "device", "kind", *numbers[:2], "verdict", numbers[2], numbers=numbers)
    for row in plan.fits:
        target = row.target
        name = target.name if target.here else "not here"
        context = "unknown" if row.max_context_tokens is None else f"{row.max_context_tokens} tokens"
        made.add_row(
            plain(name),
            plain(target.kind),
            bytes_text(target.available_bytes),
            bytes_text(row.need_bytes),
            str(row.verdict.step),
            "none" if row.max_context_tokens == 0 else context,
        )
    return made


def choice_lines(plan: Plan) -> list[str]:
    """What the ladder would do on the device that is asked about, step by step; and the standby."""
    verdict, target = plan.asked.verdict, plan.asked.target
    name = plain(target.name)
    lines: list[str] = []
    if target.available_bytes is None and not target.here:
        lines.append(f"Whether it fits on a device, tell with its size: {plain(target.reason or '')}")
    elif target.available_bytes is None:
        lines.append(f"Whether it fits on {name} is not known: {plain(target.reason or 'no reason was given.')}")
    elif str(verdict.step) == "admit":
        lines.append(f"It fits on {name} as asked.")
    else:
        lines.append(f"On {name}: {plain(_first(verdict))}")
        if verdict.changes:
            lines.append(f"Relevo would {verdict.step} it:")
            lines += [_step_line(number, change) for number, change in enumerate(verdict.changes, 1)]
            lines.append(_then(verdict))
        elif verdict.would_fit:
            lines.append("The smallest change that would fit:")
            lines += [_step_line(number, change) for number, change in enumerate(verdict.would_fit, 1)]
        elif verdict.missing_bytes:
            lines.append(f"{bytes_text(verdict.missing_bytes)} more would be enough for its smallest form.")
    if plan.asked.runs_from_storage:
        lines.append("With `from_storage = true` it would run, and read weights from storage for every token.")
    more, asked = plan.asked.max_context_q8_tokens, plan.sizing.start.context_tokens
    if more is not None and (plan.asked.max_context_tokens or 0) < min(more, asked):
        lines.append(f"With --kv-type q8_0 a context of {more} tokens would fit.")
    if target.holders and str(verdict.step) != "admit" and "held by" not in verdict.reason:
        held = ", ".join(f"{plain(one.holder)} {bytes_text(one.bytes_)}" for one in target.holders if one.bytes_)
        lines.append(f"Its memory is held by: {held or 'nobody of this house'}.")
    own = [held for held in target.holders if held.holder.startswith(f"{plan.sizing.name}/") and held.bytes_]
    if own:
        held = ", ".join(f"{plain(one.holder)} holds {bytes_text(one.bytes_)}" for one in own)
        lines.append(f"It is loaded there already ({held}); these figures are for one more beside it.")
    if verdict.standby is not None and plan.sizing.gpu is not None:
        lines.append(f"Standby: {verdict.standby.readiness}. {plain(verdict.standby.reason)}")
    return [line for line in lines if line]


def _then(verdict: LoadVerdict) -> str:
    """What it takes after all changes."""
    host = verdict.host_demand.total_bytes
    if not verdict.loads_on_device:
        return f"  It takes {bytes_text(host)} of RAM then."
    beside = f" and {bytes_text(host)} of RAM beside" if host else ""
    return f"  It takes {bytes_text(verdict.device_demand.total_bytes)} then{beside}."


def _first(verdict: LoadVerdict) -> str:
    """Why it does not fit as asked: the reason without the changes, which follow one by one."""
    text = verdict.reason
    for change in (*verdict.changes, *verdict.would_fit):
        text = text.replace(change.sentence, "")
    return " ".join(text.replace("It would fit like this:", "").split())


def _step_line(number: int, change: Change) -> str:
    return f"  {number}. {plain(change.sentence)}"


def place_lines(places: tuple[StoragePlace, ...]) -> list[str]:
    """What reading the weights costs a token, where they lie in more than one place."""
    lines = ["What one token reads of the weights, by where they would lie:"]
    words = {"gpu": "GPU", "ram": "RAM", "storage": "storage"}
    for place in places:
        rate = "" if place.bytes_a_s is None else f" at {bytes_text(place.bytes_a_s)}/s"
        time = "unknown" if place.token_s is None else duration_text(place.token_s)
        lines.append(f"  {words[place.place]:8} {bytes_text(place.read_bytes):>9}{rate}: {time} ({place.how})")
    return lines


# ------------------------------------------------------------------- the check


def print_check(checked: list[Checked]) -> None:
    """Predicted, reported and observed, side by side."""
    for one in checked:
        say()
        say(plain(one.headline()))
        if one.rows:
            console().print(check_table(one))


def check_table(one: Checked) -> Any:
    """One row a figure, with the difference in bytes and percent."""
    numbers = ("predicted", "engine says", "observed", "difference", "percent")
    made = table("", "MiB", *numbers, "observed by", numbers=numbers)
    for row in one.rows:
        difference = row.difference_bytes
        percent = row.difference_percent
        made.add_row(
            row.name,
            "" if row.predicted_bytes is None else _mib(row.predicted_bytes),
            "" if row.engine_bytes is None else _mib(row.engine_bytes),
            "" if row.observed_bytes is None else _mib(row.observed_bytes),
            "" if difference is None else f"{difference / MIB:+.2f}",
            "" if percent is None else f"{percent:+.1f} %",
            row.observed_by or "",
        )
    return made
