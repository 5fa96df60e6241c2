"""Compiles the CPU kernels into one shared library: `python -m kvferry.kernels.cpu.build` puts it beside this file.

Standard library only: `setup.py` runs this file before anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = "libkvferry_cpu.so"
COMPILE_TIMEOUT_S = 300
_UNITS = ("dispatch.cpp", "holders.cpp", "program.cpp", "tiles.cpp", "weigh.cpp")
"""Compiled once; `kernels.cpp` once for each instruction set."""
_HEADERS = (
    "api.h",
    "attention.h",
    "dispatch.h",
    "formats.h",
    "int4.h",
    "linear.h",
    "linear_quantized.h",
    "products.h",
    "program.h",
    "quantize.h",
    "sample.h",
    "small.h",
    "tile.h",
    "vec.h",
)
SOURCES = (*_HEADERS, "kernels.cpp", *_UNITS)
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-math-errno")
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
_X86_LEVELS = {"avx2": _AVX2, "avx512": _AVX512, "avx512bf16": (*_AVX512, "-mavx512bf16", "-mavx512vnni")}


class BuildError(Exception):
    """No compiler, or it refused; the message holds what it said."""


def source_digest() -> str:
    """Names the sources beside this file; a library carries the digest of what it was built from."""
    digest = hashlib.blake2b(digest_size=8)
    for name in SOURCES:
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()


def compile_library(target: Path) -> None:
    """Replaces `target` by a library that runs on every machine of this architecture. Raises `BuildError`."""
    compiler = _compiler()
    levels: dict[str, tuple[str, ...]] = {"baseline": ()}
    if platform.machine() in ("x86_64", "AMD64"):
        levels |= _X86_LEVELS
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = []
        for level, flags in levels.items():
            objects.append(f"{folder}/{level}.o")
            name = f"-DKVFERRY_ISA=kvferry_{level}"
            _run([*compiler, *_FLAGS, *flags, name, "-c", str(HERE / "kernels.cpp"), "-o", objects[-1]])
        build = f'-DKVFERRY_BUILD="{source_digest()}"'
        draft = f"{folder}/{LIBRARY}"
        units = [str(HERE / name) for name in _UNITS]
        _run([*compiler, *_FLAGS, "-ffp-contract=off", build, "-shared", *units, *objects, "-o", draft])
        os.replace(draft, target)


def _compiler() -> list[str]:
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise BuildError("no C++ compiler found; install g++ or clang++, or name one in CXX")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILE_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise BuildError(str(error)) from error
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr}")


if __name__ == "__main__":
    try:
        compile_library(HERE / LIBRARY)
    except BuildError as error:
        sys.exit(str(error))
