"""For all tests. Torch is imported after this: its threads must not spin on cores that processes share."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
