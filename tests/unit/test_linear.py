"""Guards against compiled shapes that pile up where torch computes: a worker grew by a gigabyte."""

from __future__ import annotations

import os
import subprocess
import sys

from kvferry.kernels.cpu.available import SWITCH

SCRIPT = """
import sys, torch
from kvferry.kernels.linear import PackedLinear

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

linear = PackedLinear(torch.randn(960, 576).bfloat16())
linear(torch.randn(1, 576).bfloat16())
before = resident()
for rows in range(2, 500):
    linear(torch.randn(rows, 576).bfloat16())
sys.stdout.write(str((resident() - before) >> 20))
"""


def test_shapes_do_not_pile_up() -> None:
    environment = {**os.environ, SWITCH: "0"}
    command = [sys.executable, "-c", SCRIPT]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    assert int(run.stdout) < 200  # MiB; 340 without a limit
