"""kvferry: disaggregated serving of large language models.

Public names are imported on first use, so that `import kvferry` costs nothing: a gateway never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.cluster.client import AsyncClient, Client
    from kvferry.cluster.service import Delta
    from kvferry.runtime.errors import KvferryError
    from kvferry.runtime.llm import LLM
    from kvferry.runtime.request import CompletionOutput, RequestOutput, SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "AsyncClient": "kvferry.cluster.client",
    "Client": "kvferry.cluster.client",
    "CompletionOutput": "kvferry.runtime.request",
    "Delta": "kvferry.cluster.service",
    "KvferryError": "kvferry.runtime.errors",
    "LLM": "kvferry.runtime.llm",
    "RequestOutput": "kvferry.runtime.request",
    "SamplingParams": "kvferry.runtime.request",
}

__all__ = [
    "AsyncClient",
    "Client",
    "CompletionOutput",
    "Delta",
    "KvferryError",
    "LLM",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvferry' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
