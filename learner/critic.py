"""The critic: a language model with a value head, and the optimizer steps that fit it to the returns.

_N: response tokens of the step, flattened; _M: trained tokens of a micro-batch; _H: hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import huber_loss, mse_loss
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from headway.core.config import Config
from headway.core.errors import DataError
from headway.learner.advantages import gae, vtrace_targets
from headway.learner.batching import Group, MicroBatch, pack
from headway.learner.checkpoint import writing
from headway.learner.head_model import HeadModel
from headway.learner.reward_model import ABOUT_FILE, HEAD_FILE, read_about
from headway.learner.rewards import RewardState
from headway.learner.step import StepBatch, prepare_batch
from headway.learner.trainer import NonFiniteStep

FILE = "critic.pt"
"""Its part of a checkpoint."""


class ValueModel(HeadModel):
    """A language model with a value head. Made from a plain model folder every value starts at exactly 0; made from a
    reward model's, values start at the score that it gives what is there so far, in the scale of its calibrated rewards.
    Raises `DataError` when the folder cannot be used."""

    def __init__(self, folder: Path, dtype: Literal["float32", "bfloat16"]) -> None:
        super().__init__(folder, dtype=dtype, head_name="value_head")
        if (folder / ABOUT_FILE).exists():
            self._take_over(folder)

    @torch.no_grad()
    def _take_over(self, folder: Path) -> None:
        calibration = read_about(folder)["calibration"] or {"mean": 0.0, "std": 1.0}
        head = load_file(folder / HEAD_FILE)
        self.head.weight.copy_(head["weight"] / calibration["std"])
        self.head.bias.copy_((head["bias"] - calibration["mean"]) / calibration["std"])

    def values(self, batch: MicroBatch) -> Tensor:
        """[M] float32, on the model's device: the reward to go expected before each trained token, from the hidden
        state that predicts it."""
        return self.outputs(batch)


def value_loss(
    values_M: Tensor,
    old_values_M: Tensor,
    returns_M: Tensor,
    token_weights_M: Tensor,
    *,
    clip: float | None,
    loss: Literal["squared", "huber"],
) -> Tensor:
    """sum(weight * max(l(V - R), l(clip(V, V_old - clip, V_old + clip) - R))), [] float32; without `clip` only the
    first of the two.

    l is 1/2 e^2 (`squared`), or |e| - 1/2 beyond |e| = 1 (`huber`). The clip is one of
    the implementation choices of PPO that arXiv 2005.12729 studies: a value that has moved further than `clip` from
    where it was at scoring, towards the return, gets no gradient.

    All arguments are [M]; only `values_M` carries gradient. Where the weight is 0 anything may stand, NaN included:
    it is not selected. A NaN elsewhere makes the loss NaN.
    """
    shapes = {tuple(t.shape) for t in (values_M, old_values_M, returns_M, token_weights_M)}
    if len(shapes) != 1 or values_M.dim() != 1:
        raise ValueError(f"value_loss needs one value per token, got shapes {sorted(shapes)}")
    counts_M = token_weights_M != 0
    values_M = values_M[counts_M].float()
    returns_M = returns_M[counts_M].detach()
    error_M = _error(values_M, returns_M, loss)
    if clip is not None:
        old_values_M = old_values_M[counts_M].detach()
        clipped_M = values_M.clamp(old_values_M - clip, old_values_M + clip)
        error_M = torch.maximum(error_M, _error(clipped_M, returns_M, loss))
    return (error_M * token_weights_M[counts_M]).sum()


def _error(values_M: Tensor, returns_M: Tensor, loss: Literal["squared", "huber"]) -> Tensor:
    if loss == "huber":
        return huber_loss(values_M, returns_M, reduction="none")
    return mse_loss(values_M, returns_M, reduction="none") / 2


def explained_variance(values: Tensor, returns: Tensor) -> float | None:
    """1 - Var(returns - values) / Var(returns), in float64: 1 for perfect values, 0 for those no better than a
    constant. None when the returns do not vary."""
    returns = returns.double()
    if returns.numel() == 0 or returns.max() == returns.min():
        return None
    residual = returns - values.double()
    return float(1 - residual.var(correction=0) / returns.var(correction=0))


def _flat(columns: pa.Table, name: str) -> Tensor:
    """[N] float32, a list column's values, one row after another."""
    return torch.from_numpy(columns[name].combine_chunks().flatten().to_numpy(zero_copy_only=False).copy())


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticStats:
    """What one optimizer step of the critic did."""

    version: int
    """Optimizer steps applied, this one included."""
    value_loss: float
    """Mean over trained tokens, each times its lag factor."""
    explained_variance: float | None
    """Of the values at scoring against the returns; None when the returns do not vary."""
    grad_norm: float
    """Global norm before clipping."""
    value_mean: float | None
    """Of the values at scoring, over trained tokens; None without any."""


class CriticTrainer:
    """The critic with its AdamW (constant learning rate, no weight decay). Raises `DataError` when the model folder
    cannot be used."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config
        self.model = ValueModel(folder, config.model.dtype)
        self.version = 0
        self.rewards = RewardState.start(config.algorithm)
        self.optimizer = torch.optim.AdamW(
            self.model.masters.values(), lr=config.critic.learning_rate, weight_decay=0.0, fused=True
        )

    @torch.no_grad()
    def values(self, groups: Sequence[Group]) -> np.ndarray:
        """[N] float32, the value before every response token that the policy sampled, group after group; 0.0
        elsewhere."""
        mask_N = np.concatenate([group.loss_mask for group in groups])
        values_N = np.zeros(len(mask_N), dtype=np.float32)
        for batch in self._pack(groups, mask_N):
            values_N[batch.token_index.numpy()] = self.model.values(batch).cpu().numpy()
        return values_N

    def train(
        self, tables: Sequence[pa.Table], version: int, columns: pa.Table | None = None
    ) -> list[CriticStats]:
        """`steps_per_batch` optimizer steps on `groups_per_batch` groups, one table each, over all tokens that are in
        the loss, those of groups without signal included: they say what to expect too. Tokens that the lag policy
        withholds are left out here as well, and its factors weigh down the errors of the values too.

        `version` is the critic's version before the batch, which is the learner's: they step together. `columns`: what the
        learner appends to the batch's rows, for `critic.targets=vtrace`. Raises
        `SchemaError` for tables that do not hold a group each or lack a column that the algorithm needs,
        `LagOutOfBounds`, `NonFiniteStep` (weights and optimizer are then as before the step), and `ValueError` for a
        wrong version or number of groups.
        """
        if version != self.version:
            raise ValueError(f"asked to train from version {version}, but the critic is at {self.version}")
        steps = prepare_batch(tables, self.config, self.rewards, version)
        targets = self._targets(steps, columns)
        return [self._step(step, returns_N) for step, returns_N in zip(steps, targets, strict=True)]

    def _targets(self, steps: Sequence[StepBatch], columns: pa.Table | None) -> list[Tensor]:
        """[N] float32 for each step, what its values are fitted to."""
        algorithm, critic = self.config.algorithm, self.config.critic
        lam = algorithm.gae_lambda if critic.target_lambda is None else critic.target_lambda
        targets: list[Tensor] = []
        log_policy_N = None if columns is None else _flat(columns, "proximal_logprobs")
        start = 0
        for step in steps:
            assert step.values_N is not None and step.returns_N is not None  # of algorithm.advantage=gae
            tokens = len(step.returns_N)
            counted_N = torch.from_numpy(np.concatenate([group.loss_mask for group in step.groups]))
            counted_N &= ~step.rewards_B.isnan()[step.response_N]
            common = (step.token_rewards_N, step.values_N)
            if critic.targets == "vtrace":
                if log_policy_N is None:
                    raise ValueError("critic.targets=vtrace needs the learner's columns")
                # Where the learner did not look, nothing has moved that could be weighed.
                log_ratios_N = log_policy_N[start : start + tokens] - step.behavior_logprobs_N
                returns_N = vtrace_targets(
                    *common,
                    log_ratios_N.nan_to_num(nan=0.0),
                    counted_N,
                    step.lengths_B,
                    gamma=algorithm.gamma,
                    lam=lam,
                    cap=critic.vtrace_cap,
                )
            elif critic.target_lambda is not None:
                _, returns_N = gae(*common, counted_N, step.lengths_B, gamma=algorithm.gamma, gae_lambda=lam)
            else:
                returns_N = step.returns_N
            targets.append(returns_N)
            start += tokens
        return targets

    def _pack(self, groups: Sequence[Group], trained_N: np.ndarray) -> list[MicroBatch]:
        return pack(groups, trained_N, microbatch_tokens=self.config.critic.microbatch_tokens)

    def _step(self, step: StepBatch, returns_N: Tensor) -> CriticStats:
        critic = self.config.critic
        tokens_N = torch.from_numpy(step.in_loss_N)
        old_values_N = step.values_N
        assert old_values_N is not None  # of algorithm.advantage=gae
        num_tokens = int(tokens_N.sum())
        total = 0.0
        self.model.zero_grad()
        for batch in self._pack(step.groups, step.in_loss_N):
            tokens_M = batch.token_index
            values_M = self.model.values(batch)
            loss = value_loss(
                values_M,
                old_values_N[tokens_M].to(values_M.device),
                returns_N[tokens_M].to(values_M.device),
                (step.lag_factors_N[tokens_M] / num_tokens).to(values_M.device),
                clip=critic.value_clip,
                loss=critic.value_loss,
            )
            if not torch.isfinite(loss):
                self._refuse("the value loss", step, tokens_M)
            loss.backward()
            total += loss.item()
        norm = self._optimize(step)
        old_values, returns = old_values_N[tokens_N], returns_N[tokens_N]
        return CriticStats(
            version=self.version,
            value_loss=total,
            explained_variance=explained_variance(old_values, returns),
            grad_norm=norm,
            value_mean=float(old_values.double().mean()) if num_tokens else None,
        )

    def _optimize(self, step: StepBatch) -> float:
        """Applies the gradients and returns their norm before clipping."""
        parameters = [p for p in self.model.masters.values() if p.grad is not None]
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        if not torch.isfinite(norm):
            self._refuse("the gradient of the values", step, torch.from_numpy(np.flatnonzero(step.in_loss_N)))
        if norm > self.config.critic.max_grad_norm:
            clip_grads_with_norm_(parameters, self.config.critic.max_grad_norm, norm)
        self.optimizer.step()
        self.model.zero_grad()
        self.model.refresh()
        self.version += 1
        return float(norm)

    def _refuse(self, what: str, step: StepBatch, tokens: Tensor) -> NoReturn:
        self.model.zero_grad()
        raise NonFiniteStep(what, self.version, step.rollout_ids(tokens))

    def save(self, folder: Path) -> None:
        """Writes the critic's part of a checkpoint into an existing folder. Raises `CheckpointFailed`."""
        state = {
            "version": self.version,
            "rewards": self.rewards.state(),
            "masters": {name: master.detach() for name, master in self.model.masters.items()},
            "optimizer": self.optimizer.state_dict(),
        }
        with writing(folder):
            torch.save(state, folder / FILE)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Takes up where `save` left off, bit for bit. Raises `DataError` when `folder` holds another model."""
        state = torch.load(folder / FILE, weights_only=True, map_location="cpu")
        masters = self.model.masters
        shapes = {name: master.shape for name, master in masters.items()}
        if shapes != {name: master.shape for name, master in state["masters"].items()}:
            raise DataError(f"checkpoint {folder} holds another critic than {self.model.folder} (model.path)")
        for name, master in masters.items():
            master.copy_(state["masters"][name])
        self.model.refresh()
        self.optimizer.load_state_dict(state["optimizer"])
        self.rewards.restore(state["rewards"])
        self.version = state["version"]
