"""Writes the gRPC stubs of `kvferry.proto`: `python proto/generate.py [FOLDER]` (default: beside the .proto file)."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

HERE = Path(__file__).resolve().parent
# The stubs import each other by the path that protoc sees, so it is shown the one that Python sees.
PACKAGE = "kvferry/proto"
OUTPUTS = ("kvferry_pb2.py", "kvferry_pb2.pyi", "kvferry_pb2_grpc.py")


def generate(folder: Path) -> None:
    """Writes the three stubs into `folder`. Same input, same bytes."""
    google = Path(grpc_tools.__file__).parent / "_proto"
    with tempfile.TemporaryDirectory() as scratch:
        code = protoc.main(
            [
                "protoc",
                f"-I{PACKAGE}={HERE}",
                f"-I{google}",
                f"--python_out={scratch}",
                f"--pyi_out={scratch}",
                f"--grpc_python_out={scratch}",
                f"{PACKAGE}/kvferry.proto",
            ]
        )
        if code:
            sys.exit(code)
        for name in OUTPUTS:
            shutil.copyfile(Path(scratch) / PACKAGE / name, folder / name)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
