"""What a model file would take here: its header, how it would be loaded, and what that weighs. Used before anything is
written or started."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from relevo.config import Config, ModelConfig
from relevo.core.errors import ConfigError, ModelFileError
from relevo.core.events import StartModel
from relevo.core.loads.wish import LoadWish
from relevo.core.units import size_text
from relevo.models.gguf import GgufHeader, read_header
from relevo.models.shape import shape_of
from relevo.service.plans import cpu_plan, emulated_plan, gpu_plan, load_wish

if TYPE_CHECKING:
    from relevo.cli.planning.targets import Target
    from relevo.core.memory.demand import Demand
    from relevo.core.memory.shape import ModelShape

DEFAULT_CONTEXT_TOKENS = 8192
LEAST_CONTEXT_TOKENS = 64
_WITHIN = {
    "slots": ("--slots", 1, 255),
    "cpu_slots": ("--cpu-slots", 1, 255),
    "batch_tokens": ("--batch", 32, 8192),
    "ubatch_tokens": ("--ubatch", 32, 4096),
    "gpu_layers": ("--gpu-layers", 0, 1 << 20),
}
_CONTEXTS = {"context_tokens": "--context", "cpu_context_tokens": "--cpu-context"}
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")
_FORMAT = re.compile(r"(?i)[._-](i?q\d\w*|b?f16|f32|mxfp4\w*)$")
_SIZE = re.compile(r"(?i)^\s*(\d{1,20}(?:\.\d{1,6})?)\s*(?:([kmgt])(i)?b?|b)?\s*$")


@dataclass(frozen=True, slots=True)
class Sizing:
    """A model as it would be loaded on a device, and as its CPU route."""

    name: str
    header: GgufHeader
    shape: ModelShape
    model: ModelConfig
    target: Target
    """What the GPU route, or where there is none the CPU route, is to be loaded on."""
    cpu: StartModel
    gpu: StartModel | None = None
    """None where it is planned for the CPU alone."""

    @property
    def start(self) -> StartModel:
        """The load that is asked about."""
        return self.gpu if self.gpu is not None else self.cpu

    @property
    def has_template(self) -> bool:
        """Whether it can chat."""
        return self.header.chat_template is not None or self.model.chat_template is not None

    def wish(self) -> LoadWish:
        """What the ladder is asked: this load, and what its configuration lets it take less of."""
        return load_wish(f"{self.name}/{self.start.route}", self.start, self.shape, self.model, self.cpu)


def check_name(config: Config, name: str, *, given: bool) -> None:
    """Raises ConfigError where the name is taken."""
    for other, model in config.models.items():
        if name in (other, *model.aliases):
            how = "Choose another with --name" if given else "Give it one with --name"
            raise ConfigError(f"There is a model named {name!r} already ({model.path}). {how}.")


def find_model(config: Config, wanted: str, source: str) -> tuple[str, Path, ModelConfig | None]:
    """(name, file, configuration) of a model named as in the configuration, or by its file.

    Raises ModelFileError where it is neither.
    """
    for name, model in config.models.items():
        if wanted in (name, *model.aliases):
            return name, Path(model.path).expanduser(), model
    path = Path(wanted).expanduser()
    if not path.exists() and "/" not in wanted and not wanted.endswith(".gguf"):
        known = ", ".join(config.models) or "none"
        raise ModelFileError(f"There is no file {wanted}, and no model of that name in {source} (known: {known}).")
    return name_from(path.stem), path, None


def name_from(text: str) -> str:
    """A name that clients can type, from a file's: without part and number format, in small letters."""
    text = _FORMAT.sub("", _SPLIT.sub("", text))
    name = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")
    return re.sub(r"-{2,}", "-", name)[:64] or "model"


def read_model(path: Path) -> tuple[GgufHeader, ModelShape]:
    """Header and shape of a language model. Raises ModelFileError where it is something else."""
    header = read_header(path)
    if header.architecture == "clip" or header.text("general.type") in ("mmproj", "adapter"):
        what = "an adapter" if header.text("general.type") == "adapter" else "a projector for images or sound"
        raise ModelFileError(f"{path} holds {what}, not a model. Name the model's own file.")
    shape = shape_of(header)
    return header, shape


def model_config(header: GgufHeader, base: ModelConfig | None, **wishes: Any) -> ModelConfig:
    """The model as it would be configured: `base`, or defaults, with what was wished for (None: nothing).

    Raises ConfigError with the option that is not possible, and what would be.
    """
    trained = header.context_trained_tokens
    wished = {name: value for name, value in wishes.items() if value is not None}
    for name, option in _CONTEXTS.items():
        _check_context(option, wished.get(name), trained)
    for name, (option, least, most) in _WITHIN.items():
        if name in wished and not least <= wished[name] <= most:
            raise ConfigError(f"{option} {wished[name]} is not possible: {least} to {most}.")
    if base is None:
        base = ModelConfig(
            path=str(Path(header.path).expanduser().absolute()),
            device=None,
            context_tokens=min(DEFAULT_CONTEXT_TOKENS, trained or DEFAULT_CONTEXT_TOKENS),
        )
    model = _with_whole_steps(msgspec.structs.replace(base, **wished), wished)
    if model.kv_type != "f16" and model.flash_attention is False:
        raise ConfigError(f"--kv-type {model.kv_type} needs flash attention.")
    if model.batch_tokens <= model.slots:
        raise ConfigError(
            f"--batch {model.batch_tokens} is not possible: it must be more than the {model.slots} slots."
        )
    return model


def _with_whole_steps(model: ModelConfig, wished: dict[str, Any]) -> ModelConfig:
    """The engine makes a step no larger than the context, and a micro-batch no larger than a step; so say it so.

    Raises ConfigError where both sides of that were wished for.
    """
    if model.batch_tokens > model.context_tokens:
        if "batch_tokens" in wished:
            raise ConfigError(
                f"--batch {model.batch_tokens} is larger than the context of {model.context_tokens} tokens."
            )
        model = msgspec.structs.replace(model, batch_tokens=model.context_tokens)
    if model.ubatch_tokens <= model.batch_tokens:
        return model
    if "ubatch_tokens" not in wished:
        return msgspec.structs.replace(model, ubatch_tokens=model.batch_tokens)
    if "batch_tokens" in wished or model.ubatch_tokens > model.context_tokens:
        raise ConfigError(f"--ubatch {model.ubatch_tokens} is larger than --batch {model.batch_tokens}.")
    return msgspec.structs.replace(model, batch_tokens=model.ubatch_tokens)


def _check_context(option: str, wanted: int | None, trained: int | None) -> None:
    if wanted is None:
        return
    if wanted < LEAST_CONTEXT_TOKENS:
        raise ConfigError(f"{option} {wanted} is not possible: at least {LEAST_CONTEXT_TOKENS} tokens.")
    if trained is not None and wanted > trained:
        raise ConfigError(f"{option} {wanted} is more than the model was trained for: {trained} tokens at most.")
    if wanted > 1 << 24:
        raise ConfigError(f"{option} {wanted} is not possible: at most {1 << 24} tokens.")


def size_up(
    name: str,
    header: GgufHeader,
    shape: ModelShape,
    model: ModelConfig,
    target: Target,
    *,
    cpu_variant: str | None = None,
) -> Sizing:
    """How it would be loaded on this device, and as its CPU route. The worker's own parameters.

    `cpu_variant`: the CPU library that computes on an emulated device; None: the best.
    """
    on_card = not target.is_host and not target.emulated
    cpu = cpu_plan(name, model, Path(header.path).absolute(), Path(), on_card=on_card, threads=1)
    gpu: StartModel | None = None
    if on_card:
        gpu = gpu_plan(cpu, model, shape, target.engine_device)
    elif target.emulated:
        gpu = emulated_plan(cpu, model, cpu_variant)
    return Sizing(name, header, shape, model, target, cpu, gpu)


def parse_size(text: str, option: str) -> int:
    """Bytes of "8GiB", "8 GB", "512m" or a plain number; GB and G are powers of 1000 and 1024 as written.

    Raises ConfigError naming the option.
    """
    found = _SIZE.match(text)
    if found is not None:
        number, unit, binary = found.groups()
        decimal = unit is not None and binary is None and text.strip().lower().endswith("b")
        exponent = "kmgt".index(unit.lower()) + 1 if unit else 0
        size = round(float(number) * int((1000 if decimal else 1024) ** exponent))
        if 1 << 20 <= size < 1 << 60:
            return size
    raise ConfigError(f"{option} {text!r} is not a size: write it like 8GiB, 512MiB or 8589934592; at least 1 MiB.")


def check_ram(cpu: Demand, available_bytes: int | None) -> None:
    """Raises ModelFileError where the CPU route cannot fit into the RAM that is available.

    Pages of the file need not all be in RAM; what is the process's own must be.
    """
    needed = cpu.private_bytes
    if available_bytes is None or needed <= available_bytes:
        return
    raise ModelFileError(
        f"It does not fit: besides the pages of its file it takes at least {size_text(needed)} of RAM on the CPU, and "
        f"{size_text(available_bytes)} are available. Choose a smaller context with --context, or a smaller model."
    )
