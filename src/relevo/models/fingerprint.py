"""What a replica computes with, as one hash: weights, tokenizer, template, engine and numeric profile.

Two routes are twins only where the fields in AGREEING_FIELDS are the same. The rest may differ between them (a GPU is
another library than a CPU), and then their arithmetic is not bit-equal.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from relevo.core.errors import ModelFileError
from relevo.models.gguf import GgufHeader, read_header
from relevo.models.gguf_split import may_be_part
from relevo.models.header_cache import FileIdentity

SAMPLING_CHAIN = "1"
"""Version of the sampler chain and of the random counter; raised whenever the same seed would draw otherwise."""
STOP_RULES = "1"
"""Version of the text fold's rules for stop strings and broken UTF-8."""

_CHUNK_BYTES = 4 * 2**20
_CACHE_NAME = "weights-digests.json"
_CACHE_ENTRIES = 256


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides what a replica answers. Digests are hex."""

    weights: str
    """sha256 of the model file's content; of a split model, of its parts' digests in their order."""
    tokenizer: str
    template: str
    """Empty: the model has no chat template."""
    quantization: str
    kv_type: str
    flash_attention: bool
    profile: str
    engine: str
    """Name and build, as the worker's Ready says."""
    library: str
    """Which CPU library or GPU backend computes."""
    sampling_chain: str = SAMPLING_CHAIN
    stop_rules: str = STOP_RULES

    @property
    def digest(self) -> str:
        """sha256 over all fields by name, hex. Stable across Python versions and field order."""
        fields = msgspec.structs.asdict(self)
        canonical = msgspec.json.encode({name: fields[name] for name in sorted(fields)})
        return hashlib.sha256(canonical).hexdigest()

    @property
    def short(self) -> str:
        """The first 12 digits, for people."""
        return self.digest[:12]


AGREEING_FIELDS = (
    "weights",
    "tokenizer",
    "template",
    "quantization",
    "kv_type",
    "flash_attention",
    "sampling_chain",
    "stop_rules",
)
"""What must be the same on both routes of a twin pair."""

EQUAL_ARITHMETIC_FIELDS = ("engine", "library", "profile")
"""What must be the same besides, before bit-equality is worth proving."""

_WORDS = {
    "weights": "the model files differ",
    "tokenizer": "the tokenizers differ",
    "template": "the chat templates differ",
    "quantization": "the quantizations differ",
    "kv_type": "the KV types differ",
    "flash_attention": "flash attention is on in one only",
    "sampling_chain": "the sampling chains differ",
    "stop_rules": "the stop rules differ",
}


def differences(a: Fingerprint, b: Fingerprint) -> list[str]:
    """Why these two are no twins, each in a few plain words with both values. Empty: they may be twins."""
    return [
        f"{_WORDS[name]} ({_shown(getattr(a, name))} and {_shown(getattr(b, name))})"
        for name in AGREEING_FIELDS
        if getattr(a, name) != getattr(b, name)
    ]


def arithmetic_differs(a: Fingerprint, b: Fingerprint) -> list[str]:
    """The names of the fields because of which the two cannot be bit-equal."""
    return [name for name in EQUAL_ARITHMETIC_FIELDS if getattr(a, name) != getattr(b, name)]


def fingerprint(
    header: GgufHeader,
    weights: str,
    template: str | None,
    *,
    kv_type: str,
    flash_attention: bool,
    profile: str,
    engine: str,
    library: str,
) -> Fingerprint:
    """Put the facts of file, configuration and worker together. `weights` from `weights_digest`, `template` the
    digest the text process reported."""
    return Fingerprint(
        weights=weights,
        tokenizer=header.tokenizer_digest,
        template=template or "",
        quantization=header.quantization,
        kv_type=kv_type,
        flash_attention=flash_attention,
        profile=profile,
        engine=engine,
        library=library,
    )


Progress = Callable[[int, int], bool]


def weights_digest(path: str | Path, state_folder: Path | None = None, progress: Progress | None = None) -> str:
    """sha256 of a model file's content, hex; remembered in the state folder for as long as the file is unchanged.

    Of a split model, of which any part may be named, the sha256 of its parts' digests. Unchanged means the same path,
    size, modification time in nanoseconds and inode. `progress(done_bytes, total_bytes)` is called after each chunk
    and ends the work by returning False. Blocks for about a second a GB: run it in a thread.

    Raises ModelFileError when a file cannot be read, changes while it is read, or `progress` ended it.
    """
    path = Path(path).absolute()
    parts = read_header(path).parts if may_be_part(path) else ()
    if len(parts) < 2:
        return _file_digest(path, state_folder, progress)
    whole = hashlib.sha256()
    before, total = 0, sum(part.file_bytes for part in parts)
    for part in parts:
        whole.update(bytes.fromhex(_file_digest(Path(part.path), state_folder, _of_all(progress, before, total))))
        before += part.file_bytes
    return whole.hexdigest()


def _of_all(progress: Progress | None, before: int, total: int) -> Progress | None:
    """Progress through one of several files, told as progress through all."""
    return None if progress is None else lambda done, _: progress(before + done, total)


def _file_digest(path: Path, state_folder: Path | None, progress: Progress | None) -> str:
    try:
        with path.open("rb") as file:
            before = FileIdentity.of(file.fileno(), path)
            known = _remembered(state_folder, before)
            if known is not None:
                return known
            digest = hashlib.sha256()
            done = 0
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                done += len(chunk)
                if progress is not None and not progress(done, before.size_bytes):
                    raise ModelFileError(f"Reading the model file {path} was ended before it was finished.")
            if FileIdentity.of(file.fileno(), path) != before or done != before.size_bytes:
                raise ModelFileError(f"The model file {path} changed while it was read. Try again when it is complete.")
    except FileNotFoundError:
        raise ModelFileError(f"There is no model file at {path}.") from None
    except OSError as e:
        raise ModelFileError(f"The model file {path} cannot be read: {e.strerror or e}.") from None
    found = digest.hexdigest()
    if state_folder is not None:
        _remember(state_folder, before, found)
    return found


class _Remembered(msgspec.Struct, frozen=True):
    identity: FileIdentity
    sha256: str


def _read_cache(folder: Path) -> list[_Remembered]:
    """What is remembered; nothing where the file is missing or damaged, since it can all be computed again."""
    try:
        return msgspec.json.decode((folder / _CACHE_NAME).read_bytes(), type=list[_Remembered])
    except (OSError, msgspec.DecodeError):
        return []


def _remembered(folder: Path | None, identity: FileIdentity) -> str | None:
    if folder is None:
        return None
    return next((entry.sha256 for entry in _read_cache(folder) if entry.identity == identity), None)


def _remember(folder: Path, identity: FileIdentity, sha256: str) -> None:
    """Replace the file whole, so that a reader or a crash never meets half of it. A failure only costs time later."""
    others = [entry for entry in _read_cache(folder) if entry.identity.path != identity.path]
    entries = [*others, _Remembered(identity, sha256)][-_CACHE_ENTRIES:]
    with contextlib.suppress(OSError):
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=_CACHE_NAME, suffix=".new")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(entries)))
            Path(name).replace(folder / _CACHE_NAME)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    text = str(value)
    if not text:
        return "none"
    return text[:12] if len(text) == 64 else text
