"""Compiles the CPU kernels while kvferry is installed. All else stands in pyproject.toml.

Where that fails (no compiler), the installation goes on: kvferry then computes with torch alone.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

FOLDER = "kvferry/kernels/cpu"
BUILD = runpy.run_path(str(Path(__file__).parent / FOLDER / "build.py"))
NAME = "kvferry.kernels.cpu.libkvferry_cpu"


class BuildKernels(build_ext):
    """A plain shared library in an extension's place: it knows nothing of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        try:
            BUILD["compile_library"](Path(self.get_ext_fullpath(ext.name)).absolute())
        except BUILD["BuildError"] as error:
            raise CompileError(
                f"the CPU kernels were not built, kvferry will compute with torch alone: {error}"
            ) from error


class PlatformWheel(bdist_wheel):
    """One wheel for every Python on this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


sources = [f"{FOLDER}/{name}" for name in BUILD["SOURCES"]]
setup(
    ext_modules=[Extension(NAME, sources, optional=True)],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
