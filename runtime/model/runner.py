"""Executes the rows of a plan on one rank. Not: imports and sends, which are the engine's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from kvferry.kernels.sampling import Largest
from kvferry.runtime.kv.storage import RankStorage
from kvferry.runtime.model.batch import Batch, Batches
from kvferry.runtime.model.parallel import TensorParallel
from kvferry.runtime.model.sampler import sample
from kvferry.runtime.step import SampleInput, StepPlan, StepResult


class Model(Protocol):
    """The part of `decoder.Decoder` that a step needs."""

    def forward(self, batches: Sequence[Batch], storage: RankStorage) -> tuple[torch.Tensor, Largest | None]: ...


class Runner:
    """One rank's model with its KV memory. All ranks of a group execute the same plans in the same order."""

    def __init__(self, model: Model, storage: RankStorage, parallel: TensorParallel) -> None:
        self._model = model
        self._storage = storage
        self._parallel = parallel
        self._batches = Batches(storage)

    def execute(self, plan: StepPlan, samples: Sequence[SampleInput]) -> StepResult:
        """Runs the forward pass; on rank 0 draws `num_samples` tokens per row (`samples` in the rows' order).

        Other ranks pass no samples and get an empty result. Mutates the KV storage.
        Raises `DeviceError` if the group breaks apart or the model's output is not finite.
        """
        if not plan.rows:
            return StepResult([])
        batches = self._batches.make(plan.rows)
        logits, largest = self._model.forward(batches, self._storage)
        if self._parallel.rank or not samples:
            return StepResult([])
        return StepResult(sample(logits, samples, largest))
