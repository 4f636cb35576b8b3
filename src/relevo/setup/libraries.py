"""The engine's native libraries: which set fits a machine, where they are, and how they get here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from relevo.core.errors import LibraryError
from relevo.setup import packages
from relevo.setup.build import find_own_build
from relevo.setup.cache import ensure_entry, find_entry
from relevo.setup.machine import Machine, look_at_machine
from relevo.setup.packages import NpmPackage, Wheel
from relevo.setup.progress import Progress

ENGINE_RELEASE: Final = "v0.5.0"
"""Release of llama.cpp that the binding was written against. Struct layouts are checked by nobody at run time."""

_VERSION: Final = "3.22.1"
_OLDEST_GLIBC: Final = (2, 34)
_CUDA_13_DRIVER: Final = 580
OLDEST_NVIDIA_DRIVER: Final = 525
"""The oldest that the CUDA 12 set runs with."""


@dataclass(frozen=True, slots=True)
class LibrarySet:
    """Libraries that work together in one folder. Later parts replace files of earlier ones."""

    name: str
    about: str
    parts: tuple[NpmPackage | Wheel, ...]

    @property
    def key(self) -> str:
        """Name of its entry in the cache."""
        return f"libraries/{self.name}-{ENGINE_RELEASE}"

    @property
    def size_bytes(self) -> int:
        """What is fetched, in all."""
        return sum(part.size_bytes for part in self.parts)


def _npm(name: str, size_bytes: int, integrity: str, *members: str) -> NpmPackage:
    folder = f"package/bins/{name}"
    wanted = members or (f"{folder}/lib*.so",)
    return NpmPackage(f"@node-llama-cpp/{name}", _VERSION, f"sha512-{integrity}", size_bytes, wanted)


_CUDA: Final = _npm(
    "linux-x64-cuda",
    142_898_030,
    "8rQCjyNNLZJUFit+YpjwlC4hwkKgOMIkB2wuycKBf8NU2O3ySKbiWZQ8aw9ku2nUTXjSnUIrE6KB88itduTBuA==",
)

_SETS: Final = (
    LibrarySet(
        "linux-x64",
        "CPU, Linux on x86-64",
        (
            _npm(
                "linux-x64",
                10_824_547,
                "5uCCDNqWCNfaAm8aR/Uzxbo4HBpKgNF91kCHPepKhgMgV2OAmatoefbOlMihsqCiH2Od35E/eUHQCFbfRBJuOg==",
            ),
        ),
    ),
    LibrarySet(
        "linux-x64-vulkan",
        "Vulkan and CPU, Linux on x86-64",
        (
            _npm(
                "linux-x64-vulkan",
                24_311_427,
                "bBxqU+JOcBu1nb5Qj2zcMci+JByT1E8EajHvYodyNfVIPkEhXh+/HMwR1/BT7xP08YK0hks+kM8fglER0P8JEg==",
            ),
        ),
    ),
    LibrarySet(
        "linux-x64-cuda",
        "CUDA 13 and CPU, Linux on x86-64, NVIDIA driver 580 or newer",
        (
            _CUDA,
            Wheel(
                "nvidia-cuda-runtime",
                "13.5.37",
                "df2b79a8852f10d1fef8c848489c49eebb5754051bf870202a862831412b179d",
                2_504_024,
                ("nvidia/cu13/lib/libcudart.so.13",),
            ),
            Wheel(
                "nvidia-cublas",
                "13.10.0.20",
                "dcc6d63884c53d07e267ce7e6feac17b2538cebaafec5db865736c3e28e4dc84",
                444_289_903,
                ("nvidia/cu13/lib/libcublas.so.13", "nvidia/cu13/lib/libcublasLt.so.13"),
            ),
        ),
    ),
    LibrarySet(
        "linux-x64-cuda12",
        "CUDA 12 and CPU, Linux on x86-64, NVIDIA driver 525 or newer",
        (
            _CUDA,
            # This package holds one file only: the CUDA 12 build that takes the place of the CUDA 13 one.
            _npm(
                "linux-x64-cuda-ext",
                176_664_119,
                "4e5ajkiM2aR2WAdB/N/ACk4weEhHvOAIrzxZPsIX0xDFW5+6hhShuy1/vs88SK9NGdgAco9IyE28eYS0H1efpA==",
                "package/bins/linux-x64-cuda/fallback/libggml-cuda.so",
            ),
            Wheel(
                "nvidia-cuda-runtime-cu12",
                "12.9.79",
                "25bba2dfb01d48a9b59ca474a1ac43c6ebf7011f1b0b8cc44f54eb6ac48a96c3",
                3_493_179,
                ("nvidia/cuda_runtime/lib/libcudart.so.12",),
            ),
            Wheel(
                "nvidia-cublas-cu12",
                "12.9.3.13",
                "d7d51055f161b317c7105ddaae90e71eda059026074ffef93cf7cde2886bfe72",
                581_217_458,
                ("nvidia/cublas/lib/libcublas.so.12", "nvidia/cublas/lib/libcublasLt.so.12"),
            ),
        ),
    ),
    LibrarySet(
        "linux-arm64",
        "CPU, Linux on 64-bit ARM",
        (
            _npm(
                "linux-arm64",
                7_340_902,
                "W+7naKCXX9/eEjjFmRS8vvx91QyLXDbeFxexZc3bh/PtQABZgmRL3C0AtYYXn4YGTj/3Qor4lWZn2tpjZFPLdQ==",
            ),
        ),
    ),
)

SETS: Final[Mapping[str, LibrarySet]] = MappingProxyType({s.name: s for s in _SETS})
"""Every prebuilt set whose checksums are pinned, by name."""


def fitting_sets(machine: Machine) -> list[LibrarySet]:
    """The prebuilt sets that run on a machine, best first; empty where none does."""
    if machine.system != "linux" or machine.glibc is None or machine.glibc < _OLDEST_GLIBC:
        return []
    if machine.processor == "aarch64":
        return [SETS["linux-arm64"]]
    if machine.processor != "x86_64":
        return []
    names = []
    if machine.nvidia_driver is not None and machine.nvidia_driver >= _CUDA_13_DRIVER:
        names.append("linux-x64-cuda")
    if machine.nvidia_driver is not None and machine.nvidia_driver >= OLDEST_NVIDIA_DRIVER:
        names.append("linux-x64-cuda12")
    if machine.vulkan and machine.cards & {"amd", "intel"}:
        names.append("linux-x64-vulkan")
    names.append("linux-x64")
    return [SETS[name] for name in names]


def choose(machine: Machine) -> LibrarySet:
    """The best prebuilt set for a machine. Raises LibraryError, with what to do, where none fits."""
    sets = fitting_sets(machine)
    if not sets:
        glibc = "no GNU C library" if machine.glibc is None else "GNU C library {}.{}".format(*machine.glibc)
        raise LibraryError(
            f"No prebuilt libraries fit this machine ({machine.system} on {machine.processor}, {glibc}). "
            "Build your own with `python -m relevo.setup --build`, or name a folder under `engine.libraries` "
            "(docs/libraries.md says how)."
        )
    return sets[0]


def find(config_path: str | None = None, machine: Machine | None = None) -> Path:
    """The folder of libraries to use: the configured one, else the best fetched set, else an own build.

    Raises LibraryError where there is none, or the configured folder holds no engine.
    """
    if config_path is not None:
        folder = Path(config_path).expanduser()
        if not any(folder.glob("libllama*")) and not (folder / "llama.dll").exists():
            raise LibraryError(f"engine.libraries names {folder}, but there is no libllama in it.")
        return folder.resolve()
    for library_set in fitting_sets(machine or look_at_machine()):
        found = find_entry(library_set.key)
        if found is not None:
            return found
    own = find_own_build()
    if own is not None:
        return own
    raise LibraryError("The engine's libraries are not on this machine yet. Run `make setup` to fetch them.")


def fetch(progress: Progress, library_set: LibrarySet | None = None) -> Path:
    """Fetch a set (None: the best for this machine) unless it is there. Raises LibraryError, FetchError, CacheError."""
    wanted = library_set or choose(look_at_machine())

    def fill(into: Path) -> None:
        for part in wanted.parts:
            packages.fetch(part, into, progress)
        _give_plain_names(into)

    def wait() -> None:
        progress.say("Another run is fetching the engine's libraries; waiting for it ...")

    return ensure_entry(wanted.key, fill, wait)


def _give_plain_names(folder: Path) -> None:
    """Sets for cards call their libraries "libllama.vulkan.v0.5.0.so"; a link gives each the name everybody expects."""
    for stem in ("libggml", "libllama"):
        found = sorted(folder.glob(f"{stem}.*.{ENGINE_RELEASE}.so"))
        if found:
            (folder / f"{stem}.so").symlink_to(found[0].name)
