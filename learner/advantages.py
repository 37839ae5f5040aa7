"""Advantage estimators: pure functions of rewards, one per value of `algorithm.advantage`. _G: the responses of one
prompt group; _B: all responses of the step; _N: their tokens, flattened.

Statistics are float64, results float32 and finite whenever the rewards (and values) are. Standard deviations are
unbiased (ddof 1). Equality is decided by max == min, because the standard deviation of equal values that binary
fractions cannot hold is not 0. A NaN among the scored rewards is not hidden: it makes the advantages NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from headway.learner.rewards import STD_EPS, exact_mean


def group(rewards_G: Tensor, scored_G: Tensor) -> Tensor:
    """(R - mean) / (std + 1e-6) over the group: GRPO (arXiv 2402.03300, section 4.1.2). [G] float32.

    Like all the group estimators below: rewards of any real or bool dtype; an unscored response has advantage 0, is
    left out of the statistics, and may hold any value; equal rewards and groups with fewer than two scored responses
    give exactly 0.
    """
    return _compare(rewards_G, scored_G, _standardized)


def group_mean(rewards_G: Tensor, scored_G: Tensor) -> Tensor:
    """R - mean over the group: Dr. GRPO (arXiv 2503.20783). [G] float32."""
    return _compare(rewards_G, scored_G, lambda scored: scored - scored.mean())


def rloo(rewards_G: Tensor, scored_G: Tensor) -> Tensor:
    """R - mean of the others in the group: RLOO (arXiv 2402.14740, section 3.2), G / (G - 1) times `group_mean`.
    [G] float32."""
    return _compare(
        rewards_G, scored_G, lambda scored: scored - (scored.sum() - scored) / (scored.numel() - 1)
    )


def group_batch_std(rewards_G: Tensor, scored_G: Tensor, batch_std: float) -> Tensor:
    """(R - mean over the group) / (batch_std + 1e-6): Lite PPO (arXiv 2508.08221). [G] float32.

    batch_std: of all scored rewards of the step, not centred by group."""
    return _compare(rewards_G, scored_G, lambda scored: (scored - scored.mean()) / (batch_std + STD_EPS))


def per_agent(rewards_G: Tensor, scored_G: Tensor, agent_ids: Sequence[str]) -> Tensor:
    """`group` over the responses of each agent by itself: Dr. MAS (arXiv 2602.08847). [G] float32.

    agent_ids: [G], or empty for a single agent."""
    advantages_G = torch.zeros(rewards_G.shape, dtype=torch.float32)
    agent_ids = agent_ids or [""] * len(rewards_G)
    for agent in sorted(set(agent_ids)):
        rows = torch.tensor([other == agent for other in agent_ids])
        advantages_G[rows] = group(rewards_G[rows], scored_G[rows])
    return advantages_G


def joint_group(rewards_G: Tensor, scored_G: Tensor, episode_G: Tensor) -> Tensor:
    """`group` over episodes, shared by the responses of an episode: MAGRPO (arXiv 2508.04652). [G] float32.

    episode_G: [G] int64; equal numbers are one episode. Its reward is the mean of its scored responses; without any
    it is unscored. Unscored responses have advantage 0 all the same."""
    _, episode_of_G = episode_G.unique(return_inverse=True)
    scored = [
        rewards_G[scored_G & (episode_of_G == episode)].to(torch.float64)
        for episode in range(int(episode_of_G.max()) + 1 if len(episode_of_G) else 0)
    ]
    rewards_E = torch.tensor([_mean(rewards) for rewards in scored], dtype=torch.float64)
    scored_E = torch.tensor([len(rewards) > 0 for rewards in scored], dtype=torch.bool)
    return torch.where(scored_G, group(rewards_E, scored_E)[episode_of_G], 0.0)


def min_variance(rewards_G: Tensor, scored_G: Tensor, weights_G: Tensor, squared_norms_G: Tensor) -> Tensor:
    """R - b with the baseline that minimises the variance of the group's importance-weighted gradient, b =
    sum(w^2 |g|^2 R) / sum(w^2 |g|^2): VCPO (arXiv 2602.17616). [G] float32.

    weights_G: importance weights w. squared_norms_G: |g|^2, of the gradients of the responses' log-probabilities.
    If all products are 0, b is the plain mean.
    """
    products_G = weights_G[scored_G].to(torch.float64) ** 2 * squared_norms_G[scored_G].to(torch.float64)

    def centred(scored: Tensor) -> Tensor:
        largest = products_G.max()
        if largest == 0:
            return scored - scored.mean()
        shares = products_G / largest
        return scored - (shares * scored).sum() / shares.sum()

    return _compare(rewards_G, scored_G, centred)


def _compare(rewards_G: Tensor, scored_G: Tensor, estimate: Callable[[Tensor], Tensor]) -> Tensor:
    """`estimate` of the scored rewards (float64, at least two, not all equal), 0 elsewhere. [G] float32."""
    advantages_G = torch.zeros(rewards_G.shape, dtype=torch.float32)
    scored = rewards_G[scored_G].to(torch.float64)
    if scored.numel() >= 2 and scored.max() != scored.min():
        advantages_G[scored_G] = _to_float32(estimate(scored))
    return advantages_G


def _standardized(values: Tensor) -> Tensor:
    """(x - mean) / (std + 1e-6) of float64 values, exactly 0 if they are equal or fewer than two."""
    if values.numel() < 2 or values.max() == values.min():
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.std(correction=1) + STD_EPS)


def _mean(values: Tensor) -> float:
    return exact_mean(values.tolist()) if values.isfinite().all() else float(values.mean())


def gae(
    rewards_N: Tensor,
    values_N: Tensor,
    mask_N: Tensor,
    lengths_B: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438, equation 16) and its returns, [N] float32 each.

    delta_t = r_t + gamma V_t+1 - V_t; A_t = delta_t + gamma lambda A_t+1; return = A + V; the value after the last
    token is 0. t counts tokens in `mask_N` only: the recursion carries over the others, which have 0 in both
    results and may hold anything. rewards_N: token rewards. values_N: expected reward to go before the token.
    lengths_B: [B] int64, tokens of each response, masked ones included.
    """
    counts_B = _counts(mask_N, lengths_B)
    values = values_N[mask_N].to(torch.float64)
    following = torch.zeros_like(values)
    following[:-1] = values[1:]
    following[_last(counts_B)] = 0.0
    deltas = rewards_N[mask_N].to(torch.float64) + gamma * following - values
    advantages = _discounted_sums(deltas, counts_B, gamma * gae_lambda)
    return _spread(advantages, mask_N), _spread(advantages + values, mask_N)


def vtrace_targets(
    rewards_N: Tensor,
    values_N: Tensor,
    log_ratios_N: Tensor,
    mask_N: Tensor,
    lengths_B: Tensor,
    *,
    gamma: float,
    lam: float,
    cap: float,
) -> Tensor:
    """What values should have been had the present policy sampled, [N] float32: V-trace (arXiv 1802.01561, equation 1).

    v_t - V_t = rho_t (r_t + gamma V_t+1 - V_t) + gamma c_t (v_t+1 - V_t+1), with rho_t = min(cap, pi_t / mu_t) and c_t =
    lambda rho_t. Where all ratios are 1 these are the returns of `gae`. log_ratios_N: log pi - log mu of the sampled
    token (nats). Other arguments as in `gae`.
    """
    counts_B = _counts(mask_N, lengths_B)
    values = values_N[mask_N].to(torch.float64)
    rho = log_ratios_N[mask_N].to(torch.float64).exp().clamp(max=cap)
    following = torch.zeros_like(values)
    following[:-1] = values[1:]
    following[_last(counts_B)] = 0.0
    deltas = rho * (rewards_N[mask_N].to(torch.float64) + gamma * following - values)
    return _spread(values + _discounted_sums(deltas, counts_B, gamma * lam * rho), mask_N)


def reinforce(rewards_N: Tensor, mask_N: Tensor, lengths_B: Tensor, *, gamma: float) -> Tensor:
    """Reward to go: sum over k >= 0 of gamma^k r_t+k (Williams 1992). [N] float32; arguments as in `gae`."""
    return reinforce_baseline(rewards_N, mask_N, lengths_B, gamma=gamma, baseline=0.0)


def reinforce_baseline(
    rewards_N: Tensor, mask_N: Tensor, lengths_B: Tensor, *, gamma: float, baseline: float
) -> Tensor:
    """Reward to go minus a constant that these rewards have no part in. [N] float32; arguments as in `gae`."""
    rewards_to_go = _discounted_sums(rewards_N[mask_N].to(torch.float64), _counts(mask_N, lengths_B), gamma)
    return _spread(rewards_to_go - baseline, mask_N)


def reinforce_pp(rewards_N: Tensor, mask_N: Tensor, lengths_B: Tensor, *, gamma: float) -> Tensor:
    """Reward to go, then (x - mean) / (std + 1e-6) over all tokens of the step in `mask_N`: REINFORCE++
    (arXiv 2501.03262). [N] float32; arguments as in `gae`."""
    rewards_to_go = _discounted_sums(rewards_N[mask_N].to(torch.float64), _counts(mask_N, lengths_B), gamma)
    return _spread(_standardized(rewards_to_go), mask_N)


def remax(rewards_B: Tensor, values_N: Tensor, mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """R - reward of the greedy response: ReMax (arXiv 2310.10505). [N] float32; arguments as in `gae`.

    values_N: the greedy response's reward on every token in `mask_N`."""
    rewards_N = rewards_B.to(torch.float64).repeat_interleave(lengths_B)
    return _spread(rewards_N[mask_N] - values_N[mask_N].to(torch.float64), mask_N)


def vine(
    rewards_B: Tensor, values_N: Tensor, step_ends: Sequence[np.ndarray], mask_N: Tensor, lengths_B: Tensor
) -> Tensor:
    """V(s_k+1) - V(s_k) for the tokens of step k, and R - V(s_k) in the last one: VinePPO (arXiv 2410.01679).
    [N] float32; arguments as in `gae`.

    values_N: on the tokens of step k, V(s_k): the mean reward of fresh continuations from where the step begins.
    step_ends: [B] arrays, after how many tokens each step ends; the last step takes what follows it. Steps without
    a token in `mask_N` are passed over.
    """
    advantages_N = torch.zeros(mask_N.shape, dtype=torch.float64)
    starts = (lengths_B.cumsum(0) - lengths_B).tolist()
    for row, (start, length) in enumerate(zip(starts, lengths_B.tolist(), strict=True)):
        tokens = np.flatnonzero(mask_N[start : start + length].numpy())
        if len(tokens) == 0:
            continue
        step_of_token = np.searchsorted(step_ends[row][:-1], tokens, side="right")
        _, first, step_of_token = np.unique(step_of_token, return_index=True, return_inverse=True)
        values = values_N[start + torch.from_numpy(tokens[first])].to(torch.float64)
        following = torch.cat([values[1:], rewards_B[row : row + 1].to(torch.float64)])
        advantages_N[start + torch.from_numpy(tokens)] = (following - values)[torch.from_numpy(step_of_token)]
    return _to_float32(advantages_N)


def _counts(mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """[B] int64, tokens of each response in the mask."""
    before = torch.cat([torch.zeros(1, dtype=torch.int64), mask_N.cumsum(0)])
    ends_B = lengths_B.cumsum(0)
    return before[ends_B] - before[ends_B - lengths_B]


def _last(counts_B: Tensor) -> Tensor:
    """Where the last token of each response stands, among the tokens in the mask."""
    return (counts_B.cumsum(0) - 1)[counts_B > 0]


def _discounted_sums(values: Tensor, counts_B: Tensor, factor: float | Tensor) -> Tensor:
    """y_t = x_t + factor_t y_t+1 within each response: over tokens in the mask, `counts_B` per response. All responses
    at a time, from their last tokens backwards."""
    sums = values.clone().numpy()
    factors = np.broadcast_to(np.asarray(factor, dtype=np.float64), sums.shape)
    counts = counts_B.numpy()
    at = np.cumsum(counts) - 1
    for done in range(1, int(counts.max(initial=0))):
        at = at[counts > done] - 1
        counts = counts[counts > done]
        sums[at] += factors[at] * sums[at + 1]
    return torch.from_numpy(sums)


def _spread(values: Tensor, mask_N: Tensor) -> Tensor:
    """Values of the tokens in the mask at their places, 0 elsewhere. [N] float32."""
    spread_N = torch.zeros(mask_N.shape, dtype=torch.float32)
    spread_N[mask_N] = _to_float32(values)
    return spread_N


def _to_float32(values: Tensor) -> Tensor:
    """The nearest float32, finite where the float64 value is, and never -0.0."""
    largest = torch.finfo(torch.float32).max
    return torch.where(values.isfinite(), values.clamp(-largest, largest), values).to(torch.float32) + 0.0
