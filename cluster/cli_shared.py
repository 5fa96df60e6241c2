"""How options look in `--help`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import tyro


def shown(metavar: str, default: str = "") -> Any:
    """For `Annotated`: what stands for the value, and what happens without the option if the default is `None`."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})" if default else None)


TokenFile = Annotated[Path | None, shown("FILE", "no token")]
PemFile = Annotated[Path | None, shown("PEM", "none")]
