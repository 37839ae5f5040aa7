"""Passes through the policy over the trained tokens of a step: which micro-batches, on which rank, and what is asked
of them without an update. _N: response tokens of the step, flattened; _M: trained tokens of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headway.core.config import Config
from headway.learner.batching import MicroBatch, deal, pack
from headway.learner.corrections import Corrected, correct, importance_weights
from headway.learner.kl import k3
from headway.learner.logprobs import TokenLogprobs
from headway.learner.model import PolicyModel
from headway.learner.step import StepBatch
from headway.learner.trpo import TrpoResult, fisher_product, trpo_step


@dataclass(frozen=True, slots=True)
class Passes:
    """Every rank sees whole steps and must go through as many passes as any other."""

    config: Config
    model: PolicyModel

    def share(self, step: StepBatch) -> list[MicroBatch | None]:
        """This rank's micro-batches; None stands for a pass without tokens."""
        ranks = self.model.ranks
        budget = self.config.learner.microbatch_tokens
        return deal(step.groups, step.trained_N, microbatch_tokens=budget, rank=ranks.rank, size=ranks.size)

    def forward(self, batch: MicroBatch) -> TokenLogprobs:
        return self.model.logprobs(batch, temperature=self.config.sampling.temperature)

    @torch.no_grad()
    def logprobs(self, step: StepBatch) -> Tensor:
        """[N] float32 log-probabilities under the current weights, on every rank; NaN where nothing is trained."""
        parts = []
        for batch in self.share(step):
            if batch is None:
                self.model.idle_forward()
            else:
                parts.append((batch.token_index, self.forward(batch).logprobs.cpu()))
        logprobs_N = torch.full(step.advantages_N.shape, torch.nan)
        for part in self.model.ranks.all_gather(parts):
            for tokens_M, values_M in part:
                logprobs_N[tokens_M] = values_M
        return logprobs_N

    def squared_gradient_norms(self, step: StepBatch) -> Tensor:
        """[B] float64: of each response's log-probability, 0 where nothing of it is trained. A backward pass each; on
        one rank only."""
        norms_B = torch.zeros(len(step.lengths_B), dtype=torch.float64)
        trained_N = torch.from_numpy(step.trained_N)
        for response in step.response_N[trained_N].unique().tolist():
            own_N = (trained_N & (step.response_N == response)).numpy()
            self.model.zero_grad()
            budget = self.config.learner.microbatch_tokens
            for batch in pack(step.groups, own_N, microbatch_tokens=budget):
                self.forward(batch).logprobs.sum().backward()
            norms_B[response] = self.model.grad_norm() ** 2
        self.model.zero_grad()
        return norms_B

    def correction(self, step: StepBatch, tokens_M: Tensor, anchor_N: Tensor, current_N: Tensor) -> Corrected:
        """Of tokens of the step, from log-probabilities under the policy whose weight over the behavior policy counts, and
        under the current one."""
        behavior_M = step.behavior_logprobs_N[tokens_M]
        return correct(
            anchor_N[tokens_M] - behavior_M,
            step.response_N[tokens_M],
            step.advantages_N[tokens_M],
            behavior_M - current_N[tokens_M],
            self.config.algorithm,
        )

    def natural_step(self, step: StepBatch, proximal_N: Tensor) -> TrpoResult:
        """Moves the weights along the natural gradient, from the loss's gradient that has been accumulated; on one rank
        only."""
        algorithm = self.config.algorithm
        parameters = list(self.model.masters.values())
        gradient = [-_gradient(parameter) for parameter in parameters]
        num_tokens = max(1, int(step.trained_N.sum()))
        batches = [batch for batch in self.share(step) if batch is not None]
        trained = torch.from_numpy(np.flatnonzero(step.trained_N))
        factor_N = torch.ones_like(step.advantages_N)
        if algorithm.correction:
            factor_N[trained] = self.correction(step, trained, proximal_N, proximal_N).factor_M
        weights_N = factor_N * step.token_weights_N * step.advantages_N

        def k2_gradient() -> list[Tensor]:
            self.model.zero_grad()
            for batch in batches:
                logprobs_M = self.forward(batch).logprobs
                moved_M = logprobs_M - proximal_N[batch.token_index].to(logprobs_M.device)
                (0.5 * moved_M.square().sum() / num_tokens).backward()
            return [_gradient(parameter) for parameter in parameters]

        def evaluate() -> tuple[float, float]:
            log_ratio = (self.logprobs(step) - proximal_N)[trained]
            surrogate = (importance_weights(log_ratio) * weights_N[trained]).sum()
            return float(surrogate), float(k3(log_ratio).mean())

        result = trpo_step(
            parameters,
            gradient,
            fisher_product(parameters, k2_gradient),
            evaluate,
            max_kl=algorithm.trust_region_kl,
            iterations=algorithm.cg_iterations,
            damping=algorithm.cg_damping,
        )
        self.model.zero_grad()
        return result


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
