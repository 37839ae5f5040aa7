"""One optimizer step after another: packed forward and backward passes, then AdamW or a trust-region step.

_N: response tokens of the step, flattened; _M: trained tokens of a micro-batch; _B: responses of the step. Every rank
sees the whole batch and computes the same masks, advantages and denominators; it runs its share of the micro-batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from headway.core.config import Config
from headway.core.errors import HeadwayError
from headway.core.rollouts import SCHEMA
from headway.learner.advantages import min_variance
from headway.learner.batching import MicroBatch
from headway.learner.corrections import correct, ess_fraction, importance_weights
from headway.learner.kl import k3, kl_loss
from headway.learner.learner_state import load_learner, save_learner
from headway.learner.losses import policy_loss, token_weights
from headway.learner.model import PolicyModel
from headway.learner.passes import Passes
from headway.learner.rewards import RewardState
from headway.learner.sft import Demonstration, in_turn
from headway.learner.sft import accumulate as accumulate_demonstrations
from headway.learner.sharding import Ranks, alone
from headway.learner.stats import StepStats, Tally, Trained, step_stats
from headway.learner.step import StepBatch, prepare_batch

ESS_MEMORY = 0.9
"""Share of its last value that the running ESS of fresh tokens keeps at each step."""


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
    """The policy with its optimizer. `demonstrations`: for `algorithm.sft_coef`. Raises `DataError` when the model folder
    cannot be used."""

    def __init__(
        self,
        config: Config,
        model_folder: Path,
        ranks: Ranks = alone,
        demonstrations: Sequence[Demonstration] = (),
    ) -> None:
        self.config = config
        self.ranks = ranks
        learner = config.learner
        self.model = PolicyModel(
            model_folder,
            dtype=config.model.dtype,
            ranks=ranks,
            lora_rank=learner.lora_rank,
            lora_alpha=learner.lora_alpha,
            activation_checkpointing=learner.activation_checkpointing,
        )
        self.passes = Passes(config, self.model)
        self.version = 0
        self.rewards = RewardState.start(config.algorithm)
        self.fresh_ess = 1.0
        """Running ESS fraction of tokens that the current version sampled."""
        self.demonstrations = demonstrations
        self.optimizer = adamw(
            self.model.masters, learner.learning_rate, learner.weight_decay, learner.adam_betas
        )

    def train(self, tables: Sequence[pa.Table], version: int) -> tuple[list[StepStats], pa.Table]:
        """`steps_per_batch` optimizer steps on `groups_per_batch` groups, one table each. Returns their statistics,
        and the columns `proximal_logprobs` and `advantages` with a row per response in the order of the tables.

        `version` is the learner's version before the batch. Raises `SchemaError` for tables that do not hold a
        group each, `LagOutOfBounds` (nothing has changed then), `NonFiniteStep`, and `ValueError` for a wrong version
        or number of groups.
        """
        if version != self.version:
            raise ValueError(f"asked to train from version {version}, but the learner is at {self.version}")
        started = time.perf_counter()
        steps = prepare_batch(tables, self.config, self.rewards, version)
        unpacked = time.perf_counter()
        proximal = [self._proximal(step, later=number > 0) for number, step in enumerate(steps)]
        if self.config.algorithm.advantage == "min_variance":
            steps = [
                self._with_min_variance(step, proximal_N)
                for step, proximal_N in zip(steps, proximal, strict=True)
            ]
        seconds = {"unpack": unpacked - started, "forward_backward": time.perf_counter() - unpacked}
        stats: list[StepStats] = []
        columns: list[pa.Table] = []
        for step, proximal_N in zip(steps, proximal, strict=True):
            stopped = bool(stats) and stats[-1].stopped_by_kl
            waits = self.version < self.config.critic.warmup_steps
            if not (stopped or waits):
                step = self._without_rejected(step, proximal_N, later=bool(stats))
            step_stats, trained = self._step(step, proximal_N, seconds, stopped=stopped, waits=waits)
            stats.append(step_stats)
            columns.append(_columns(step, trained, proximal_N))
            seconds = {"unpack": 0.0, "forward_backward": 0.0}
        return stats, pa.concat_tables(columns)

    # ---- before the update: log-probabilities under the weights of the batch's start ------------------------

    def _proximal(self, step: StepBatch, *, later: bool) -> Tensor | None:
        """[N] float32 log-probabilities under the current weights, NaN where nothing is trained; None where the step
        finds them out by itself because they are those of its own forward pass, or has no use for them."""
        algorithm = self.config.algorithm
        ahead = algorithm.advantage == "min_variance" or algorithm.objective == "trpo"
        ahead |= not (later or algorithm.rejected_in_denominator)
        # With the behavior policy as the old one nothing compares with the proximal policy.
        needed = ahead or (later and algorithm.old_policy == "proximal")
        return self.passes.logprobs(step) if needed else None

    def _without_rejected(self, step: StepBatch, proximal_N: Tensor | None, *, later: bool) -> StepBatch:
        """The step with denominators that leave out the tokens which its own weights reject, if that is asked for: those of
        a later step are not those of the batch's start."""
        algorithm = self.config.algorithm
        if algorithm.rejected_in_denominator or not algorithm.correction:
            return step
        current_N = proximal_N if proximal_N is not None and not later else self.passes.logprobs(step)
        tokens = torch.from_numpy(np.flatnonzero(step.trained_N))
        anchor_N = current_N if proximal_N is None else proximal_N
        corrected = self.passes.correction(step, tokens, anchor_N, current_N)
        kept_N = torch.from_numpy(step.in_loss_N).clone()
        for mask in corrected.rejected.values():
            kept_N[tokens[mask]] = False
        lengths_B = torch.bincount(step.response_N[kept_N], minlength=len(step.lengths_B))
        weights_B = token_weights(
            lengths_B, aggregation=algorithm.aggregation, budget=self.config.sampling.max_new_tokens
        )
        return replace(step, token_weights_N=weights_B[step.response_N] * step.lag_factors_N)

    def _with_min_variance(self, step: StepBatch, proximal_N: Tensor | None) -> StepBatch:
        """Advantages over the baseline that weighs rewards by squared importance weight times squared gradient norm."""
        assert proximal_N is not None  # as `_proximal` makes it for this choice
        norms_B = self.passes.squared_gradient_norms(step)
        log_correction_N = (proximal_N - step.behavior_logprobs_N).nan_to_num(nan=0.0)  # not trained: norm 0
        num_responses = len(step.lengths_B)
        log_weights_B = torch.zeros(num_responses).index_add_(0, step.response_N, log_correction_N)
        weights_B = importance_weights(log_weights_B)
        advantages_B = torch.zeros(num_responses)
        for group in step.group_of_response_B.unique():
            rows = step.group_of_response_B == group
            rewards_G = step.rewards_B[rows]
            advantages_B[rows] = min_variance(
                rewards_G, ~torch.isnan(rewards_G), weights_B[rows], norms_B[rows]
            )
        # A reward that is NaN must go on showing.
        advantages_N = torch.where(step.advantages_N.isnan(), torch.nan, advantages_B[step.response_N])
        return replace(step, advantages_N=advantages_N)

    # ---- one step --------------------------------------------------------------------------------------------

    def _step(
        self,
        step: StepBatch,
        proximal_N: Tensor | None,
        seconds: dict[str, float],
        *,
        stopped: bool,
        waits: bool,
    ) -> tuple[StepStats, Trained]:
        """`stopped`: by the KL; `waits`: for the critic. Either leaves weights and moments as they are."""
        started = time.perf_counter()
        algorithm = self.config.algorithm
        if algorithm.old_policy == "behavior":
            proximal_N = None  # nothing compares with it: the weight is that of the current policy
        tally = Tally()
        self.model.zero_grad()
        if not (stopped or waits):
            for batch in self.passes.share(step):
                if batch is None:
                    self.model.idle_backward()
                else:
                    self._accumulate(step, batch, proximal_N, tally)
            if self.demonstrations:
                tally.sft_loss = accumulate_demonstrations(
                    self.model,
                    in_turn(self.demonstrations, self.version, algorithm.sft_rows),
                    weight=algorithm.sft_coef,
                    microbatch_tokens=self.config.learner.microbatch_tokens,
                )
        tally = Tally.merged(self.ranks.all_gather(tally))
        if tally.fault:
            self._refuse(*tally.fault, step)
        trained = Trained.of(tally, step, proximal_N, self.version)
        if algorithm.kl_stop is not None and proximal_N is not None and len(trained.tokens_K):
            moved = k3(trained.current_K - proximal_N[trained.tokens_K]).mean()
            stopped = stopped or bool(moved > algorithm.kl_stop)
        after_backward = time.perf_counter()
        scale = self._ess_lr_scale(trained)
        # Without a token in the loss nothing was measured, not even a gradient of zero: the moments must not move on.
        idle = stopped or waits or not (step.in_loss_N.any() or self.demonstrations)
        learning_rate = 0.0 if idle else self.learning_rate() * scale
        trust_region = None
        if idle:
            grad_norm = self.model.grad_norm()
            self.model.zero_grad()
        elif algorithm.objective == "trpo":
            assert proximal_N is not None
            self._check_gradient(self.model.grad_norm(), step)
            trust_region = self.passes.natural_step(step, proximal_N)
            self.model.refresh()
            grad_norm, learning_rate = trust_region.grad_norm, 0.0
        else:
            grad_norm = self._optimize(step, learning_rate)
        self.version += 1
        return step_stats(
            step,
            tally,
            trained,
            algorithm,
            version=self.version,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            ess_lr_scale=scale,
            stopped_by_kl=stopped,
            trust_region=trust_region,
            seconds={
                "unpack": seconds["unpack"],
                "forward_backward": seconds["forward_backward"] + after_backward - started,
                "optimizer": time.perf_counter() - after_backward,
            },
        ), trained

    def _accumulate(
        self, step: StepBatch, batch: MicroBatch, proximal_N: Tensor | None, tally: Tally
    ) -> None:
        """Forward and backward pass of one micro-batch. A fault is only noted: other ranks are in the same pass, and
        must learn of it before any of them stops."""
        algorithm = self.config.algorithm
        tokens_M = batch.token_index
        result = self.passes.forward(batch)
        device = result.logprobs.device
        current_M = result.logprobs.detach().cpu()
        behavior_M = step.behavior_logprobs_N[tokens_M]
        advantages_M = step.advantages_N[tokens_M]
        response_M = step.response_N[tokens_M]
        anchor_M = current_M if proximal_N is None else proximal_N[tokens_M]
        factor_M = torch.ones_like(current_M)
        if algorithm.correction:
            corrected = correct(
                anchor_M - behavior_M, response_M, advantages_M, behavior_M - current_M, algorithm
            )
            factor_M = corrected.factor_M
            for name, mask in corrected.rejected.items():
                tally.rejected.setdefault(name, []).append(mask)
        old_M = behavior_M if algorithm.old_policy == "behavior" else anchor_M
        weights_M = step.token_weights_N[tokens_M]
        policy = policy_loss(
            result.logprobs,
            old_M.to(device),
            advantages_M.to(device),
            factor_M.to(device),
            weights_M.to(device),
            response_M.to(device),
            torch.ones_like(result.logprobs, dtype=torch.bool),
            objective=algorithm.objective,
            ratio=algorithm.ratio,
            ratio_mix=algorithm.ratio_mix,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
            staleness_adaptive=algorithm.staleness_adaptive,
            log_importance_N=(anchor_M - behavior_M).to(device),
        )
        loss = policy.loss
        if algorithm.kl == "loss":
            assert step.reference_logprobs_N is not None
            kl_factor_M = factor_M
            if algorithm.old_policy == "behavior":
                # The ratio of the objective is the importance weight there; the KL needs one of its own.
                weight_M = importance_weights(current_M - behavior_M)
                kl_factor_M = factor_M * weight_M.clamp(max=algorithm.correction_cap)
            loss = loss + step.kl_coef * kl_loss(
                result.logprobs,
                step.reference_logprobs_N[tokens_M].to(device),
                behavior_M.to(device),
                kl_factor_M.to(device),
                weights_M.to(device),
                torch.ones_like(result.logprobs, dtype=torch.bool),
                estimator=algorithm.kl_estimator,
            )
        if algorithm.entropy_coef:
            loss = loss - algorithm.entropy_coef * (result.entropy * weights_M.to(device)).sum()
        finite_M = torch.isfinite(current_M)
        if not finite_M.all():
            tally.fault = ("a log-probability", tokens_M[~finite_M])
        elif not torch.isfinite(loss):
            tally.fault = ("the loss", tokens_M)
        (loss if tally.fault is None else 0.0 * result.logprobs.sum()).backward()
        tally.loss += loss.item()
        tally.num_clipped += int(policy.num_clipped)
        tally.tokens.append(tokens_M)
        tally.current.append(current_M)
        tally.factors.append(factor_M * step.lag_factors_N[tokens_M])
        tally.entropy.append(result.entropy.detach().cpu())

    def _optimize(self, step: StepBatch, learning_rate: float) -> float:
        """Applies the gradients and returns their norm before clipping. A step whose groups all lack signal has
        gradient zero, and is still a step: the moments decay."""
        norm = self.model.clip_grad(self.config.learner.max_grad_norm)
        self._check_gradient(norm, step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.model.zero_grad()
        self.model.refresh()
        return norm

    def learning_rate(self) -> float:
        """Of the next step: linear warm-up over `warmup_steps`, then constant."""
        warmup = self.config.learner.warmup_steps
        return self.config.learner.learning_rate * min(1.0, (self.version + 1) / max(1, warmup))

    def _ess_lr_scale(self, trained: Trained) -> float:
        """sqrt(ESS fraction of this step / running ESS fraction of fresh tokens), at most 1: VCPO (arXiv 2602.17616).
        The steadier the weights, the nearer the step is to one on fresh data."""
        known_K = trained.known_K
        if not self.config.algorithm.ess_lr or not known_K.any():
            return 1.0
        weights = importance_weights(trained.log_correction_K[known_K])
        fresh = weights[trained.lag_K[known_K] == 0]
        if len(fresh):
            self.fresh_ess = ESS_MEMORY * self.fresh_ess + (1 - ESS_MEMORY) * ess_fraction(fresh)
        return min(1.0, (ess_fraction(weights) / self.fresh_ess) ** 0.5)

    def _check_gradient(self, norm: float, step: StepBatch) -> None:
        if not math.isfinite(norm):
            self._refuse("the gradient", torch.from_numpy(np.flatnonzero(step.trained_N)), step)

    def _refuse(self, what: str, tokens: Tensor, step: StepBatch) -> NoReturn:
        self.model.zero_grad()
        raise NonFiniteStep(what, self.version, step.rollout_ids(tokens))

    # ---- checkpoint ------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Writes the learner's part of a checkpoint into `folder` (`learner_state.save_learner`)."""
        extra = {"rewards": self.rewards.state(), "fresh_ess": self.fresh_ess}
        save_learner(folder, self.model, self.optimizer, self.version, extra)

    def load(self, folder: Path) -> None:
        """Takes up where `save` left off, bit for bit on the same number of ranks. Raises `DataError` when `folder`
        holds another model."""
        self.version, extra = load_learner(folder, self.model, self.optimizer)
        self.rewards.restore(extra["rewards"])
        self.fresh_ess = extra["fresh_ess"]


def adamw(
    masters: dict[str, torch.nn.Parameter],
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) that decays matrices only."""
    matrices = [p for p in masters.values() if p.dim() > 1]
    others = [p for p in masters.values() if p.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=learning_rate,
        betas=betas,
        fused=True,
    )


def _columns(step: StepBatch, trained: Trained, proximal_N: Tensor | None) -> pa.Table:
    """What the learner knows of every response token: NaN where it did not look."""
    if proximal_N is None:
        proximal_N = torch.full(step.advantages_N.shape, torch.nan)
        proximal_N[trained.tokens_K] = trained.current_K
    offsets = np.concatenate([[0], np.cumsum(step.lengths_B.numpy())]).astype(np.int32)
    columns = {"proximal_logprobs": proximal_N, "advantages": step.advantages_N}
    return pa.table(
        {
            name: pa.ListArray.from_arrays(pa.array(offsets), pa.array(values_N.numpy(), pa.float32())).cast(
                SCHEMA.field(name).type
            )
            for name, values_N in columns.items()
        }
    )
