"""Load compiled operations: the wheel's, or the C++ sources compiled once per machine in the cache folder."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from skipjoin.model.ops.variants import FLAGS, SOURCES, VARIANTS
from skipjoin.system.container import usable_cpus
from skipjoin.system.disk import has_space, no_space
from skipjoin.system.durable import is_sealed, locked, make_private, scratch_folder, sealed, write_durably
from skipjoin.system.folders import cache_folder, is_trusted, why_untrusted
from skipjoin.system.own_folder import OwnFolder

_log = logging.getLogger(__name__)
_FOLDER = Path(__file__).parent
_DECLARING = threading.Lock()

# Target flags, fastest first: everything that the compiler finds (optionally without AMX), what most x86 processors
# have, for a compiler that does not know this one, and nothing.
_NATIVE, AVX2, _PLAIN = ("-march=native",), ("-mavx2", "-mfma", "-mf16c"), ()
AVX2_NEEDS = {"avx2", "fma", "f16c"}
# Space for a library and the compiler's temporary files beside it.
_BUILD_BYTES = 16 << 20
# A compiler that takes longer is assumed to hang.
_TIMEOUT_S = 300


@functools.cache
def load_library() -> ctypes.CDLL | None:
    return next(libraries(), None)


def must_compile() -> bool:
    """Return whether `load_library` will compile, for up to a minute."""
    if shipped():
        return False
    try:
        library, _ = _place(_NATIVE)
        return not _is_usable(library)
    except OSError:  # there is no compiler, or no folder
        return False


def libraries() -> Iterator[ctypes.CDLL]:
    why = None
    for find in _sources_of_libraries():
        try:
            library = ctypes.CDLL(str(find()))
            path = path_of(library)
        except (OSError, AttributeError, subprocess.SubprocessError) as error:
            why = why or _first_line(error)
            continue
        if why is not None:
            say_once(
                f"compiled CPU operations for {path} are used, which are not the fastest for this CPU: {why}",
                logging.WARNING,
            )
            why = None
        yield library
    if why is not None:
        say_once(f"no compiled CPU operations; the slower torch operations are used instead: {why}", logging.WARNING)


def shipped() -> list[Path]:
    found = [variant for variant in VARIANTS.get(platform.machine(), ()) if variant.needs <= cpu_features()]
    return [file for variant in found if (file := _FOLDER / variant.file).is_file()]


def _sources_of_libraries() -> list[Callable[[], Path]]:
    if found := shipped():
        return [partial(Path, file) for file in found]
    return [partial(compiled_library, target) for target in _targets()]


def declare(function: Any, *arguments: type, returns: type | None = None) -> Callable[..., Any]:
    """Declare once what a compiled function takes and returns.

    Declaring again would free converters that calls of other threads use.
    """
    with _DECLARING:
        if function.argtypes is None:
            function.restype, function.argtypes = returns, list(arguments)
    declared: Callable[..., Any] = function
    return declared


def path_of(library: ctypes.CDLL) -> str:
    path: bytes = declare(library.skipjoin_path, returns=ctypes.c_char_p)()
    return path.decode()


@functools.cache
def say_once(text: str, level: int = logging.INFO) -> None:
    _log.log(level, "%s", text)


def compiled_library(target: Sequence[str] = _NATIVE) -> Path:
    """Return the library file for a processor, built if it is missing or damaged: a truncated one would crash."""
    library, compiler = _place(target)
    if _is_usable(library):
        return library
    cache = library.parent
    make_private(cache)
    with locked(library):
        if _is_usable(library):  # another process has built it meanwhile
            return library
        if _is_there(library):
            _log.warning("%s is damaged, and is built again", library)
        if not has_space(cache, _BUILD_BYTES):
            raise OSError(f"{no_space(cache)} with XDG_CACHE_HOME")
        _log.info("compiling CPU operations, once per machine (up to a minute) ...")
        with scratch_folder(cache) as scratch:
            made = Path(scratch) / library.name
            _build(made, [*shlex.split(compiler), *FLAGS, *target])
            # Loaders ignore what follows the library.
            write_durably(library, sealed(made.read_bytes()))
    return library


def _build(made: Path, compiler: Sequence[str]) -> None:
    def run(*arguments: str) -> None:
        subprocess.run([*compiler, *arguments], check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)

    objects = [str(made.parent / Path(source).with_suffix(".o").name) for source in SOURCES]
    with ThreadPoolExecutor(usable_cpus()) as cores:
        done = [
            cores.submit(run, "-c", str(_FOLDER / source), "-o", where)
            for source, where in zip(SOURCES, objects, strict=True)
        ]
        for future in done:
            future.result()
    run(*objects, "-o", str(made))


def _is_usable(library: Path) -> bool:
    return _is_there(library) and is_sealed(library.read_bytes())


def _is_there(library: Path) -> bool:
    return is_trusted(library, "the compiled operations' library") and library.is_file()


def _place(target: Sequence[str]) -> tuple[Path, str]:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        raise OSError("no C++ compiler found (g++, c++ or clang++, or set CXX)")
    digest = hashlib.sha256(" ".join((compiler, _version(compiler), *FLAGS, *target, _cpu(), "sealed")).encode())
    for source in sorted(_FOLDER.glob("*.cpp")):
        digest.update(source.read_bytes())
    cache = cache_folder()
    if not is_trusted(cache, "the folder of compiled operations"):
        cache = _private_folder()
    return cache / f"ops-{digest.hexdigest()[:16]}.so", compiler


def _private_folder() -> Path:
    folder = _own_folder().path
    if (why := why_untrusted(folder)) is not None:
        raise OSError(f"there is no folder for them that only this user can write: {why}")
    say_once(f"CPU operations are compiled for this process alone, in {folder}", logging.WARNING)
    return folder


@functools.cache
def _own_folder() -> OwnFolder:
    return OwnFolder("skipjoin-ops-")


def library_id(library: ctypes.CDLL) -> str:
    return hashlib.sha256(Path(library._name).read_bytes() + _cpu().encode()).hexdigest()[:16]


def cpu_features() -> frozenset[str]:
    return frozenset(_cpu().partition(":")[2].split())


def _targets() -> list[tuple[str, ...]]:
    known = cpu_features()
    without_amx = [(*_NATIVE, "-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")] if "amx_bf16" in known else []
    return [_NATIVE, *without_amx, *([AVX2] if known >= AVX2_NEEDS else []), _PLAIN]


def _first_line(error: Exception) -> str:
    detail = getattr(error, "stderr", None) or str(error)
    lines = [line for line in detail.splitlines() if "error" in line] or detail.splitlines() or [""]
    return lines[0]


def _version(compiler: str) -> str:
    found = shutil.which(shlex.split(compiler)[0])
    try:
        status = os.stat(found or "")
    except OSError:
        return ""
    return f"{status.st_size} {status.st_mtime_ns}"


def _cpu() -> str:
    """Return the features that determine -march=native: machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
