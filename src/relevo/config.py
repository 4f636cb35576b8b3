"""The configuration: one TOML file, every field with a default, each mistake named with its path."""

from __future__ import annotations

import ipaddress
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from relevo.core.errors import ConfigError

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveSeconds = Annotated[float, Meta(gt=0, le=1e9)]  # thirty years; no timer takes infinity
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$")]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the file. Unknown keys are mistakes."""


class ServerConfig(_Section, frozen=True):
    """Where the service listens, and who may call it."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8377
    allowed_hosts: list[str] = []
    """Host names, besides loopback's, that clients may use to reach this server."""
    allowed_origins: list[str] = []
    """Web origins that may call from a browser. Empty: none."""


class LimitsConfig(_Section, frozen=True):
    """Walls around what a client may send. See docs/limits.md for the reasons."""

    body_bytes: PositiveInt = 8 * 2**20
    header_bytes: PositiveInt = 16 * 2**10
    header_fields: PositiveInt = 64
    body_timeout_s: PositiveSeconds = 30.0
    json_depth: PositiveInt = 64
    json_nodes: PositiveInt = 100_000
    messages: PositiveInt = 2048
    choices: Annotated[int, Meta(ge=1, le=8)] = 8
    stop_strings: PositiveInt = 16
    stop_bytes: PositiveInt = 256
    top_logprobs: NonNegativeInt = 20
    logit_bias_entries: NonNegativeInt = 1024
    tools: NonNegativeInt = 128
    send_timeout_s: PositiveSeconds = 30.0
    running_per_key: PositiveInt = 16
    """Requests of one key that may be accepted and not yet ended."""


class JournalConfig(_Section, frozen=True):
    """How long the record keeps results."""

    retention_s: PositiveSeconds = 24 * 3600.0
    payload_bytes: PositiveInt = 512 * 2**20
    """Above this the oldest ended requests' payloads are blanked before their time."""
    reserve_bytes: PositiveInt = 8 * 2**20
    """A file given up when the disk is full, so that accepted work can end."""


class DeviceConfig(_Section, frozen=True):
    """A device with memory to lease. `emulated` computes on the CPU and says so everywhere."""

    kind: Literal["auto", "nvidia", "vulkan", "emulated"] = "auto"
    card: str | None = None
    """Which card, where there are several: the engine's name for it ("CUDA1"), or a PCI address. None: the first."""
    total_bytes: PositiveInt | None = None
    """Declared budget. Needed where the device cannot report its memory; required when emulated."""
    headroom_bytes: NonNegativeInt | None = None
    """Kept free. None: a twentieth of the total, at most 512 MiB."""
    yield_s: PositiveSeconds = 10.0
    """How long work under way may go on when another program has taken the headroom and the memory must be given up."""
    equal_arithmetic: bool = False
    """Emulated only, for tests: use the twin's CPU library, so both routes are bit-equal."""


class HostConfig(_Section, frozen=True):
    """The host's memory, which the CPU route leases from."""

    budget_bytes: PositiveInt | None = None
    """What CPU workers may lease in all. None: half of what is available at start."""
    floor_bytes: PositiveInt | None = None
    """MemAvailable never to go below. None: the larger of a tenth of RAM and 2 GiB (at most a quarter of RAM)."""


class LaneConfig(_Section, frozen=True):
    """A bounded queue in front of a route."""

    queue: NonNegativeInt = 64
    concurrency: PositiveInt | None = None
    """Attempts at once. None: the model's slots."""
    deadline_s: PositiveSeconds = 600.0
    """Longest wait in this lane, unless the request names another."""
    max_context_tokens: PositiveInt | None = None
    max_output_tokens: PositiveInt | None = None


class SamplingConfig(_Section, frozen=True):
    """A model's sampling defaults, for what a request leaves out."""

    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.8
    top_k: NonNegativeInt = 40
    top_p: Annotated[float, Meta(gt=0, le=1)] = 0.95
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.05
    repeat_penalty: Annotated[float, Meta(gt=0, le=2)] = 1.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    penalty_last_tokens: Annotated[int, Meta(ge=0, le=65536)] = 64


class ModelConfig(_Section, frozen=True):
    """One chat model, served on a GPU route (if a device is named) and on its CPU twin."""

    path: str
    device: str | None = "gpu0"
    """Name of a `[devices.NAME]`. None, written as "" in the file: CPU only."""
    aliases: list[Name] = []
    context_tokens: PositiveInt = 8192
    """KV cells of the GPU route: one pool in the fast profile, of each slot in the strict one."""
    slots: Annotated[int, Meta(ge=1, le=255)] = 8
    max_output_tokens: PositiveInt = 1024
    """Output of a request that names no limit."""
    gpu_layers: NonNegativeInt = 999
    kv_type: Literal["f16", "q8_0"] = "f16"
    flash_attention: bool | None = None
    """None: on where a card computes, off where only CPUs do (measured there: shorter pauses beside long prompts).
    Always on in the strict profile and with a quantized KV cache."""
    profile: Literal["fast", "strict"] = "fast"
    batch_tokens: Annotated[int, Meta(ge=32, le=8192)] = 512
    ubatch_tokens: Annotated[int, Meta(ge=32, le=4096)] = 128
    prefill_chunk_tokens: Annotated[int, Meta(ge=16, le=4096)] = 64
    threads: PositiveInt | None = None
    """CPU threads of a worker. None: the free cores, at least one."""
    cpu_context_tokens: PositiveInt | None = None
    """KV cells of the CPU twin. None: the same as `context_tokens`."""
    cpu_slots: Annotated[int, Meta(ge=1, le=255)] | None = None
    chat_template: str | None = None
    """Path of a Jinja template that replaces the file's own."""
    handover: Literal["auto", "continuous", "boundary"] = "auto"
    policy: Literal["auto", "gpu-only", "cpu-only"] = "auto"
    """Of requests that name none, and whose key names none."""
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    """Among models on one device: an idle replica of lower priority gives way first."""
    reduce: tuple[Literal["ubatch", "slots", "context", "kv_type"], ...] = ("ubatch", "slots", "context")
    """What a load may take less of when memory is short. `kv_type` ends the equality with the CPU twin."""
    least_context_tokens: PositiveInt | None = None
    """A load's context is never reduced below this. None: 4096, or the configured context where that is less."""
    offload: bool = True
    """Whether fewer layers may be put on the device (a hybrid route) when not all fit."""
    from_storage: bool = False
    """Whether weights in RAM may exceed it: pages of the file that are read again for every token, very slowly."""
    standby: Literal["auto", "warm", "mapped", "on-demand"] = "auto"
    """How ready the CPU twin is kept. auto: by `recovery_budget_s` and the measured time of a load."""
    recovery_budget_s: PositiveSeconds = 0.1
    """How long a lost route may take to be replaced. A longer time lets the twin rest where a load is quick enough."""
    rest_after_s: PositiveSeconds = 30.0
    """A twin that need not be kept warm rests after so long without work."""
    sampling: SamplingConfig = SamplingConfig()
    gpu_lane: LaneConfig = LaneConfig()
    cpu_lane: LaneConfig = LaneConfig(queue=16)


def flash_attention_of(model: ModelConfig, *, on_card: bool) -> bool:
    """Whether a model's routes use flash attention; both the same, because twins must agree in it."""
    if model.profile == "strict" or model.kv_type != "f16":
        return True
    return on_card if model.flash_attention is None else model.flash_attention


class EngineConfig(_Section, frozen=True):
    """Where the native libraries are. None: the fetched ones that fit this machine."""

    libraries: str | None = None


class Config(_Section, frozen=True):
    """The whole file."""

    server: ServerConfig = ServerConfig()
    limits: LimitsConfig = LimitsConfig()
    journal: JournalConfig = JournalConfig()
    engine: EngineConfig = EngineConfig()
    host: HostConfig = HostConfig()
    devices: dict[Name, DeviceConfig] = {}
    models: dict[Name, ModelConfig] = {}


def is_loopback(host: str) -> bool:
    """Whether this name or address means this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_config(text: str, source: str = "the configuration") -> Config:
    """Read and check a configuration.

    Raises ConfigError with the path of the first mistake.
    """
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"{source} is not valid TOML: {e}.") from None
    _empty_devices_are_none(raw)
    try:
        config = msgspec.convert(raw, Config)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{source}: {_plain_mistake(raw, str(e))}.") from None
    check_config(config, source)
    return config


_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_FIELD = re.compile(r"^Object (?P<kind>missing required|contains unknown) field `(?P<name>[^`]*)`$")


def _plain_mistake(raw: dict[str, Any], message: str) -> str:
    """A validation message as a sentence that begins with the path of the mistake, as the file writes it."""
    path, what = _split(message)
    for table, kind in (("devices", DeviceConfig), ("models", ModelConfig)):
        if path.startswith(f"{table}[...]"):
            path, what = _named_mistake(table, raw[table], kind)
    field = _FIELD.match(what)
    if field is not None:
        path = f"{path}.{field['name']}".removeprefix(".")
        what = "missing" if field["kind"] == "missing required" else "not a known name here"
        return f"{path} is {what}"
    return f"{path} is not valid: {what[:1].lower()}{what[1:]}" if path else what


def _named_mistake(table: str, items: dict[str, Any], kind: type[_Section]) -> tuple[str, str]:
    """Path and words of the first mistake in a table of named ones: the message of the whole does not say in which."""
    for name, item in items.items():
        try:
            msgspec.convert(item, kind)
        except msgspec.ValidationError as e:
            path, what = _split(str(e))
            return f"{table}.{name}.{path}".removesuffix("."), what
    raise AssertionError("the whole has a mistake that none of its parts has")


def _split(message: str) -> tuple[str, str]:
    match = _AT.match(message)
    assert match is not None
    return match["path"] or "", match["what"]


def _empty_devices_are_none(raw: dict[str, Any]) -> None:
    """TOML has no null: a model without a device says `device = ""`."""
    models = raw.get("models")
    for model in models.values() if isinstance(models, dict) else ():
        if isinstance(model, dict) and model.get("device") == "":
            model["device"] = None


def load_config(path: Path) -> Config:
    """Read a configuration file. Raises ConfigError where it is missing, unreadable or wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"There is no configuration file at {path}.") from None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"The configuration {path} cannot be read: {e}.") from None
    return parse_config(text, str(path))


def check_config(config: Config, source: str) -> None:
    """What single fields cannot know of each other. Raises ConfigError."""
    names: dict[str, str] = {}
    for name, model in config.models.items():
        for alias in (name, *model.aliases):
            if alias in names:
                raise ConfigError(f"{source}: models.{name} and models.{names[alias]} share the name {alias!r}.")
            names[alias] = name
        if model.device is not None and model.device not in config.devices:
            known = ", ".join(config.devices) or "none"
            raise ConfigError(
                f"{source}: models.{name}.device is {model.device!r}, but no [devices.{model.device}] is described "
                f'(known: {known}). Describe it, or write `device = ""` for CPU only.'
            )
        if model.policy == "gpu-only" and model.device is None:
            raise ConfigError(f"{source}: models.{name}.policy is gpu-only, but the model has no device. Name one.")
        if model.kv_type != "f16" and model.flash_attention is False:
            raise ConfigError(f"{source}: models.{name}.kv_type {model.kv_type} needs flash_attention = true.")
        if model.ubatch_tokens > model.batch_tokens:
            raise ConfigError(f"{source}: models.{name}.ubatch_tokens is larger than batch_tokens.")
    for name, device in config.devices.items():
        if device.kind == "emulated" and device.total_bytes is None:
            raise ConfigError(f"{source}: devices.{name} is emulated and needs total_bytes.")
