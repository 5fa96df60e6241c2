"""What an engine's options and a model come to together, and whether they can. Knows no torch."""

from __future__ import annotations

from msgspec.structs import replace

from kvferry.runtime.config import EngineConfig
from kvferry.runtime.errors import CorruptModel, InvalidArgument, NotFound, UnsupportedModel
from kvferry.runtime.kv.groups import KVGroups, one_group, two_groups
from kvferry.runtime.kv.layout import KVLayout
from kvferry.runtime.model.files import ModelFiles, load_spec, resolve_model
from kvferry.runtime.model.spec import AttentionSpec, MLPSpec, ModelSpec


def check_fit(config: EngineConfig, spec: ModelSpec, tp_size: int, tp_name: str = "tensor parallel size") -> None:
    """Raises the `InvalidArgument` that a rank of a group of `tp_size`, which is called `tp_name`, would raise."""
    spec.check_tensor_parallel(tp_size, tp_name)
    check_quantization(config, spec)
    resolve_kv(config, spec, tp_size)


def check_draft(model: str, target: ModelFiles, target_spec: ModelSpec) -> ModelFiles:
    """Returns the draft model's files. Raises `InvalidArgument` unless its tokens are the target's, each by its name;
    what else ails the files names the option, too.
    """
    from kvferry.runtime.text.tokenizer import load_tokenizer  # 5 MiB that a worker does not need otherwise

    try:
        files = resolve_model(model)
        spec = load_spec(files)
        own = load_tokenizer(files).raw.get_vocab(with_added_tokens=True)
    except (CorruptModel, NotFound, UnsupportedModel) as error:
        raise type(error)(f"draft_model={model!r}: {error}") from error
    way_out = "a draft model must share the model's vocabulary; take one of the same family"
    if spec.vocab_size != target_spec.vocab_size:
        raise InvalidArgument(
            "draft_model", model, f"has {spec.vocab_size} tokens, the model {target_spec.vocab_size}", way_out
        )
    wanted = load_tokenizer(target).raw.get_vocab(with_added_tokens=True)
    if own != wanted:
        name, place = next(item for item in sorted({*own.items()} ^ {*wanted.items()}))
        raise InvalidArgument("draft_model", model, f"token {name!r} ({place}) is not the same in both", way_out)
    return files


def resolve_dtype(config: EngineConfig, spec: ModelSpec) -> str:
    return spec.dtype if config.dtype == "auto" else config.dtype


def resolve_kv_dtype(config: EngineConfig, spec: ModelSpec) -> str:
    return resolve_dtype(config, spec) if config.cache.kv_dtype == "auto" else config.cache.kv_dtype


def check_quantization(config: EngineConfig, spec: ModelSpec, device: str = "cpu") -> None:
    """Raises `InvalidArgument` for what nothing can compute. `device`: torch's word for its kind."""
    if config.quantization == "none":
        return
    if device != "cpu":
        raise InvalidArgument("quantization", config.quantization, f"exists on CPUs, this is {device}", "use none")
    plain = all(isinstance(layer.attention, AttentionSpec) and isinstance(layer.mlp, MLPSpec) for layer in spec.layers)
    if not plain:
        raise InvalidArgument(
            "quantization", config.quantization, "does not go with experts or latent attention", "use none"
        )
    dtype = resolve_dtype(config, spec)
    if dtype == "float16":
        raise InvalidArgument(
            "quantization", config.quantization, "does not go with dtype float16", "use --dtype bfloat16 or float32"
        )


def resolve_max_context(config: EngineConfig, spec: ModelSpec) -> int:
    """Raises `InvalidArgument` for more than the model was trained for."""
    wanted = config.scheduler.max_context
    if wanted is not None and wanted > spec.max_context:
        raise InvalidArgument("max_context", wanted, f"the model was trained for {spec.max_context} tokens")
    return wanted or spec.max_context


def resolve_kv(config: EngineConfig, spec: ModelSpec, tp_size: int) -> KVGroups:
    """The block groups of each rank. Raises `InvalidArgument` if not even one block of each fits."""
    layout = spec.kv_layout(config.cache.block_size, resolve_kv_dtype(config, spec), tp_size)
    longest = resolve_max_context(config, spec)
    windows = [None if (w := layer.attention.window) is None or w >= longest else w for layer in spec.layers]
    local = [window for window in windows if window is not None]
    if len(local) in (0, len(windows)):
        return one_group(layout, resolve_num_blocks(config, layout), max(local, default=None))
    full, window = (replace(layout, num_layers=n) for n in (len(windows) - len(local), len(local)))
    is_local = [window is not None for window in windows]
    return two_groups(full, window, max(local), is_local, _split(config, full, window, max(local), longest))


def resolve_num_blocks(config: EngineConfig, layout: KVLayout) -> int:
    """Raises `InvalidArgument` if not even one block fits."""
    if config.cache.num_blocks is not None:
        return config.cache.num_blocks
    return _fitting(config.cache.kv_memory_bytes, 1.0, layout)


def _fitting(num_bytes: int, share: float, layout: KVLayout) -> int:
    """Blocks of one group, which has a share of the bytes."""
    count = int(num_bytes * share // layout.block_bytes)
    if count == 0:
        limit = f"one block takes {layout.block_bytes} bytes"
        raise InvalidArgument(
            "kv_memory_bytes", num_bytes, limit, f"give at least {int(layout.block_bytes / share) + 1}"
        )
    return count


def _split(config: EngineConfig, full: KVLayout, window: KVLayout, size: int, longest: int) -> tuple[int, int]:
    """Blocks of each group. Short sequences want most memory in the window's group, long ones in the other.

    This share serves at least half as many sequences as the best share for their length would, whatever their length.
    Source: docs/adr/0006-memory-of-mixed-layers.md.
    """
    held = min(size, longest) * window.bytes_per_token
    low, high = (
        held / (held + longest * full.bytes_per_token),
        held / (held + min(size, longest) * full.bytes_per_token),
    )
    share = high / (1 + high - low)
    if config.cache.num_blocks is not None:
        ratio = share / (1 - share) * full.block_bytes / window.block_bytes
        return config.cache.num_blocks, max(1, min(config.cache.num_blocks, round(config.cache.num_blocks * ratio)))
    memory = config.cache.kv_memory_bytes
    return _fitting(memory, 1 - share, full), _fitting(memory, share, window)
