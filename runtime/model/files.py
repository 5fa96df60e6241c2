"""Finds a model's files and checks them before any memory is taken. Knows no torch.

A model is named by one of:
    a folder                Hugging Face layout (`config.json`, safetensors), or one that holds a single `.gguf`
    a file `….gguf`
    `package:NAME`          the single `.gguf` inside the installed Python package NAME (`packages.py`)
    `org/name`              a Hugging Face hub id; what is missing locally is downloaded
"""

from __future__ import annotations

import re
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import msgspec

from kvferry.runtime.errors import CorruptModel, NotFound, UnsupportedModel
from kvferry.runtime.model.families import from_hf_config, hf_source, renamed
from kvferry.runtime.model.gguf_file import GGUFFile
from kvferry.runtime.model.gguf_model import gguf_source, gguf_spec
from kvferry.runtime.model.packages import find_in_package
from kvferry.runtime.model.parts import Shape, file_shapes
from kvferry.runtime.model.safetensors_file import read_folder, read_json
from kvferry.runtime.model.spec import ModelSpec, MoESpec
from kvferry.runtime.model.stored import StoredTensor

PACKAGE_PREFIX = "package:"
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
FLOAT_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SAMPLE_BYTES = 256


class ModelFiles(msgspec.Struct, frozen=True):
    path: str
    """Absolute: a folder (`hf`) or a file (`gguf`)."""
    kind: Literal["hf", "gguf"]
    name: str
    """For people: the folder's or file's name, or the hub id."""


def resolve_model(model: str) -> ModelFiles:
    """Raises `NotFound` when there is no such model, `UnsupportedModel` when it is no layout kvferry reads."""
    if model.startswith(PACKAGE_PREFIX):
        found = find_in_package(model.removeprefix(PACKAGE_PREFIX)).absolute()
        return ModelFiles(str(found), "gguf", found.stem)
    path = Path(model).expanduser()
    if path.is_dir():
        return _in_folder(path.absolute(), path.absolute().name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnsupportedModel(f"model={model!r}: a model file must end in .gguf")
        return ModelFiles(str(path.absolute()), "gguf", path.stem)
    if _HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return _from_hub(model, HUB_PATTERNS)
    raise NotFound(f"model={model!r}: no such folder or .gguf file; hub ids look like org/name")


def _in_folder(folder: Path, name: str) -> ModelFiles:
    if (folder / "config.json").is_file():
        return ModelFiles(str(folder), "hf", name)
    return _single(sorted(folder.glob("*.gguf")), f"{folder} (it has no config.json)")


def _single(found: list[Path], where: str) -> ModelFiles:
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise NotFound(f"{where}: expected exactly one .gguf file, found {names}; name the file itself")
    return ModelFiles(str(found[0].absolute()), "gguf", found[0].stem)


def _from_hub(model: str, patterns: list[str]) -> ModelFiles:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        folder = snapshot_download(model, allow_patterns=patterns, ignore_patterns=["*/*"])
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise NotFound(
            f"model={model!r}: no such folder here, and the Hugging Face hub did not give it: {reason}"
        ) from error
    return _in_folder(Path(folder), model)


def load_spec(files: ModelFiles) -> ModelSpec:
    """Reads configuration and headers, and checks that all tensors are there in the right shapes.

    Raises `CorruptModel` for damaged or incomplete files, `UnsupportedModel` for what kvferry lacks, each naming
    the file and the value.
    """
    if files.kind == "gguf":
        with GGUFFile(files.path) as file:
            spec = gguf_spec(file)
            _check_tensors(file_shapes(spec, partial(gguf_source, spec)), file.tensors, files)
            return spec
    folder = Path(files.path)
    config = read_json(folder / "config.json")
    spec = _configured(folder / "config.json")
    tensors = renamed(spec, read_folder(folder))
    experts = sum(layer.mlp.num_experts for layer in spec.layers if isinstance(layer.mlp, MoESpec))
    if spec.num_layers + experts > len(tensors):  # before a list of all their tensors is made
        raise CorruptModel(
            f"{files.path}: the configuration says {spec.num_layers} layers with {experts} experts, "
            "the weights have fewer"
        )
    shapes = file_shapes(spec, partial(hf_source, spec))
    _check_tensors(shapes, tensors, files)
    for name in shapes:
        if tensors[name].dtype not in FLOAT_DTYPES:
            raise UnsupportedModel(
                f"{tensors[name].path}: tensor {name} is {tensors[name].dtype}; supported are {', '.join(FLOAT_DTYPES)}"
            )
    if not (config.get("dtype") or config.get("torch_dtype")):
        spec = msgspec.structs.replace(
            spec, dtype=FLOAT_DTYPES[tensors[hf_source(spec, "embedding.weight").name].dtype]
        )
    return spec


def describe(model: str) -> ModelSpec:
    """What `load_spec` says; where weights are missing beside a `config.json`, what that says.

    `model`: as for `resolve_model`, or a path to a `config.json`. Of a hub id only the configuration is downloaded.
    """
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".json":
        return _configured(path)
    if not path.exists() and _HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return _configured(Path(_from_hub(model, ["*.json"]).path) / "config.json")
    files = resolve_model(model)
    alone = files.kind == "hf" and not any(Path(files.path).glob("*.safetensors"))
    return _configured(Path(files.path) / "config.json") if alone else load_spec(files)


def _configured(config: Path) -> ModelSpec:
    generation = config.with_name("generation_config.json")
    return from_hf_config(read_json(config), read_json(generation) if generation.is_file() else None)


def _check_tensors(shapes: dict[str, Shape], tensors: dict[str, StoredTensor], files: ModelFiles) -> None:
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise CorruptModel(f"{files.path}: tensor {name} is missing")
        if tensor.shape != shape:
            raise CorruptModel(
                f"{tensor.path}: tensor {name} has shape {list(tensor.shape)}, the configuration says {list(shape)}"
            )


def model_identity(files: ModelFiles) -> str:
    """Hex digest: equal wherever the files' contents are, however they are sharded.

    Reads the configuration and 3 samples of every tensor, not the whole: it tells models and their fine-tunes apart,
    not a flipped bit.
    """
    digest = blake2b(digest_size=16)
    if files.kind == "gguf":
        with GGUFFile(files.path) as file:
            digest.update(file.header())
            for tensor in file.tensors.values():
                for start in _samples(tensor):
                    digest.update(file.bytes_at(start, min(_SAMPLE_BYTES, tensor.num_bytes)))
        return digest.hexdigest()
    digest.update((Path(files.path) / "config.json").read_bytes())
    tensors = sorted(read_folder(Path(files.path)).values(), key=lambda tensor: tensor.name)
    opened = {path: open(path, "rb") for path in {tensor.path for tensor in tensors}}  # noqa: SIM115
    try:
        for tensor in tensors:
            digest.update(msgspec.msgpack.encode((tensor.name, tensor.dtype, tensor.shape)))
            for start in _samples(tensor):
                opened[tensor.path].seek(start)
                digest.update(opened[tensor.path].read(min(_SAMPLE_BYTES, tensor.num_bytes)))
    finally:
        for stream in opened.values():
            stream.close()
    return digest.hexdigest()


def _samples(tensor: StoredTensor) -> tuple[int, int, int]:
    """Where samples begin: at the tensor's beginning, middle and end."""
    last = max(0, tensor.num_bytes - _SAMPLE_BYTES)
    return tensor.offset, tensor.offset + last // 2, tensor.offset + last
