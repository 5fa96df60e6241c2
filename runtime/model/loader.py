"""Reads weights, one slice at a time: a rank never holds more than its own part, nor a float32 copy of a big tensor."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from safetensors import safe_open

from kvferry.runtime.errors import CorruptModel
from kvferry.runtime.model.files import ModelFiles
from kvferry.runtime.model.gguf_file import GGUFFile
from kvferry.runtime.model.gguf_model import gguf_name, half_to_pair_rows, rotates_pairs
from kvferry.runtime.model.safetensors_file import read_folder
from kvferry.runtime.model.spec import ModelSpec
from kvferry.runtime.model.stored import StoredTensor

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Called with (parameters read, parameters in all); a tensor counts once and wholly, however much of it was read."""
CHUNK_ELEMENTS = 1 << 20
"""Elements dequantised at once: 4 MiB of float32, which stays in cache."""


class Weights(Protocol):
    """Tensors of one model by Hugging Face names (`model.layers.0.self_attn.q_proj.weight`)."""

    def names(self) -> list[str]: ...

    def get(
        self, name: str, dtype: torch.dtype, dim: int | None = None, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        """A contiguous tensor of its own. With `dim` (0 or 1): only `[start, stop)` of that dimension is read.

        Raises `CorruptModel` for a tensor that the model does not have.
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


class _Counter:
    """Reports each tensor's parameters the first time it is read."""

    def __init__(self, spec: ModelSpec, on_progress: Progress | None) -> None:
        self._left = {name: int(np.prod(shape)) for name, shape in spec.tensor_shapes().items()}
        self._total = sum(self._left.values())
        self._report = on_progress

    def read(self, name: str) -> None:
        if self._report is not None and self._left.pop(name, 0):
            self._report(self._total - sum(self._left.values()), self._total)


class MemoryWeights:
    """Weights that already exist as tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def get(
        self, name: str, dtype: torch.dtype, dim: int | None = None, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        tensor = _require(self._tensors, name, "these weights")
        return _own(tensor[_index(dim, start, stop)], dtype)

    def close(self) -> None:
        """Nothing to free."""


class OnDevice:
    """Moves each tensor to a device as it is read."""

    def __init__(self, weights: Weights, device: torch.device) -> None:
        self._weights = weights
        self._device = device

    def names(self) -> list[str]:
        return self._weights.names()

    def get(
        self, name: str, dtype: torch.dtype, dim: int | None = None, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        return self._weights.get(name, dtype, dim, start, stop).to(self._device)

    def close(self) -> None:
        self._weights.close()


class SafetensorsWeights:
    """A folder of safetensors files, each opened when first needed."""

    def __init__(self, files: ModelFiles, spec: ModelSpec, on_progress: Progress | None = None) -> None:
        self._where = files.path
        self._tensors = read_folder(Path(files.path))
        self._wanted = spec.tensor_shapes()
        self._stack = contextlib.ExitStack()
        self._opened: dict[str, Any] = {}
        self._counter = _Counter(spec, on_progress)

    def names(self) -> list[str]:
        return [name for name in self._tensors if name in self._wanted]

    def get(
        self, name: str, dtype: torch.dtype, dim: int | None = None, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        path = _require(self._tensors, name, self._where).path
        if path not in self._opened:
            self._opened[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        tensor = _own(self._opened[path].get_slice(name)[_index(dim, start, stop)], dtype)
        self._counter.read(name)
        return tensor

    def close(self) -> None:
        self._opened.clear()
        self._stack.close()


class GGUFWeights:
    """A GGUF file, dequantised in chunks of rows. Rows of q and k are put into the decoder's order (halves)."""

    def __init__(self, files: ModelFiles, spec: ModelSpec, on_progress: Progress | None = None) -> None:
        self._file = GGUFFile(files.path)
        self._spec = spec
        self._names = {name: gguf_name(name) for name in spec.tensor_shapes()}
        self._counter = _Counter(spec, on_progress)

    def names(self) -> list[str]:
        return [name for name, stored in self._names.items() if stored in self._file.tensors]

    def get(
        self, name: str, dtype: torch.dtype, dim: int | None = None, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        stored = _require(self._file.tensors, self._names.get(name, name), self._file.path)
        index = _index(dim, start, stop)
        if len(stored.shape) == 1:
            vector = self._dequantize(stored, slice(None), slice(None))[0]
            order = self._row_order(name, 0, stored.shape[0])
            tensor = _own(torch.from_numpy(vector[order])[index], dtype)
        else:
            tensor = self._get_matrix(name, stored, dtype, index)
        self._counter.read(name)
        return tensor

    def _get_matrix(
        self, name: str, stored: StoredTensor, dtype: torch.dtype, index: tuple[slice, ...]
    ) -> torch.Tensor:
        num_rows, num_columns = stored.shape
        row_start, row_stop, _ = index[0].indices(num_rows)
        columns = slice(*index[1].indices(num_columns)) if len(index) == 2 else slice(0, num_columns)
        out = torch.empty((row_stop - row_start, columns.stop - columns.start), dtype=dtype)
        step = max(1, CHUNK_ELEMENTS // num_columns)
        for first in range(row_start, row_stop, step):
            last = min(first + step, row_stop)
            values = self._dequantize(stored, self._row_order(name, first, last), columns)
            out[first - row_start : last - row_start] = torch.from_numpy(values)
        return out

    def _row_order(self, name: str, start: int, stop: int) -> Any:
        """What selects rows `[start, stop)` of the decoder's order from the file."""
        if rotates_pairs(self._spec.architecture, name):
            return half_to_pair_rows(start, stop, self._spec.head_dim)
        return slice(start, stop)

    def _dequantize(self, stored: StoredTensor, rows: Any, columns: slice) -> npt.NDArray[np.float32]:
        """`[rows, columns]`; reads whole quantisation blocks only."""
        quantization = GGMLQuantizationType[stored.dtype]
        per_block, block_bytes = GGML_QUANT_SIZES[quantization]
        start, stop, _ = columns.indices(stored.shape[-1])
        first, last = start // per_block, -(-stop // per_block)
        raw = self._file.rows(stored)[rows, first * block_bytes : last * block_bytes]
        values: npt.NDArray[np.float32] = dequantize(np.array(raw, order="C"), quantization)
        return values[:, start - first * per_block : stop - first * per_block]

    def close(self) -> None:
        self._file.close()


def _require(tensors: dict[str, T], name: str, where: str) -> T:
    if name not in tensors:
        raise CorruptModel(f"{where}: tensor {name} is missing")
    return tensors[name]


def _index(dim: int | None, start: int, stop: int | None) -> tuple[slice, ...]:
    if dim is None:
        return (slice(None),)
    return (*[slice(None)] * dim, slice(start, stop))


def _own(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous copy that shares no memory with a mapped file."""
    return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)
