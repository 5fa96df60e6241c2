"""Checks of the tree itself: file and function sizes, generated stubs up to date. Part of `make check`."""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels", "runtime", "cluster", "examples", "tests")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
GENERATED = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def python_files() -> list[Path]:
    return [
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.name.endswith(GENERATED) and "__pycache__" not in path.parts
    ]


def sizes() -> list[str]:
    faults = []
    for path in python_files():
        text = path.read_text()
        name = path.relative_to(ROOT)
        if (lines := text.count("\n")) > MAX_FILE_LINES:
            faults.append(f"{name}: {lines} lines, at most {MAX_FILE_LINES}; split it along its seam")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                length = node.end_lineno - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    faults.append(f"{name}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}")
    return faults


def roots_without_init() -> list[str]:
    """A root with `__init__.py` would shadow installed packages of the same name."""
    roots = ("kernels", "proto", "runtime", "cluster")
    return [f"{r}/__init__.py must not exist" for r in roots if (ROOT / r / "__init__.py").exists()]


def stubs() -> list[str]:
    generate = ROOT / "proto" / "generate.py"
    if not generate.exists():
        return []
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, generate, folder], check=True)
        return [
            f"proto/{fresh.name} is out of date; run `make proto`"
            for fresh in sorted(Path(folder).iterdir())
            if not (ROOT / "proto" / fresh.name).exists()
            or fresh.read_bytes() != (ROOT / "proto" / fresh.name).read_bytes()
        ]


if __name__ == "__main__":
    found = sizes() + roots_without_init() + stubs()
    for fault in found:
        print(fault)
    sys.exit(bool(found))
