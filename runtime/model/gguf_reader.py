"""Typed access to a GGUF file's metadata: every fault names the file, the key and the value."""

from __future__ import annotations

import math

import numpy as np

from kvferry.runtime.errors import CorruptModel, UnsupportedModel
from kvferry.runtime.model.gguf_file import GGUFArray, GGUFFile, Value


class GGUFReader:
    """The architecture's own keys."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self._prefix = f"{file.metadata.get('general.architecture')}."

    def get(self, key: str) -> Value | None:
        return self.file.metadata.get(self._prefix + key)

    def positive(self, key: str, default: int | None = None) -> int:
        value = default if self.get(key) is None else self.get(key)
        if isinstance(value, GGUFArray):
            values = set(self.file.numbers(self._prefix + key))
            value = int(values.pop()) if len(values) == 1 else value
        if isinstance(value, GGUFArray):
            raise UnsupportedModel(f"{self.file.path}: {self._prefix}{key} differs between layers")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CorruptModel(f"{self.file.path}: {self._prefix}{key}={value!r} must be a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = default if self.get(key) is None else self.get(key)
        if not isinstance(value, int | float) or not 0.0 < value < math.inf:
            raise CorruptModel(f"{self.file.path}: {self._prefix}{key}={value!r} must be a positive number")
        # Files hold 32-bit floats; the shortest decimal that means the same is what the model's author wrote.
        return float(str(np.float32(value)))

    def optional_number(self, key: str) -> float | None:
        """None also for 0, which converters write for "none"."""
        return self.number(key) if self.get(key) else None

    def flags(self, key: str) -> list[bool] | None:
        """An array of booleans, if it is there and one."""
        value = self.get(key)
        return [bool(v) for v in self.file.numbers(self._prefix + key)] if isinstance(value, GGUFArray) else None


def token_id(file: GGUFFile, name: str) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value if isinstance(value, int) else None


def eos_token_ids(file: GGUFFile) -> list[int]:
    """Ends of sequence, turn and message, each once."""
    found = [token_id(file, name) for name in ("eos", "eot", "eom")]
    return list(dict.fromkeys(token for token in found if token is not None))
