"""Reads weights, one slice at a time: a rank never holds more than its own part, nor a float32 copy of a big tensor."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kvferry.runtime.errors import CorruptModel
from kvferry.runtime.model.families import hf_source, renamed
from kvferry.runtime.model.files import ModelFiles
from kvferry.runtime.model.gguf_file import GGUFFile
from kvferry.runtime.model.gguf_model import gguf_source
from kvferry.runtime.model.mapped_file import MappedFile
from kvferry.runtime.model.parts import Source, Spelling, part_shapes
from kvferry.runtime.model.safetensors_file import read_folder
from kvferry.runtime.model.spec import ModelSpec
from kvferry.runtime.model.stored import StoredTensor

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Called with (parameters read, parameters in all); a tensor counts once and wholly, however much of it was read."""
CHUNK_ELEMENTS = 1 << 20
"""Elements dequantised at once: 4 MiB of float32, which stays in cache."""
MAP_BYTES = 1 << 20
"""Smaller parts are copied: they would keep whole pages."""


class Weights(Protocol):
    """The parts of one model (`parts.py`)."""

    def names(self) -> list[str]:
        """Of the parts that are there."""

    def get(
        self, part: str, dtype: torch.dtype, dim: int | None = None, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        """A contiguous tensor, not to be written to. With `dim` (0 or 1): only `[start, stop)` of that dimension.

        Raises `CorruptModel` for a part that the model does not have.
        """

    def close(self) -> None:
        """Frees the files; what `get` returned stays valid."""


def open_weights(files: ModelFiles, spec: ModelSpec, on_progress: Progress | None = None) -> Weights:
    if files.kind == "gguf":
        return GGUFWeights(files, spec, on_progress)
    return SafetensorsWeights(files, spec, on_progress)


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """A bar on stderr while weights are read; silent when stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Parts:
    """Where the parts lie; reports each one's parameters the first time it is read."""

    def __init__(self, spec: ModelSpec, spelling: Spelling, where: str, on_progress: Progress | None = None) -> None:
        self.shapes = part_shapes(spec)
        self._spelling, self._where, self._report = spelling, where, on_progress
        self._left = {part: math.prod(shape) for part, shape in self.shapes.items()}
        self._total = sum(self._left.values())

    def source(self, part: str) -> Source:
        if part not in self.shapes:
            raise CorruptModel(f"{self._where}: the model has no part {part}")
        return self._spelling(part)

    def index(self, part: str, dim: int | None, start: int, stop: int | None) -> tuple[slice, ...]:
        """Rows (and columns) of the part, with borders."""
        ranges = [slice(0, size) for size in self.shapes[part]]
        if dim is not None:
            ranges[dim] = slice(*slice(start, stop).indices(self.shapes[part][dim]))
        return tuple(ranges)

    def read(self, part: str) -> None:
        if self._report is not None and self._left.pop(part, 0):
            self._report(self._total - sum(self._left.values()), self._total)


class MemoryWeights:
    """Weights that already exist as tensors, by the names that a Hugging Face folder gives them."""

    def __init__(self, tensors: dict[str, torch.Tensor], spec: ModelSpec) -> None:
        self._tensors = renamed(spec, tensors)
        self._parts = _Parts(spec, partial(hf_source, spec), "these weights")

    def names(self) -> list[str]:
        return [part for part in self._parts.shapes if self._parts.source(part).name in self._tensors]

    def get(
        self, part: str, dtype: torch.dtype, dim: int | None = None, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        source = self._parts.source(part)
        tensor = _require(self._tensors, source.name, "these weights")
        return _own(_cut(tensor, source, self._parts.index(part, dim, start, stop)), dtype)

    def close(self) -> None:
        """Nothing to free."""


class SafetensorsWeights:
    """A folder of safetensors files, each mapped when first needed.

    What needs no conversion stays a view of its file: only what is read of it takes memory, once for all processes.
    """

    def __init__(self, files: ModelFiles, spec: ModelSpec, on_progress: Progress | None = None) -> None:
        self._where = files.path
        self._tensors = renamed(spec, read_folder(Path(files.path)))
        self._parts = _Parts(spec, partial(hf_source, spec), files.path, on_progress)
        self._opened: dict[str, MappedFile] = {}

    def names(self) -> list[str]:
        return [part for part in self._parts.shapes if self._parts.source(part).name in self._tensors]

    def get(
        self, part: str, dtype: torch.dtype, dim: int | None = None, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        source = self._parts.source(part)
        found = _require(self._tensors, source.name, self._where)
        if found.path not in self._opened:
            self._opened[found.path] = MappedFile(found.path)
        file = self._opened[found.path]
        tensor = _cut(file.tensor(found), source, self._parts.index(part, dim, start, stop))
        if tensor.dtype != dtype or not tensor.is_contiguous() or tensor.nbytes < MAP_BYTES:
            tensor = _own(tensor, dtype)
        file.release()
        self._parts.read(part)
        return tensor

    def close(self) -> None:
        for file in self._opened.values():
            file.release()
        self._opened.clear()


class GGUFWeights:
    """A GGUF file, dequantised in chunks of rows. Rows of rotated pairs are put into the decoder's order (halves)."""

    def __init__(self, files: ModelFiles, spec: ModelSpec, on_progress: Progress | None = None) -> None:
        self._file = GGUFFile(files.path)
        self._parts = _Parts(spec, partial(gguf_source, spec), files.path, on_progress)

    def names(self) -> list[str]:
        return [part for part in self._parts.shapes if self._parts.source(part).name in self._file.tensors]

    def get(
        self, part: str, dtype: torch.dtype, dim: int | None = None, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        source = self._parts.source(part)
        stored = _require(self._file.tensors, source.name, self._file.path)
        rows, *rest = self._parts.index(part, dim, start, stop)
        if rest:
            tensor = self._get_matrix(stored, source, dtype, rows, rest[0])
        else:
            vector = self._dequantize(stored, source, slice(None), slice(None))[0]
            tensor = _own(torch.from_numpy(vector[_row_order(source, rows.start, rows.stop)]), dtype)
        self._file.release()
        self._parts.read(part)
        return tensor

    def _get_matrix(
        self, stored: StoredTensor, source: Source, dtype: torch.dtype, rows: slice, columns: slice
    ) -> torch.Tensor:
        out = torch.empty((rows.stop - rows.start, columns.stop - columns.start), dtype=dtype)
        step = max(1, CHUNK_ELEMENTS // stored.shape[-1])
        for first in range(rows.start, rows.stop, step):
            last = min(first + step, rows.stop)
            values = self._dequantize(stored, source, _row_order(source, first, last), columns)
            out[first - rows.start : last - rows.start] = torch.from_numpy(values)
        return out

    def _dequantize(self, stored: StoredTensor, source: Source, rows: Any, columns: slice) -> npt.NDArray[np.float32]:
        """`[rows, columns]`; reads whole quantisation blocks only."""
        quantization = GGMLQuantizationType[stored.dtype]
        per_block, block_bytes = GGML_QUANT_SIZES[quantization]
        start, stop, _ = columns.indices(stored.shape[-1])
        first, last = start // per_block, -(-stop // per_block)
        held = self._file.rows(stored)
        if source.item is not None:
            held = held.reshape(stored.shape[0], -1, held.shape[-1])[source.item]
        raw = held[rows, first * block_bytes : last * block_bytes]
        values: npt.NDArray[np.float32] = dequantize(np.array(raw, order="C"), quantization)
        return values[:, start - first * per_block : stop - first * per_block]

    def close(self) -> None:
        self._file.close()


def _row_order(source: Source, start: int, stop: int) -> Any:
    """What selects rows `[start, stop)` of a part, in the decoder's order, from the file's tensor."""
    if not source.pair_rows:
        return slice(source.first_row + start, source.first_row + stop)
    rows = np.arange(start, stop, dtype=np.int64)
    run, inner = rows - rows % source.pair_rows, rows % source.pair_rows
    half, i = np.divmod(inner - source.unpaired_rows, (source.pair_rows - source.unpaired_rows) // 2)
    return source.first_row + run + np.where(inner < source.unpaired_rows, inner, source.unpaired_rows + 2 * i + half)


def _cut(stored: Any, source: Source, index: tuple[slice, ...]) -> torch.Tensor:
    """The wanted rows and columns of a part, from a tensor or from a slice of an open file."""
    rows, *rest = index
    if source.pair_rows:
        return _cut_pairs(stored, source, rows, rest)
    inner = (slice(source.first_row + rows.start, source.first_row + rows.stop), *rest)
    item = () if source.item is None else (source.item,)
    tensor: torch.Tensor = stored[(*item, *reversed(inner))] if source.transposed else stored[(*item, *inner)]
    return tensor.t() if source.transposed and tensor.dim() == 2 else tensor


def _cut_pairs(stored: Any, source: Source, rows: slice, rest: list[slice]) -> torch.Tensor:
    """Whole runs are read: an open file gives ranges only."""
    order = _row_order(source, rows.start, rows.stop)
    first, last = int(order.min()), int(order.max()) + 1
    plain = msgspec.structs.replace(source, first_row=0, pair_rows=0)
    return _cut(stored, plain, (slice(first, last), *rest))[torch.from_numpy(order - first)]


def _require(tensors: dict[str, T], name: str, where: str) -> T:
    if name not in tensors:
        raise CorruptModel(f"{where}: tensor {name} is missing")
    return tensors[name]


def _own(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous copy that shares no memory with a mapped file."""
    return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)
