"""One optimizer step after another: advantages, packed forward and backward passes, AdamW. _N: response tokens of
the step, flattened; _B: its responses; _M: trained tokens of a micro-batch."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from headway.core.config import Algorithm, Config
from headway.core.errors import DataError, HeadwayError
from headway.learner.advantages import group_advantages
from headway.learner.batching import Group, MicroBatch, pack, unpack
from headway.learner.checkpoint import writing
from headway.learner.corrections import (
    importance_statistics,
    importance_weights,
    is_missing,
    k3,
    truncated_importance_weights,
)
from headway.learner.losses import policy_loss, token_weights
from headway.learner.model import PolicyModel


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


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStats:
    """What one optimizer step did. Values over trained tokens are None when nothing was trained."""

    version: int
    """Optimizer steps applied, this one included."""
    loss: float
    grad_norm: float
    """Global norm before clipping."""
    learning_rate: float
    reward_mean: float | None
    """Over scored responses; None without any."""
    rewards: list[float]
    """Of scored responses."""
    num_tokens: int
    """Tokens that went through the forward and backward pass."""
    response_lengths: list[int]
    """Of all responses, in tokens."""
    truncated_fraction: float
    """Of all responses."""
    no_signal_groups: int
    """Groups whose advantages are all 0."""
    num_unscored: int
    ess_fraction: float | None
    importance_weights: np.ndarray
    """[num_tokens] float32, uncapped."""
    behavior_kl: float | None
    """k3 of KL(behavior || proximal), nats per token."""
    engine_learner_kl: float | None
    """The same against the current policy, over tokens that it sampled itself (version lag 0): what is left is the
    difference in arithmetic. None when no such token was trained."""
    clipped_fraction: float | None
    """Share of trained tokens whose gradient the clip cut off."""
    masked_fraction: dict[str, float]
    """Share of sampled tokens that were not trained, by reason: `unscored`, `no_signal`, `missing_logprob`."""
    entropy: float | None
    """Mean over trained tokens (nats)."""
    seconds: dict[str, float]
    """By stage: `unpack`, `forward_backward`, `optimizer`. Work for the whole batch counts for its first step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """The groups of one optimizer step as flat arrays over their tokens."""

    groups: tuple[Group, ...]
    advantages_N: Tensor
    """float32."""
    token_weights_N: Tensor
    """float32: what `losses.token_weights` gives a token of this response."""
    trained_N: np.ndarray
    """bool: in the loss, and in a group with signal."""
    behavior_logprobs_N: Tensor
    versions_N: Tensor
    no_signal_groups: int
    masked_fraction: dict[str, float]


def prepare(groups: Sequence[Group], algorithm: Algorithm) -> StepBatch:
    """Advantages, masks and denominators of one optimizer step; nothing here needs the model.

    Denominators count every sampled token that is scored and has a behavior log-probability (where the correction
    needs one). Tokens of a group without signal (all advantages 0) are among them, though they need no forward
    pass: leaving them out would raise the step size whenever a prompt is solved or hopeless.
    """
    advantages = [
        group_advantages(
            torch.from_numpy(group.rewards),
            torch.from_numpy(group.scored),
            normalize=algorithm.advantage == "group",
        )
        for group in groups
    ]
    has_signal = [bool((values != 0).any()) for values in advantages]
    lengths_B = torch.from_numpy(np.concatenate([group.lengths for group in groups]))
    tokens_of_group = [len(group.response_ids) for group in groups]
    sampled_N = np.concatenate([group.loss_mask for group in groups])
    scored_N = np.repeat(np.concatenate([group.scored for group in groups]), lengths_B.numpy())
    signal_N = np.repeat(np.array(has_signal), tokens_of_group)
    behavior_logprobs_N = torch.from_numpy(np.concatenate([group.behavior_logprobs for group in groups]))
    missing_N = np.zeros_like(sampled_N)
    if algorithm.correction != "none":
        missing_N = is_missing(behavior_logprobs_N).numpy()
    in_loss_N = sampled_N & scored_N & ~missing_N
    response_N = np.repeat(np.arange(len(lengths_B)), lengths_B.numpy())
    loss_lengths_B = torch.from_numpy(np.bincount(response_N[in_loss_N], minlength=len(lengths_B)))
    weights_B = token_weights(loss_lengths_B, aggregation=algorithm.aggregation)
    num_sampled = max(1, int(sampled_N.sum()))
    return StepBatch(
        groups=tuple(groups),
        advantages_N=torch.cat(advantages).repeat_interleave(lengths_B),
        token_weights_N=weights_B.repeat_interleave(lengths_B),
        trained_N=in_loss_N & signal_N,
        behavior_logprobs_N=behavior_logprobs_N,
        versions_N=torch.from_numpy(np.concatenate([group.versions for group in groups])),
        no_signal_groups=has_signal.count(False),
        masked_fraction={
            "unscored": float((sampled_N & ~scored_N).sum() / num_sampled),
            "no_signal": float((in_loss_N & ~signal_N).sum() / num_sampled),
            "missing_logprob": float((sampled_N & scored_N & missing_N).sum() / num_sampled),
        },
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

    def _logprobs(self, batch: MicroBatch):
        return self.model.logprobs(batch, temperature=self.config.sampling.temperature)

    def _step(
        self,
        step: StepBatch,
        batches: Sequence[MicroBatch],
        proximal_N: Tensor | None,
        seconds: dict[str, float],
    ) -> StepStats:
        started = time.perf_counter()
        algorithm = self.config.algorithm
        self.model.zero_grad()
        loss, num_clipped, entropy_sum = 0.0, 0, 0.0
        log_corrections, lag_0_k3 = [torch.zeros(0)], [torch.zeros(0)]
        for batch in batches:
            token_index_M = batch.token_index
            result = self._logprobs(batch)
            logprobs_M = result.logprobs
            current_M = logprobs_M.detach().cpu()
            if not torch.isfinite(current_M).all():
                self._refuse("a log-probability", step, token_index_M[~torch.isfinite(current_M)])
            proximal_M = current_M if proximal_N is None else proximal_N[token_index_M]
            behavior_M = step.behavior_logprobs_N[token_index_M]
            log_correction_M = proximal_M - behavior_M
            importance_M = torch.ones_like(proximal_M)
            if algorithm.correction == "tis_token":
                importance_M = truncated_importance_weights(log_correction_M, algorithm.correction_cap)
            device = logprobs_M.device
            policy = policy_loss(
                logprobs_M,
                proximal_M.to(device),
                step.advantages_N[token_index_M].to(device),
                importance_M.to(device),
                step.token_weights_N[token_index_M].to(device),
                torch.ones_like(logprobs_M, dtype=torch.bool),
                clip_low=algorithm.clip_low,
                clip_high=algorithm.clip_high,
            )
            if not torch.isfinite(policy.loss):
                self._refuse("the loss", step, token_index_M)
            policy.loss.backward()
            loss += policy.loss.item()
            num_clipped += int(policy.num_clipped)
            entropy_sum += float(result.entropy.sum())
            known_M = ~is_missing(behavior_M)
            log_corrections.append(log_correction_M[known_M])
            own_M = known_M & (step.versions_N[token_index_M] == self.version)
            lag_0_k3.append(k3(current_M - behavior_M)[own_M])
        after_backward = time.perf_counter()
        learning_rate = self.learning_rate()
        grad_norm = self._optimize(step, learning_rate)
        log_correction_N = torch.cat(log_corrections)
        lag_0_k3_N = torch.cat(lag_0_k3)
        importance = importance_statistics(log_correction_N)
        rewards = np.concatenate([group.rewards[group.scored] for group in step.groups])
        truncated = np.concatenate([group.truncated for group in step.groups])
        num_tokens = int(step.trained_N.sum())
        return StepStats(
            version=self.version,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            reward_mean=float(rewards.mean(dtype=np.float64)) if len(rewards) else None,
            rewards=rewards.tolist(),
            num_tokens=num_tokens,
            response_lengths=np.concatenate([group.lengths for group in step.groups]).tolist(),
            truncated_fraction=float(truncated.mean()),
            no_signal_groups=step.no_signal_groups,
            num_unscored=len(truncated) - len(rewards),
            ess_fraction=importance.ess_fraction if importance else None,
            importance_weights=importance_weights(log_correction_N).numpy(),
            behavior_kl=importance.k3 if importance else None,
            engine_learner_kl=float(lag_0_k3_N.mean()) if len(lag_0_k3_N) else None,
            clipped_fraction=num_clipped / num_tokens if num_tokens else None,
            masked_fraction=step.masked_fraction,
            entropy=entropy_sum / num_tokens if num_tokens else None,
            seconds={
                "unpack": seconds["unpack"],
                "forward_backward": seconds["forward_backward"] + after_backward - started,
                "optimizer": time.perf_counter() - after_backward,
            },
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

    def _refuse(self, what: str, step: StepBatch, tokens: Tensor) -> None:
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
            shutil.copytree(self.model.folder, model, ignore=shutil.ignore_patterns(*WEIGHT_FILES))
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


WEIGHT_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.gguf",
    "*.pt",
    "*.pth",
)
"""What a model folder may hold beside configuration and tokenizer; not copied into checkpoints."""
