"""One optimizer step after another: packed forward and backward passes, AdamW. _N: response tokens of the step,
flattened; _M: trained tokens of a micro-batch."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from headway.core.config import Config
from headway.core.errors import DataError, HeadwayError
from headway.learner.batching import MicroBatch, pack, unpack
from headway.learner.checkpoint import writing
from headway.learner.corrections import truncated_importance_weights
from headway.learner.logprobs import TokenLogprobs
from headway.learner.losses import policy_loss
from headway.learner.model import PolicyModel
from headway.learner.stats import StepStats, Tally
from headway.learner.step import StepBatch, prepare

TEXT_SUFFIXES = (".json", ".jinja", ".txt", ".model")
"""Configuration and tokenizer files of a model folder, which go into every checkpoint beside the weights."""


class NonFiniteStep(HeadwayError):
    """A trained token's log-probability, the loss, or the gradient is NaN or infinite. The weights and the
    optimizer are as they were before the step."""

    def __init__(self, what: str, version: int, rollout_ids: Sequence[str]) -> None:
        super().__init__(what, version, tuple(rollout_ids))
        self.what, self.version, self.rollout_ids = what, version, tuple(rollout_ids)

    def __str__(self) -> str:
        return (
            f"{self.what} is not finite at version {self.version}, in rollouts {', '.join(self.rollout_ids)}"
        )


class Trainer:
    """The policy with its optimizer. Raises `DataError` when the model folder cannot be used."""

    def __init__(self, config: Config, model_folder: Path) -> None:
        self.config = config
        self.model = PolicyModel(model_folder, dtype=config.model.dtype)
        self.version = 0
        matrices = [p for p in self.model.masters.values() if p.dim() > 1]
        others = [p for p in self.model.masters.values() if p.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.learner.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=config.learner.learning_rate,
            betas=config.learner.adam_betas,
            fused=True,
        )

    def train(self, tables: Sequence[pa.Table], version: int) -> list[StepStats]:
        """`steps_per_batch` optimizer steps on `groups_per_batch` groups, one table each.

        `version` is the learner's version before the batch. Raises `SchemaError` for tables that do not hold a
        group each, `NonFiniteStep`, and `ValueError` for a wrong version or number of groups.
        """
        if version != self.version:
            raise ValueError(f"asked to train from version {version}, but the learner is at {self.version}")
        if len(tables) != self.config.groups_per_batch:
            raise ValueError(f"a batch is {self.config.groups_per_batch} groups, got {len(tables)}")
        started = time.perf_counter()
        per_step = self.config.learner.groups_per_step
        groups = [unpack(table) for table in tables]
        steps = [
            prepare(groups[at : at + per_step], self.config.algorithm)
            for at in range(0, len(groups), per_step)
        ]
        batches = [self._pack(step) for step in steps]
        unpacked = time.perf_counter()
        # In the first step the proximal policy is the current one; for later ones it has to be kept.
        proximal = [None, *(self._proximal(*pair) for pair in zip(steps[1:], batches[1:], strict=True))]
        seconds = {"unpack": unpacked - started, "forward_backward": time.perf_counter() - unpacked}
        stats = []
        for step, step_batches, proximal_N in zip(steps, batches, proximal, strict=True):
            stats.append(self._step(step, step_batches, proximal_N, seconds))
            seconds = {"unpack": 0.0, "forward_backward": 0.0}
        return stats

    def _pack(self, step: StepBatch) -> list[MicroBatch]:
        return pack(step.groups, step.trained_N, microbatch_tokens=self.config.learner.microbatch_tokens)

    @torch.no_grad()
    def _proximal(self, step: StepBatch, batches: Sequence[MicroBatch]) -> Tensor:
        """[N] float32 log-probabilities under the current weights; NaN where nothing is trained."""
        proximal_N = torch.full(step.advantages_N.shape, float("nan"))
        for batch in batches:
            proximal_N[batch.token_index] = self._logprobs(batch).logprobs.cpu()
        return proximal_N

    def _logprobs(self, batch: MicroBatch) -> TokenLogprobs:
        return self.model.logprobs(batch, temperature=self.config.sampling.temperature)

    def _step(
        self,
        step: StepBatch,
        batches: Sequence[MicroBatch],
        proximal_N: Tensor | None,
        seconds: dict[str, float],
    ) -> StepStats:
        started = time.perf_counter()
        tally = Tally()
        self.model.zero_grad()
        for batch in batches:
            self._accumulate(step, batch, proximal_N, tally)
        after_backward = time.perf_counter()
        learning_rate = self.learning_rate()
        grad_norm = self._optimize(step, learning_rate)
        return tally.stats(
            step.groups,
            version=self.version,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            no_signal_groups=step.no_signal_groups,
            masked_fraction=step.masked_fraction,
            seconds={
                "unpack": seconds["unpack"],
                "forward_backward": seconds["forward_backward"] + after_backward - started,
                "optimizer": time.perf_counter() - after_backward,
            },
        )

    def _accumulate(
        self, step: StepBatch, batch: MicroBatch, proximal_N: Tensor | None, tally: Tally
    ) -> None:
        """Forward and backward pass of one micro-batch."""
        algorithm = self.config.algorithm
        tokens_M = batch.token_index
        result = self._logprobs(batch)
        current_M = result.logprobs.detach().cpu()
        if not (finite_M := torch.isfinite(current_M)).all():
            self._refuse("a log-probability", step, tokens_M[~finite_M])
        proximal_M = current_M if proximal_N is None else proximal_N[tokens_M]
        behavior_M = step.behavior_logprobs_N[tokens_M]
        importance_M = torch.ones_like(proximal_M)
        if algorithm.correction == "tis_token":
            importance_M = truncated_importance_weights(proximal_M - behavior_M, algorithm.correction_cap)
        device = result.logprobs.device
        policy = policy_loss(
            result.logprobs,
            proximal_M.to(device),
            step.advantages_N[tokens_M].to(device),
            importance_M.to(device),
            step.token_weights_N[tokens_M].to(device),
            torch.ones_like(result.logprobs, dtype=torch.bool),
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
        )
        if not torch.isfinite(policy.loss):
            self._refuse("the loss", step, tokens_M)
        policy.loss.backward()
        tally.add(
            policy,
            result.entropy,
            current_M=current_M,
            proximal_M=proximal_M,
            behavior_M=behavior_M,
            own_M=step.versions_N[tokens_M] == self.version,
        )

    def learning_rate(self) -> float:
        """Of the next step: linear warm-up over `warmup_steps`, then constant."""
        warmup = self.config.learner.warmup_steps
        return self.config.learner.learning_rate * min(1.0, (self.version + 1) / max(1, warmup))

    def _optimize(self, step: StepBatch, learning_rate: float) -> float:
        """Applies the gradients and returns their norm before clipping. A step whose groups all lack signal has
        gradient zero, and is still a step: the moments decay."""
        parameters = list(self.model.masters.values())
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        if not torch.isfinite(norm):
            self._refuse("the gradient", step, torch.from_numpy(np.flatnonzero(step.trained_N)))
        if norm > self.config.learner.max_grad_norm:
            clip_grads_with_norm_(parameters, self.config.learner.max_grad_norm, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.model.zero_grad()
        self.model.refresh()
        self.version += 1
        return float(norm)

    def _refuse(self, what: str, step: StepBatch, tokens: Tensor) -> NoReturn:
        self.model.zero_grad()
        ends = np.cumsum(np.concatenate([group.lengths for group in step.groups]))
        rollout_ids = [rollout_id for group in step.groups for rollout_id in group.rollout_ids]
        rows = np.unique(np.searchsorted(ends, tokens.cpu().numpy(), side="right"))
        raise NonFiniteStep(what, self.version, [rollout_ids[row] for row in rows])

    def save(self, folder: Path) -> None:
        """Writes the learner's part of a checkpoint into `folder`: `model/`, a Hugging Face folder with the float32
        masters, and `learner.pt`. Raises `CheckpointFailed`."""
        with writing(folder):
            model = folder / "model"
            model.mkdir()
            for file in self.model.folder.iterdir():
                if file.suffix in TEXT_SUFFIXES and not file.name.endswith(".index.json"):
                    shutil.copyfile(file, model / file.name)
            config = json.loads((model / "config.json").read_text(encoding="utf-8"))
            config.pop("torch_dtype", None)
            config["dtype"] = "float32"
            (model / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
            masters = {name: p.detach().contiguous() for name, p in self.model.masters.items()}
            save_file(masters, model / "model.safetensors", metadata={"format": "pt"})
            state = {
                "version": self.version,
                "optimizer": self.optimizer.state_dict(),
                "rng": torch.get_rng_state(),
                "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            }
            torch.save(state, folder / "learner.pt")

    def load(self, folder: Path) -> None:
        """Takes up where `save` left off, bit for bit. Raises `DataError` when `folder` holds another model."""
        masters = load_file(folder / "model" / "model.safetensors")
        shapes = {name: tuple(p.shape) for name, p in self.model.masters.items()}
        if shapes != {name: tuple(tensor.shape) for name, tensor in masters.items()}:
            raise DataError(f"checkpoint {folder} holds another model than {self.model.folder} (model.path)")
        state = torch.load(folder / "learner.pt", weights_only=True, map_location="cpu")
        with torch.no_grad():
            for name, parameter in self.model.masters.items():
                parameter.copy_(masters[name])
        self.model.refresh()
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        if torch.cuda.is_available() and state["cuda_rng"]:
            torch.cuda.set_rng_state_all(state["cuda_rng"])
        self.version = state["version"]
