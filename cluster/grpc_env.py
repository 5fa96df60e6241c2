"""Imported before gRPC, which reads these when it is first imported.

Ray starts its processes while gRPC already runs here; they exec at once, so gRPC need not prepare for the fork, and
would complain about each.
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
