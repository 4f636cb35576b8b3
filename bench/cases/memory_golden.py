"""Predicted totals against the engine's own dry run, over header-only files of real models' dimensions."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
from tests.golden import families_attention, families_state
from tests.golden.comparison import setting_of
from tests.golden.oracle import Placement, Weighed, weigh_all

from bench.cases import memory_models
from bench.cases.memory_estimators import ESTIMATORS, estimates
from bench.figures import Report, number, quantile
from relevo.core.events import StartModel
from relevo.core.memory.demand import Demand, model_demand
from relevo.core.memory.dry_run import DryRunFigures, wants_dry_run, with_dry_run
from relevo.core.memory.load import DeviceStart, LoadOptions, load_options
from relevo.core.memory.shape import ModelShape
from relevo.models.gguf import read_header
from relevo.models.shape import shape_of
from relevo.replicas.dry_run import dry_run_now
from relevo.setup.libraries import find

MIB = 2**20
WRONG = 0.05
"""Beyond this share of the truth a figure is counted as wrong."""
LARGE_STATE_BYTES = 120 * MIB
"""The dry run allocates states really: models with more of it a sequence are asked for one slot only."""
DRY_RUN_S = 60.0
GROUPS = ("dense", "sliding window", "MLA", "hybrid, recurrent", "mixture of experts", "embedding")
OTHERS = "not in the tests"
QUICK = (
    "Llama-3.1-8B",
    "Gemma-3-12B",
    "DeepSeek-V2-Lite",
    "Granite-4.0-H-Tiny",
    "Qwen3-30B-A3B",
    "bge-base-en",
    "Qwen3-8B",
)
PLACES = ("device", "CPU")
OURS = "**Relevo**, closed form"
PLANNED = "**Relevo**, as planned"
Family = families_attention.Family | families_state.Family


@dataclass(slots=True)
class Case:
    """One load in one place: the truth, and what everybody said of it (a text: why nothing)."""

    family: str
    group: str
    place: str
    start: StartModel
    truth: dict[str, int]
    """By part: weights, kept (KV and state), compute."""
    said: dict[str, float | str] = field(default_factory=dict)
    parts: dict[str, int | None] = field(default_factory=dict)
    """Ours."""
    formula_ms: float = 0.0
    dry_run_ms: float | None = None
    """What the engine took for it; None: it was not asked."""

    @property
    def total(self) -> int:
        """What the engine would allocate."""
        return sum(self.truth.values())

    @property
    def named(self) -> str:
        """For people."""
        s = self.start
        flash = "flash attention" if s.flash_attention else "no flash attention"
        where = "on a device" if self.place == "device" else "on the CPU"
        load = f"{s.context_tokens:,} tokens, micro-batch {s.ubatch_tokens}, {s.slots} slots, {s.kv_type}, {flash}"
        return f"{self.family} {where} ({load})"

    def error(self, who: str) -> float | None:
        """As a share of the truth; None: nothing was said."""
        said = self.said.get(who)
        return (said - self.total) / self.total if isinstance(said, int | float) else None


def families(quick: bool) -> list[Family]:
    """All golden families and those beside them, each name once."""
    every: tuple[Family, ...] = (
        *families_attention.FAMILIES,
        *families_attention.MORE_FAMILIES,
        *families_state.FAMILIES,
        *memory_models.FAMILIES,
    )
    named: dict[str, Family] = {}
    for one in every:
        named.setdefault(one.name, one)
    return [one for one in named.values() if not quick or one.name in QUICK]


def group_of(model: Family) -> str:
    """By what the file holds, the first that fits; those that the tests do not hold stand apart."""
    if any(model.name == one.name for one in memory_models.FAMILIES):
        return OTHERS
    names = " ".join(name for name, _, _ in model.tensors)
    keys = {name.split(".", 1)[1]: value for name, value in model.keys.items()}
    if keys.get("attention.causal") is False:
        return "embedding"
    if any(word in names for word in ("ssm_", "time_mix", "shortconv")) or "minimax" in str(keys["architecture"]):
        return "hybrid, recurrent"
    if "attn_kv_a_mqa" in names:
        return "MLA"
    if keys.get("attention.sliding_window"):
        return "sliding window"
    return "mixture of experts" if "exps." in names else "dense"


def starts(libraries: Path, file: Path, *, quick: bool, large_state: bool) -> list[StartModel]:
    """Every combination; each with one sequence more, for probes, as Relevo loads."""
    grid = product((8192,) if quick else (4096, 32768), (128, 512), (1,) if large_state else (1, 8))
    kinds = (("f16", True), ("f16", False), ("q8_0", True))
    return [
        StartModel(
            model=file.stem, route="cpu", path=str(file), libraries=str(libraries), context_tokens=context,
            slots=slots, ubatch_tokens=ubatch, kv_type=kv_type, flash_attention=flash, use_mmap=False, repack=False,
        )
        for (context, ubatch, slots), (kv_type, flash) in product(list(grid), kinds)
    ]  # fmt: skip


def options_of(start: StartModel, place: str) -> LoadOptions:
    """The load, without what no dry run has: driver, pool, margins."""
    start = msgspec.structs.replace(start, gpu_layers=999 if place == "device" else 0)
    return load_options(start, on_device=place == "device", learned=DeviceStart(0, 0, 0))


def cases_of(libraries: Path, model: Family, file: Path, *, quick: bool) -> list[Case]:
    """What the engine itself plans for this file, in both places."""
    shape = shape_of(read_header(file))
    state = 4 * sum(layer.conv_state + layer.mixer_state for layer in shape.layers)
    wanted = starts(libraries, file, quick=quick, large_state=state > LARGE_STATE_BYTES)
    embeds = group_of(model) == "embedding"
    placements = {"device": Placement(), "CPU": Placement(accelerator="")}
    settings = [
        [msgspec.structs.replace(setting_of(options_of(one, place)), embeddings=embeds) for one in wanted]
        for place in PLACES
    ]
    loads = [(placements[place], asked) for place, asked in zip(PLACES, settings, strict=True)]
    found = weigh_all(libraries, file, loads)
    cases = []
    for place, answers in zip(PLACES, found, strict=True):
        for start, planned in zip(wanted, answers, strict=True):
            if planned.error:
                continue  # the engine refuses it: a cache type that its head width forbids
            case = Case(model.name, group_of(model), place, start, _truth(planned, place))
            _ours(case, shape)
            cases.append(case)
    _as_planned([case for case in cases if case.place == "CPU"], shape)
    return cases


def _truth(planned: Weighed, place: str) -> dict[str, int]:
    side = planned.device if place == "device" else planned.host
    return {"weights": side("model"), "kept": side("context"), "compute": side("compute")}


def _ours(case: Case, shape: ModelShape) -> None:
    options = options_of(case.start, case.place)
    began = time.perf_counter()
    device, host = model_demand(shape, options)
    case.formula_ms = 1e3 * (time.perf_counter() - began)
    case.parts = _parts(device if case.place == "device" else host)
    case.said[OURS] = _total(case.parts)


def _as_planned(cases: Sequence[Case], shape: ModelShape) -> None:
    """As a plan has it: where the closed form does not know a part, Relevo's own dry run says."""
    demands = [model_demand(shape, options_of(case.start, case.place)) for case in cases]
    asked = [case.start for case, demand in zip(cases, demands, strict=True) if wants_dry_run(*demand)]
    answers = iter(dry_run_now(asked, timeout_s=DRY_RUN_S) if asked else [])
    for case, demand in zip(cases, demands, strict=True):
        if not wants_dry_run(*demand):
            case.said[PLANNED] = case.said[OURS]
            continue
        answer = next(answers)
        if isinstance(answer, DryRunFigures):
            case.said[PLANNED] = _total(_parts(with_dry_run(*demand, answer).host))
            case.dry_run_ms = answer.took_ms
        else:
            case.said[PLANNED] = answer.message


def _parts(demand: Demand) -> dict[str, int | None]:
    kept = None if demand.kv_bytes is None or demand.state_bytes is None else demand.kv_bytes + demand.state_bytes
    return {"weights": demand.weights_bytes, "kept": kept, "compute": demand.compute_bytes}


def _total(parts: dict[str, int | None]) -> float | str:
    known = [value for value in parts.values() if value is not None]
    return float(sum(known)) if len(known) == len(parts) else "a part is not known"


def run(report: Report, *, quick: bool) -> None:
    """Everybody over everything."""
    libraries, missing = find(), set()
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(prefix="bench_golden_") as folder:
        for model in families(quick):
            file = model.write(Path(folder))
            own = cases_of(libraries, model, file, quick=quick)
            for name in ESTIMATORS:
                try:
                    answers = estimates(name, file, model.keys, [options_of(c.start, c.place) for c in own])
                except ImportError:
                    missing.add(name)
                    continue
                for case, answer in zip(own, answers, strict=True):
                    case.said[name] = answer
            cases += own
    _show(report, cases, [name for name in ESTIMATORS if name not in missing])
    for name in sorted(missing):
        report.say(f"\n- {name}: not installed")


def _show(report: Report, cases: list[Case], peers: list[str]) -> None:
    count = len({case.family for case in cases})
    report.say(
        f"\n### Predicted totals against the engine's own dry run: {count} models, {len(cases)} loads\n\n"
        "Total: weights, KV, state and compute, on a device that takes all layers (a stand-in: the dry run allocates "
        "nothing; its figures are the device's alone), and of a load on the CPU alone, where all is in one place. "
        f"Contexts of {_values(cases, 'context_tokens')} tokens, micro-batches of {_values(cases, 'ubatch_tokens')}, "
        f"{_values(cases, 'slots')} slots, KV f16 with and without flash attention and q8_0 with it, all combined, "
        "less what the engine refuses. Cells: median of the error's size; the worst error; how many loads are off by "
        f"more than {WRONG:.0%}; *no answer*: said to be unknown, or failed. What estimators add for the driver is "
        "left out. Groups: by what the file holds, the first that fits of embedding, hybrid, MLA, sliding window, "
        "mixture of experts, dense. Relevo's tests hold its closed form to these very models; so others that they do "
        "not hold (dense, sliding window, mixture of experts) stand apart.\n"
    )
    report.say("On a device:\n")
    on_device = [case for case in cases if case.place == "device"]
    who = [OURS, *peers]
    report.table(["models", "loads", *who], _rows(on_device, who))
    on_cpu = [case for case in cases if case.place == "CPU"]
    who = [OURS, PLANNED, *peers]
    report.say("\nOn the CPU (*as planned*: Relevo asks the engine about what the closed form does not know):\n")
    report.table(["models", "loads", *who], _rows(on_cpu, who))
    report.say("")
    for name in peers:
        worst = max((case for case in cases if case.error(name) is not None), key=lambda c: abs(c.error(name) or 0))
        report.say(f"- {name} is furthest off with {worst.named}: {percent(worst.error(name) or 0, signed=True)}")
    for part, words in (("weights", "weights"), ("kept", "KV and state"), ("compute", "compute buffers")):
        report.say(f"- Relevo's closed form, {words}: {_by_part(cases, part)}")
    report.say(f"- Relevo's closed form takes {_times(case.formula_ms for case in cases)} ms a load")
    report.say(
        f"- Relevo's dry run, asked about {sum(case.dry_run_ms is not None for case in cases)} loads on the CPU, takes "
        f"{_times(case.dry_run_ms for case in cases)} ms a load, its process' start not counted"
    )
    for case in cases:
        report.keep("memory golden", family=case.family, group=case.group, place=case.place, truth=case.truth,
                    said=case.said, parts=case.parts, start=_settings(case.start))  # fmt: skip


def _times(all_ms: Iterable[float | None]) -> str:
    known = [one for one in all_ms if one is not None]
    if not known:
        return "-"
    return f"{number(quantile(known, 0.5))} (99 % of them at most {number(quantile(known, 0.99))})"


def _values(cases: list[Case], name: str) -> str:
    return " and ".join(f"{value:,}" for value in sorted({getattr(case.start, name) for case in cases}))


def _rows(cases: list[Case], who: Sequence[str]) -> list[list[Any]]:
    rows = []
    for group in (*GROUPS, OTHERS, "all"):
        own = [case for case in cases if group in (case.group, "all")]
        if own:
            rows.append(
                [f"{group} ({len({case.family for case in own})})", len(own), *(_cell(own, one) for one in who)]
            )
    return rows


def _cell(cases: Sequence[Case], who: str) -> str:
    known = [error for error in (case.error(who) for case in cases) if error is not None]
    silent = len(cases) - len(known)
    if not known:
        return "no answer"
    worst = max(known, key=abs)
    wrong = sum(abs(error) > WRONG for error in known)
    words = f"{percent(statistics.median(map(abs, known)))}; {percent(worst, signed=True)}; {wrong} wrong"
    return words + (f", {silent} no answer" if silent else "")


def percent(share: float, *, signed: bool = False) -> str:
    """Two figures that mean something."""
    value = 100 * share
    if abs(value) < 0.005:
        return "0 %"
    text = f"{value:+.0f}" if abs(value) >= 10 else f"{value:+.1f}" if abs(value) >= 1 else f"{value:+.2f}"
    return f"{text if signed else text.lstrip('+')} %"


def _by_part(cases: Iterable[Case], part: str) -> str:
    pairs = [(case.truth[part], case.parts[part]) for case in cases]
    known = [(truth, ours) for truth, ours in pairs if ours is not None]
    exact = sum(truth == ours for truth, ours in known)
    off = max((abs(ours - truth) for truth, ours in known), default=0)
    return (
        f"{exact} of {len(pairs)} figures exact to the byte, {len(pairs) - len(known)} said to be unknown, "
        f"the largest error {off / MIB:.3f} MiB"
    )


def _settings(start: StartModel) -> dict[str, Any]:
    names = ("context_tokens", "slots", "ubatch_tokens", "kv_type", "flash_attention")
    return {name: getattr(start, name) for name in names}
