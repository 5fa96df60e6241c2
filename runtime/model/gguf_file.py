"""Reads the GGUF container: metadata, tensor directory, raw rows. Every length is checked against the file's size.

    magic "GGUF" · u32 version · u64 number of tensors · u64 number of pairs
    pairs:   string key · u32 type · value   (string = u64 length + UTF-8; array = u32 type + u64 count + values)
    tensors: string name · u32 dims · u64 sizes (fastest first) · u32 type · u64 offset
    padding to `general.alignment` · data

The `gguf` library's own reader makes a numpy view of every string of the vocabulary, 2 s for 50 000 tokens; here arrays
are skipped and decoded when asked for. Block sizes and dequantisation come from the library.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import contextlib
import math
import mmap
import struct
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kvferry.runtime.errors import CorruptModel, UnsupportedModel
from kvferry.runtime.model.stored import StoredTensor

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 8
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class GGUFArray(msgspec.Struct, frozen=True):
    """An array that has not been decoded yet; see `GGUFFile.strings` and `GGUFFile.numbers`."""

    kind: int
    count: int
    offset: int


Value = int | float | bool | str | GGUFArray


class GGUFFile:
    """One open file. Raises `CorruptModel` or `UnsupportedModel` on construction. `close` it, or use `with`."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        with Path(path).open("rb") as file:
            head = file.read(8)
            if head[:4] != MAGIC:
                raise CorruptModel(f"{path}: magic is {head[:4]!r}, a GGUF file begins with {MAGIC!r}")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.size = len(self._map)
        try:
            self._check_version()
            self.metadata: dict[str, Value] = {}
            self.tensors: dict[str, StoredTensor] = {}
            self._parse()
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            self.close()
            raise CorruptModel(f"{path}: the GGUF header is truncated or damaged: {error}") from error
        except (CorruptModel, UnsupportedModel):
            self.close()
            raise

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # a view, say in a traceback, still lives: unmapped with the last one
            self._map.close()

    def release(self) -> None:
        """Gives back the pages read so far, which count as this process's memory; they are read again when needed."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def header(self) -> bytes:
        """All bytes before the data."""
        return self._map[: self._data_start]

    def bytes_at(self, offset: int, num_bytes: int) -> bytes:
        return self._map[offset : offset + num_bytes]

    def rows(self, tensor: StoredTensor) -> npt.NDArray[np.uint8]:
        """Raw bytes `[rows, bytes of a row]`; a vector is one row. A view into the file."""
        data = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)
        return data.reshape(math.prod(tensor.shape[:-1]), -1)

    def strings(self, key: str) -> list[str]:
        """A metadata array of strings. Raises `CorruptModel` if it is missing or something else."""
        array = self._array(key)
        if array.kind != _STRING:
            raise CorruptModel(f"{self.path}: {key} must be an array of strings")
        found, pos = [], array.offset
        try:
            for _ in range(array.count):
                text, pos = self._string(pos)
                found.append(text)
        except UnicodeDecodeError as error:
            raise CorruptModel(f"{self.path}: {key}[{len(found)}] is no UTF-8: {error}") from error
        return found

    def numbers(self, key: str) -> list[float]:
        """A metadata array of numbers. Raises `CorruptModel` if it is missing or something else."""
        array = self._array(key)
        if array.kind not in _SCALARS:
            raise CorruptModel(f"{self.path}: {key} must be an array of numbers")
        return list(struct.unpack_from(f"<{array.count}{_SCALARS[array.kind]}", self._map, array.offset))

    def _array(self, key: str) -> GGUFArray:
        value = self.metadata.get(key)
        if not isinstance(value, GGUFArray):
            raise CorruptModel(f"{self.path}: metadata {key} must be an array, is {value!r}")
        return value

    def _check_version(self) -> None:
        (version,) = _U32.unpack_from(self._map, 4)
        if version & 0xFFFF == 0:
            raise UnsupportedModel(f"{self.path}: a big-endian GGUF file; supported are little-endian ones")
        if version not in VERSIONS:
            raise UnsupportedModel(f"{self.path}: GGUF version {version}; supported are {VERSIONS}")

    def _parse(self) -> None:
        num_tensors, num_pairs = struct.unpack_from("<QQ", self._map, 8)
        pos = 24
        for _ in range(num_pairs):
            key, pos = self._string(pos)
            (kind,) = _U32.unpack_from(self._map, pos)
            self.metadata[key], pos = self._value(kind, pos + 4)
        directory = []
        for _ in range(num_tensors):
            name, pos = self._string(pos)
            (dims,) = _U32.unpack_from(self._map, pos)
            if not 1 <= dims <= MAX_DIMS:
                raise CorruptModel(f"{self.path}: tensor {name} has {dims} dimensions; allowed are 1 to {MAX_DIMS}")
            *sizes, kind, offset = struct.unpack_from(f"<{dims}QIQ", self._map, pos + 4)
            pos += 4 + 8 * dims + 12
            directory.append((name, tuple(reversed(sizes)), kind, offset))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise CorruptModel(f"{self.path}: general.alignment={alignment!r} must be a positive integer")
        self._data_start = -(-pos // alignment) * alignment
        for name, shape, kind, offset in directory:
            if name in self.tensors:
                raise CorruptModel(f"{self.path}: tensor {name} appears twice")
            self.tensors[name] = self._tensor(name, shape, kind, self._data_start + offset)

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> StoredTensor:
        try:
            quantization = GGMLQuantizationType(kind)
        except ValueError as error:
            raise UnsupportedModel(f"{self.path}: tensor {name} has the unknown type {kind}") from error
        per_block, block_bytes = GGML_QUANT_SIZES[quantization]
        if shape[-1] % per_block:
            raise CorruptModel(
                f"{self.path}: tensor {name} {quantization.name}{list(shape)}: rows must be multiples of {per_block}"
            )
        num_bytes = math.prod(shape) // per_block * block_bytes
        if offset + num_bytes > self.size:
            raise CorruptModel(
                f"{self.path}: tensor {name} ends at byte {offset + num_bytes}, the file has {self.size}: truncated"
            )
        return StoredTensor(name, self.path, quantization.name, shape, offset, num_bytes)

    def _string(self, pos: int) -> tuple[str, int]:
        (length,) = _U64.unpack_from(self._map, pos)
        end = pos + 8 + length
        if end > self.size:
            raise CorruptModel(f"{self.path}: a string ends at byte {end}, the file has {self.size}: truncated")
        return self._map[pos + 8 : end].decode(), end

    def _value(self, kind: int, pos: int) -> tuple[Value, int]:
        if kind == _STRING:
            return self._string(pos)
        if kind in _SCALARS:
            code = f"<{_SCALARS[kind]}"
            return struct.unpack_from(code, self._map, pos)[0], pos + struct.calcsize(code)
        if kind != _ARRAY:
            raise CorruptModel(f"{self.path}: metadata of the unknown type {kind} at byte {pos}")
        item, count = struct.unpack_from("<IQ", self._map, pos)
        array, end = GGUFArray(item, count, pos + 12), pos + 12
        if item in _SCALARS:
            end += count * struct.calcsize(f"<{_SCALARS[item]}")
        elif item == _STRING:
            length_at = _U64.unpack_from
            for _ in range(count):
                end += 8 + length_at(self._map, end)[0]
        else:
            raise UnsupportedModel(f"{self.path}: a metadata array of type {item} at byte {pos}")
        if end > self.size:
            raise CorruptModel(f"{self.path}: an array ends at byte {end}, the file has {self.size}: truncated")
        return array, end
