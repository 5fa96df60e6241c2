"""How the compiled kernels are found, refused and built."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from kvferry.kernels.cpu import available, build, selftest
from kvferry.kernels.cpu.available import SWITCH, library
from kvferry.kernels.cpu.library import Unusable, load
from kvferry.kernels.norm import rms_norm

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def test_kernels_are_used_where_they_can_be_built() -> None:
    """Falling back silently would cost half of the speed and fail no other test."""
    if library() is None and os.environ.get(SWITCH) != "0" and COMPILER:
        pytest.fail("the CPU kernels are not used although a compiler is here; run `make kernels`")


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux shows them")
def test_one_pool_of_threads_serves_torch_and_the_kernels() -> None:
    """A second OpenMP would start threads of its own, which fight with torch's for the cores."""
    if library() is None:
        pytest.skip("the CPU kernels are not built")
    before, tasks = torch.get_num_threads(), Path("/proc/self/task")
    torch.set_num_threads(3)
    try:
        x = torch.ones(512, 512)
        x.exp()
        with_torch = len(list(tasks.iterdir()))
        rms_norm(x, x[0], 1e-6)
        assert len(list(tasks.iterdir())) == with_torch
    finally:
        torch.set_num_threads(before)


def test_a_missing_library_is_said_once_and_torch_takes_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(available, "HERE", tmp_path)
    monkeypatch.delenv(SWITCH, raising=False)
    library.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match=r"does not exist; build them with `python -m kvferry\.kernels\.cpu"):
            assert library() is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert library() is None
    finally:
        library.cache_clear()


def test_wrong_results_turn_the_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler's fault on some machine must cost speed only."""
    if library() is None:
        pytest.skip("the CPU kernels are not built")
    monkeypatch.setattr(selftest, "_TOLERANCE", dict.fromkeys(selftest.DTYPES, 0.0))
    library.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="attention in bfloat16 computed wrong results"):
            assert library() is None
    finally:
        library.cache_clear()


def test_the_switch_turns_them_off_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    library.cache_clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert library() is None
    finally:
        library.cache_clear()


def test_files_that_are_no_library_are_refused(tmp_path: Path) -> None:
    """A half-written file, as after a full disk."""
    broken = tmp_path / build.LIBRARY
    broken.write_bytes(b"\x7fELF")
    with pytest.raises(Unusable, match="cannot be loaded"):
        load(broken)


@pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")
def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After a change of branch, an old library would be called with the wrong structs."""
    monkeypatch.setattr(build, "_FLAGS", tuple(f.replace("-O3", "-O0") for f in build._FLAGS))
    monkeypatch.setattr(build, "source_digest", lambda: "0" * 16)
    build.compile_library(tmp_path / build.LIBRARY)
    with pytest.raises(Unusable, match="built from other sources"):
        load(tmp_path / build.LIBRARY)


def test_without_a_compiler_the_build_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler found; install"):
        build.compile_library(tmp_path / build.LIBRARY)
    monkeypatch.setenv("CXX", f"{sys.executable} -c 'import sys;sys.exit(\"bad flag\")'")
    with pytest.raises(build.BuildError, match="bad flag"):
        build.compile_library(tmp_path / build.LIBRARY)


def test_the_build_script_needs_nothing_installed() -> None:
    """`setup.py` runs it before torch and kvferry are there."""
    code = "import runpy; runpy.run_path('kernels/cpu/build.py'); import sys; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-S", "-c", code], check=True, cwd=root, timeout=60)
