"""Guards against compiled shapes that pile up: a worker that meets every batch size grew by a gigabyte."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvferry.kernels.linear import can_prepack

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


@pytest.mark.skipif(not can_prepack(), reason="this CPU's bfloat16 does not go through oneDNN")
def test_shapes_do_not_pile_up() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert int(run.stdout) < 200  # MiB; 340 without a limit
