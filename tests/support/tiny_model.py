"""A tiny random Llama with a real byte-level BPE tokenizer, as a Hugging Face folder. Its logits are far from flat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from kvferry.runtime.model.families import from_hf_config, hf_source
from kvferry.runtime.model.parts import part_shapes

VOCAB = 384
EOS = 0
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}
SPREAD = 0.3
"""Of the weights; larger means more peaked logits."""
CORPUS = (
    "The ferry leaves the harbour at seven in the morning, and the evening ferry waits for the last travellers. "
    "Blocks are carried from one quay to the other; whatever is lost on the way is built again. "
    "Die Fähre fährt über den Fluß. 渡轮早上七点离开港口。 Паром уходит в семь. 🚢🌊⚓ "
)


def save_tiny_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Writes config (with `changes`), weights and tokenizer. Returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    generator = torch.Generator().manual_seed(seed)
    spec = from_hf_config(CONFIG | changes)
    shapes = {hf_source(spec, part).name: shape for part, shape in part_shapes(spec).items()}
    tensors = {
        name: torch.rand(shape, generator=generator) + 0.5
        if "norm" in name
        else torch.randn(shape, generator=generator) * SPREAD
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([CORPUS] * 4, trainer)
    assert raw.get_vocab_size() == VOCAB, "the corpus is too small for the vocabulary"
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return folder
