"""From logits to tokens. A row's token depends on its own logits, parameters, history, seed, index and position only.

    raw logits ──▶ log-probabilities that are reported
        │ banned ids, logit bias, repetition penalty, presence and frequency penalties
        ├──▶ greedy: argmax
        │ temperature, min_p, top_k, top_p
        └──▶ the largest of logit + Gumbel noise (Philox: seed, index, position, token), which draws by probability

Why not one uniform draw through the cumulated probabilities: there each of the many borders between tokens moves when
logits are rounded otherwise (another batch, another worker), and the token changes about a hundred times as often.

Batched operations are only those whose result for a row is the same, bit for bit, whatever rows stand beside it.
Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from kvferry.kernels.cpu import sampling as cpu
from kvferry.kernels.cpu.available import kernels_for
from kvferry.kernels.sampling import Largest, argmax
from kvferry.runtime.errors import DeviceError
from kvferry.runtime.model.philox import Draw, gumbel
from kvferry.runtime.request import Logprob, SamplingParams
from kvferry.runtime.step import SampledToken, SampleInput

_RUN = 64
"""Tokens, and runs of tokens, that compete at a time."""
_LEAST = float(np.finfo(np.float32).tiny)
"""What divides logits is at least this: smaller numbers, which are legal, would be 0 in float32."""


def sample(
    logits_RV: torch.Tensor, inputs: Sequence[SampleInput], largest: Largest | None = None
) -> list[SampledToken]:
    """Draws one token per row. logits_RV: floating point, one row per input; not changed. largest: if it is known.

    Raises `DeviceError` if a row has no largest number (the model computed NaN or infinity).
    """
    values, token_ids = largest or argmax(logits_RV)
    if broken := [r for r, value in enumerate(values) if not math.isfinite(value)]:
        raise DeviceError(f"logits are not finite in rows {broken}")
    others = [r for r, one in enumerate(inputs) if not one.plain]
    if not others:
        return [SampledToken(token) for token in token_ids]
    return _sample_others(logits_RV, inputs, others, token_ids)


@torch.inference_mode()
def _sample_others(
    logits_RV: torch.Tensor, inputs: Sequence[SampleInput], others: list[int], token_ids: list[int]
) -> list[SampledToken]:
    """token_ids: of the largest logits, which will do for rows that are not among the others."""
    edited = {r: None for r in others if _edits(inputs[r])}
    if edited:
        _choose_edited(logits_RV, inputs, list(edited), token_ids)
    drawn = [r for r in others if inputs[r].params.temperature > 0.0 and r not in edited]
    for r, token in zip(drawn, _draw(logits_RV, drawn, [inputs[r] for r in drawn]), strict=True):
        token_ids[r] = token
    sampled = [SampledToken(token) for token in token_ids]
    _add_logprobs(logits_RV, inputs, [r for r in others if inputs[r].params.logprobs is not None], sampled)
    return sampled


def _choose_edited(
    logits_RV: torch.Tensor, inputs: Sequence[SampleInput], edited: list[int], token_ids: list[int]
) -> None:
    """Replaces the ids of rows whose logits are edited first."""
    logits = logits_RV[edited].float()  # a copy
    for row, r in zip(logits, edited, strict=True):
        _edit(row, inputs[r])
    _, chosen = argmax(logits)
    drawn = [i for i, r in enumerate(edited) if inputs[r].params.temperature > 0.0]
    for i, token in zip(drawn, _draw(logits, drawn, [inputs[edited[i]] for i in drawn]), strict=True):
        chosen[i] = token
    for r, token in zip(edited, chosen, strict=True):
        token_ids[r] = token


def _edits(one: SampleInput) -> bool:
    p = one.params
    return bool(one.banned_token_ids or p.logit_bias or p.penalises)


def _edit(logits_V: torch.Tensor, one: SampleInput) -> None:
    """Bans, bias and penalties. Mutates `logits_V`."""
    p, device = one.params, logits_V.device
    if 0 < len(one.banned_token_ids) < len(logits_V):  # some token must be drawn: a ban on all bans none
        logits_V[torch.tensor(one.banned_token_ids, device=device)] = float("-inf")
    if p.logit_bias:
        logits_V[torch.tensor(list(p.logit_bias), device=device)] += torch.tensor(
            list(p.logit_bias.values()), dtype=logits_V.dtype, device=device
        )
    if p.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique([*one.prompt_token_ids, *one.output_token_ids]).astype(np.int64)).to(device)
        values, penalty = logits_V[seen], max(p.repetition_penalty, _LEAST)
        penalised = torch.where(values > 0, values / penalty, values * penalty)
        logits_V[seen] = penalised.clamp_(max=torch.finfo(logits_V.dtype).max)
    if one.output_token_ids and (p.presence_penalty != 0.0 or p.frequency_penalty != 0.0):
        tokens, counts = np.unique(np.asarray(one.output_token_ids, dtype=np.int64), return_counts=True)
        less = (p.presence_penalty + p.frequency_penalty * counts).astype(np.float32)
        logits_V[torch.from_numpy(tokens).to(device)] -= torch.from_numpy(less).to(device)


def _draw(logits_RV: torch.Tensor, rows: list[int], inputs: Sequence[SampleInput]) -> list[int]:
    """Filters each of these rows as its input asks, then draws."""
    if not rows:
        return []
    if logits_RV.is_contiguous() and (lib := kernels_for(logits_RV, 0)) is not None:
        return cpu.draw(lib, logits_RV, [_draw_row(row, one) for row, one in zip(rows, inputs, strict=True)])
    logits, device = logits_RV[rows].float(), logits_RV.device  # a copy
    temperatures = torch.tensor([[_temperature(one)] for one in inputs], dtype=torch.float32, device=device)
    # Tiny temperatures must not overflow: the largest logit is moved to 0 first, which changes no probability.
    logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(temperatures)
    for row, one in zip(logits, inputs, strict=True):
        _filter(row, one.params)
    return _race(logits, inputs)


def _temperature(one: SampleInput) -> float:
    return max(one.params.temperature, _LEAST)


def _draw_row(row: int, one: SampleInput) -> cpu.DrawRow:
    p = one.params
    return cpu.DrawRow(
        row, p.seed or 0, one.key.index, one.position, p.min_p, p.top_p, max(0, p.top_k), _temperature(one)
    )


def _race(scaled_RV: torch.Tensor, inputs: Sequence[SampleInput]) -> list[int]:
    """Draws by probability: the largest sum of logit and Gumbel noise wins. Mutates `scaled_RV`.

    Runs of tokens compete first, by the logarithms of their sums, then runs within the winner, then its tokens: the
    same distribution with two hundred draws of noise in place of one per token. Source: Gumbel 1954.
    """
    num_rows, vocab = scaled_RV.shape
    runs = -(-vocab // _RUN**2) * _RUN
    weights = np.zeros((num_rows, runs * _RUN), dtype=np.float32)
    weights[:, :vocab] = scaled_RV.exp_().cpu().numpy()
    leaves = weights.reshape(num_rows, runs, _RUN)
    sums = leaves.sum(axis=-1, dtype=np.float64)
    levels = [sums.reshape(num_rows, -1, _RUN).sum(axis=-1)[:, None], sums.reshape(num_rows, -1, _RUN), leaves]
    rows, winner = np.arange(num_rows), np.zeros(num_rows, dtype=np.int64)
    for depth, level in enumerate(levels):
        contenders = level[rows, winner]
        ids = winner[:, None] * contenders.shape[1] + np.arange(contenders.shape[1])
        with np.errstate(divide="ignore"):
            noisy = np.log(contenders, dtype=np.float64) + gumbel(_counters(inputs), ids, depth)
        winner = ids[rows, noisy.argmax(axis=1)]
    tokens: list[int] = winner.tolist()
    return tokens


def _counters(inputs: Sequence[SampleInput]) -> list[Draw]:
    return [Draw(one.params.seed or 0, one.key.index, one.position) for one in inputs]


def _filter(scaled_V: torch.Tensor, p: SamplingParams) -> None:
    """min_p, top_k, top_p in this order; dropped tokens get -inf. `scaled_V`: largest is 0. Mutates it."""
    if p.min_p > 0.0:
        scaled_V.masked_fill_(scaled_V < math.log(p.min_p), float("-inf"))
    if 0 < p.top_k < len(scaled_V):
        scaled_V.masked_fill_(scaled_V < scaled_V.topk(p.top_k, sorted=False).values.min(), float("-inf"))
    if p.top_p < 1.0:
        _keep_nucleus(scaled_V, p.top_p)


def _keep_nucleus(scaled_V: torch.Tensor, top_p: float) -> None:
    """Keeps the fewest most likely tokens that together reach `top_p`; of equal ones the lower ids. Mutates `scaled_V`.

    Source: Holtzman et al. 2020. Tokens below `(1 - top_p) / V` cannot belong to them (all of those together weigh less
    than the rest that may be dropped), so only the others are sorted; half of it leaves room for rounding.
    """
    probabilities = torch.softmax(scaled_V, dim=-1)
    candidates = probabilities[probabilities >= 0.5 * (1.0 - top_p) / len(scaled_V)]
    ordered = np.sort(candidates.cpu().numpy())[::-1]  # several times as fast as torch's sort
    count = min(int(np.cumsum(ordered, dtype=np.float64).searchsorted(top_p)) + 1, len(ordered))
    least = float(ordered[count - 1])
    spare = (probabilities == least).nonzero()[count - int((ordered > least).sum()) :, 0]
    scaled_V.masked_fill_(probabilities < least, float("-inf"))
    scaled_V[spare] = float("-inf")


def _add_logprobs(
    logits_RV: torch.Tensor, inputs: Sequence[SampleInput], wanted: list[int], sampled: list[SampledToken]
) -> None:
    if not wanted:
        return
    logprobs = torch.log_softmax(logits_RV[wanted].float(), dim=-1)
    for row, r in zip(logprobs, wanted, strict=True):
        top = row.topk(min(inputs[r].params.logprobs or 0, len(row)))
        alternatives = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        token = sampled[r].token_id
        sampled[r].logprob = Logprob(token, float(row[token]), alternatives)
