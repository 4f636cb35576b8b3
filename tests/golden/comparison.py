"""Predicted against planned: every case is a family, a placement and options, with both figures for every part."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from relevo.core.memory.demand import Demand, model_demand
from relevo.core.memory.load import LoadOptions
from relevo.models.gguf import read_header
from relevo.models.shape import shape_of
from tests.golden.families_attention import FAMILIES, MORE_FAMILIES, Family, family
from tests.golden.oracle import Placement, Setting, Weighed, weigh_all

MIB = 2**20
CPU = Placement(accelerator="")
WHOLE = Placement()
PARTLY = (Placement(gpu_layers=8), Placement(gpu_layers=1), Placement(gpu_layers=0))
EXPERTS_AT_HOME = (Placement(host_experts=3), Placement(host_experts=999))
PARTS = ("weights", "kv", "compute")


@dataclass(frozen=True, slots=True)
class Case:
    """One load: what was predicted for device and host, and what the engine would allocate."""

    family: str
    placement: Placement
    options: LoadOptions
    device: Demand
    host: Demand
    planned: Weighed

    @property
    def name(self) -> str:
        """For people: what is unlike the defaults."""
        o = self.options
        place = f"{self.placement.gpu_layers} layers" if o.on_device and self.placement.gpu_layers < 999 else "whole"
        words = [
            self.family,
            f"device ({place})" if o.on_device else "CPU",
            f"C={o.context_tokens}",
            f"U={o.ubatch_tokens}",
            o.kv_type,
            "flash" if o.flash_attention else "no flash",
            f"{o.sequences} {'unified' if o.shared_cells else 'split'}",
        ]
        if self.placement.host_experts:
            words.append(f"{self.placement.host_experts} layers' experts on the host")
        return ", ".join(words)

    def errors(self, part: str) -> Iterator[tuple[str, int, int | None, int]]:
        """(place, planned, predicted or None, error in bytes) of weights, kv (with states) or compute."""
        for place, demand, planned in (
            ("device", self.device, self.planned.device),
            ("host", self.host, self.planned.host),
        ):
            if part == "kv":
                kv, state = demand.kv_bytes, demand.state_bytes
                predicted = None if kv is None or state is None else kv + state
            else:
                predicted = getattr(demand, f"{part}_bytes")
            truth = planned({"weights": "model", "kv": "context"}.get(part, part))
            yield place, truth, predicted, (predicted or 0) - truth


def setting_of(options: LoadOptions) -> Setting:
    """The engine's own options for this load, as a worker asks for them."""
    slots = 1 if options.shared_cells else options.sequences
    return Setting(
        context_tokens=options.context_tokens * slots,
        sequences=options.sequences,
        unified=options.shared_cells,
        batch_tokens=options.batch_tokens,
        ubatch_tokens=options.ubatch_tokens,
        outputs=options.outputs,
        kv_type=options.kv_type,
        flash_attention=options.flash_attention,
    )


def options_for(placement: Placement, **changes: object) -> LoadOptions:
    """Options with this placement; what is not named is a plain load of 8192 tokens."""
    usual = {"context_tokens": 8192, "batch_tokens": 2048, "ubatch_tokens": 512, "outputs": 1}
    return LoadOptions(
        on_device=bool(placement.accelerator),
        gpu_layers=placement.gpu_layers if placement.accelerator else 0,
        host_expert_layers=placement.host_experts,
        copies_cache=placement.accelerator == "cuda",
        **(usual | changes),  # type: ignore[arg-type]
    )


GRID: tuple[dict[str, object], ...] = (
    {},
    {"context_tokens": 32768},
    {"ubatch_tokens": 128},
    {"kv_type": "q8_0"},
    {"kv_type": "q4_0", "context_tokens": 32768},
    {"flash_attention": False},
    {"flash_attention": False, "ubatch_tokens": 128, "context_tokens": 32768},
    {"sequences": 4, "outputs": 4},
    {"sequences": 4, "outputs": 4, "shared_cells": False, "context_tokens": 2048},
    {"outputs": 512},
    {"sequences": 9, "outputs": 9, "ubatch_tokens": 128, "kv_type": "q8_0"},
    {
        "sequences": 3,
        "outputs": 3,
        "shared_cells": False,
        "context_tokens": 1000,
        "ubatch_tokens": 128,
        "kv_type": "q8_0",
    },
)
"""Contexts, micro-batches, cache types, flash attention, slots unified and split, one logit row and all."""


def compare(
    libraries: Path, family: Family, placements: Sequence[Placement], grid: Iterable[dict[str, object]] = GRID
) -> list[Case]:
    """All cases of one family. Cache types that its head width forbids are left out."""
    usable = [change for change in grid if change.get("kv_type", "f16") in family.value_types]
    with tempfile.TemporaryDirectory() as folder:
        file = family.write(Path(folder))
        shape = shape_of(read_header(file))
        wanted = [(placement, [options_for(placement, **change) for change in usable]) for placement in placements]
        planned = weigh_all(
            libraries, file, [(placement, [setting_of(one) for one in options]) for placement, options in wanted]
        )
    return [
        Case(family.name, placement, one, *model_demand(shape, one), found)
        for (placement, options), answers in zip(wanted, planned, strict=True)
        for one, found in zip(options, answers, strict=True)
    ]


def has_experts(model: Family) -> bool:
    """Whether its feed-forward parts are experts."""
    return any("exps." in name for name, _, _ in model.tensors)


def group_of(case: Case) -> str:
    """Where a case belongs in the table."""
    place = "on a device, whole" if case.options.on_device else "on the CPU"
    if case.placement.host_experts:
        place = "on a device, experts on the host"
    elif case.options.on_device and case.placement.gpu_layers < 999:
        place = "on a device in part"
    attention = "flash attention" if case.options.flash_attention else "no flash attention"
    kind = "mixture of experts" if has_experts(family(case.family)) else "dense"
    return f"{kind}, {attention}, {place}"


def error_table(libraries: Path) -> str:
    """Errors of all families over the whole grid and all placements, by group, as Markdown."""
    groups: dict[str, list[Case]] = {}
    for model in (*FAMILIES, *MORE_FAMILIES):
        placements = (CPU, WHOLE, *PARTLY, *(EXPERTS_AT_HOME if has_experts(model) else ()))
        for case in compare(libraries, model, placements):
            groups.setdefault(group_of(case), []).append(case)
    every = [case for cases in groups.values() for case in cases]
    rows = [summary("all", part, every) for part in ("weights", "kv")]
    rows += [summary(group, "compute", groups[group]) for group in sorted(groups)]
    return table(rows)


@dataclass(frozen=True, slots=True)
class Summary:
    """Errors of one part over many cases, in bytes and as a share of what the engine planned."""

    group: str
    part: str
    figures: int
    unknown: int
    exact: int
    median_bytes: float
    largest_bytes: int
    largest_share: float


def summary(group: str, part: str, cases: Sequence[Case]) -> Summary:
    """The errors of one part. Figures that are zero on both sides are not counted."""
    figures = [found for case in cases if not case.planned.error for found in case.errors(part) if found[1] or found[2]]
    known = [(truth, error) for _, truth, predicted, error in figures if predicted is not None]
    return Summary(
        group,
        part,
        len(figures),
        len(figures) - len(known),
        sum(not error for _, error in known),
        statistics.median(abs(error) for _, error in known) if known else 0,
        max((abs(error) for _, error in known), default=0),
        max((abs(error) / truth for truth, error in known if truth), default=0.0),
    )


def table(summaries: Sequence[Summary]) -> str:
    """As Markdown."""
    lines = [
        "| group | part | figures | unknown | exact to the byte | median error | largest error |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {s.group} | {s.part} | {s.figures} | {s.unknown} | {s.exact} | {s.median_bytes / MIB:.3f} MiB "
        f"| {s.largest_bytes / MIB:.3f} MiB ({s.largest_share:.2%}) |"
        for s in summaries
    ]
    return "\n".join(lines)
