"""Headers of safetensors files and of sharded sets of them, checked against the files' real sizes.

    u64 little-endian: length of the header · header: JSON {name: {dtype, shape, data_offsets}} · data

The weights themselves are views of the mapped file (`mapped_file.py`).
Source: https://github.com/huggingface/safetensors (format).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from kvferry.runtime.errors import CorruptModel, NotFound, UnsupportedModel
from kvferry.runtime.model.stored import StoredTensor

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
DTYPE_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8}
DTYPE_BITS |= {"F8_E4M3": 8, "F8_E5M2": 8, "U16": 16, "U32": 32, "U64": 64}


def read_json(path: Path) -> dict[str, Any]:
    """Raises `CorruptModel` unless the file holds one JSON object."""
    try:
        value = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError as error:
        raise CorruptModel(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CorruptModel(f"{path}: must hold a JSON object, holds {type(value).__name__}")
    return value


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Raises `CorruptModel` for a header that is damaged or promises other data than the file holds."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CorruptModel(
                f"{path}: the header should have {length} bytes, the file has {size}: truncated or damaged"
            )
        raw = file.read(length)
    try:
        entries: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, Any])
        entries.pop("__metadata__", None)
        tensors = {name: _tensor(path, name, entry, 8 + length) for name, entry in entries.items()}
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise CorruptModel(f"{path}: the safetensors header is damaged: {error!r}") from error
    end = 8 + length
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.num_bytes)):
        if tensor.offset != end:
            raise CorruptModel(f"{path}: tensor {tensor.name} begins at byte {tensor.offset}, expected {end}")
        end += tensor.num_bytes
    if end != size:
        fault = "truncated" if end > size else "longer than its header says"
        raise CorruptModel(f"{path}: the tensors end at byte {end}, the file has {size}: {fault}")
    return tensors


def _tensor(path: Path, name: str, entry: dict[str, Any], data_start: int) -> StoredTensor:
    dtype, shape = entry["dtype"], tuple(int(n) for n in entry["shape"])
    begin, end = (int(n) for n in entry["data_offsets"])
    if dtype not in DTYPE_BITS:
        raise UnsupportedModel(f"{path}: tensor {name} has dtype {dtype}; supported are F32, BF16, F16")
    num_bytes = math.prod(shape) * DTYPE_BITS[dtype] // 8
    if begin < 0 or end - begin != num_bytes:
        raise CorruptModel(f"{path}: tensor {name} {dtype}{list(shape)} needs {num_bytes} bytes, has {end - begin}")
    return StoredTensor(name, str(path), dtype, shape, data_start + begin, num_bytes)


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a model's folder. With an index, only what the index names.

    Raises `CorruptModel` for a missing shard, `NotFound` when there are no safetensors at all.
    """
    if (folder / INDEX).exists():
        return _read_sharded(folder)
    single = folder / "model.safetensors"
    found = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not found:
        others = sorted(p.name for p in (*folder.glob("*.bin"), *folder.glob("*.pth")))
        hint = f"it has {', '.join(others)}: convert them to safetensors" if others else "the weights are missing"
        raise NotFound(f"{folder}: no *.safetensors file; {hint}")
    return {name: tensor for path in found for name, tensor in read_header(path).items()}


def _read_sharded(folder: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptModel(f"{folder / INDEX}: weight_map is missing or empty")
    shards: dict[str, dict[str, StoredTensor]] = {}
    for shard in sorted({str(name) for name in weight_map.values()}):
        if Path(shard).name != shard or not (folder / shard).is_file():
            raise CorruptModel(f"{folder}: shard {shard} named in {INDEX} is missing")
        shards[shard] = read_header(folder / shard)
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise CorruptModel(f"{folder / shard}: tensor {name} is missing, though {INDEX} says it is there")
    return {name: shards[shard][name] for name, shard in weight_map.items()}
