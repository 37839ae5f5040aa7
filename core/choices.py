"""What each value of the `algorithm` section means, for its reference page: formula, unit, source, when to choose it.

Notation: R reward of a response, A advantage, r ratio to the old policy, c importance weight of the old policy over the
behavior policy μ, d = log π_ref − log π_θ, o_i tokens of response i, sg(·) no gradient.
"""

from __future__ import annotations

from typing import NamedTuple


class Choice(NamedTuple):
    formula: str
    unit: str
    """Of the result."""
    source: str
    when: str


TITLES = {
    "advantage": "Advantage",
    "ratio": "Ratio",
    "objective": "Objective and trust region",
    "old_policy": "Old policy",
    "correction": "Off-policy correction",
    "kl_estimator": "KL in the loss",
    "aggregation": "Aggregation: the denominator",
    "truncated": "Truncated responses",
    "reward_normalization": "Reward normalisation",
}

CHOICES: dict[str, dict[str, Choice]] = {
    "advantage": {
        "group": Choice(
            "(R − mean) / (std + 1e-6) in the prompt's group; std with ddof 1; equal rewards: exactly 0",
            "standard deviations of the group",
            "GRPO, arXiv 2402.03300",
            "the default",
        ),
        "group_mean": Choice(
            "R − mean", "reward", "Dr. GRPO, arXiv 2503.20783", "no weight to prompts of small spread"
        ),
        "rloo": Choice(
            "R − mean of the others = G/(G−1) · (R − mean)",
            "reward",
            "arXiv 2402.14740",
            "unbiased with few responses",
        ),
        "remax": Choice(
            "R − R(greedy answer)", "reward", "arXiv 2310.10505", "one or two responses per prompt"
        ),
        "none": Choice(
            "0: only the KL in the loss trains",
            "–",
            "on-policy distillation, arXiv 2306.13649, 2306.08543",
            "a teacher (`reference.path`), no reward",
        ),
        "reinforce": Choice("Σ_{s≥t} γ^{s−t} r_s", "reward", "Williams 1992", "teaching, tests"),
        "reinforce_baseline": Choice(
            "reward-to-go − running mean of rewards", "reward", "Williams 1992", "single responses"
        ),
        "reinforce_pp": Choice(
            "reward-to-go, then z-score over all trained tokens of the step",
            "standard deviations of the step",
            "REINFORCE++, arXiv 2501.03262",
            "many prompts, few responses each",
        ),
        "group_batch_std": Choice(
            "(R − group mean) / (std of all rewards of the step + 1e-6)",
            "standard deviations of the step",
            "Lite PPO, arXiv 2508.08221",
            "groups whose spread says little",
        ),
        "gae": Choice(
            "δ_t = r_t + γ V_{t+1} − V_t; A_t = δ_t + γλ A_{t+1}, over trained tokens only",
            "reward",
            "arXiv 1506.02438, equation 16",
            "with a critic",
        ),
        "vine": Choice(
            "V(s_{k+1}) − V(s_k) for the tokens of step k, R − V for the last; V: mean reward of fresh branches",
            "reward",
            "VinePPO, arXiv 2410.01679",
            "credit to steps, cheap sampling",
        ),
        "per_agent": Choice(
            "`group` over each agent's responses",
            "standard deviations",
            "Dr. MAS, arXiv 2602.08847",
            "agents",
        ),
        "joint_group": Choice(
            "`group` over episodes; an episode's reward is the mean of its agents'",
            "standard deviations",
            "MAGRPO, arXiv 2508.04652",
            "agents that share a goal",
        ),
        "min_variance": Choice(
            "R − Σ w²|g|²R / Σ w²|g|² in the group; w weight and g gradient of a response",
            "reward",
            "VCPO, arXiv 2602.17616",
            "old rollouts; costs a backward pass per response",
        ),
    },
    "ratio": {
        "token": Choice("r_t = π_θ/π_old", "1", "PPO, arXiv 1707.06347", "the default"),
        "sequence": Choice(
            "s = exp(mean_t log r_t), the same for all tokens of the response",
            "1 (geometric mean)",
            "GSPO, arXiv 2507.18071",
            "mixture of experts, long responses",
        ),
        "sequence_token": Choice(
            "value s, gradient of the token: sg(s) · π_θ/sg(π_θ)",
            "1",
            "GSPO-token, the same",
            "token advantages",
        ),
        "trajectory": Choice(
            "Π_t r_t", "1 (product)", "TIC-GRPO, arXiv 2508.02833", "short responses: grows with length"
        ),
        "mixed": Choice(
            "exp((1 − m) log r_t + m mean log r), m = `ratio_mix`", "1", "multi-grained", "between the two"
        ),
    },
    "objective": {
        "clip": Choice(
            "min(r A, clip(r, 1 − clip_low, 1 + clip_high) A); `dual_clip` c: at least c A where A < 0",
            "advantage",
            "PPO; bounds apart: DAPO, arXiv 2503.14476; dual: arXiv 1912.09729",
            "the default",
        ),
        "cispo": Choice(
            "sg(clip(r)) A log π_θ: no token loses its gradient",
            "advantage × nats",
            "MiniMax-M1, arXiv 2506.13585",
            "rare but decisive tokens",
        ),
        "masked": Choice(
            "M sg(r) A log π_θ, M = 0 where PPO would clip", "advantage × nats", "the same", "a hard mask"
        ),
        "none": Choice("A log π_θ", "advantage × nats", "REINFORCE", "one step per batch"),
        "trpo": Choice(
            "max r A within mean KL ≤ `trust_region_kl`: conjugate gradient, line search",
            "advantage",
            "arXiv 1502.05477",
            "a guarantee per step matters more than its time",
        ),
    },
    "old_policy": {
        "proximal": Choice(
            "r = π_θ/π_prox, the learner's policy when it took the batch up; c = π_prox/μ",
            "1",
            "decoupled PPO: AReaL, arXiv 2505.24298",
            "the default",
        ),
        "behavior": Choice(
            "r = π_θ/μ; only rejecting corrections, by c = sg(π_θ)/μ",
            "1",
            "bypass",
            "saves the forward pass of later steps; the clip works on age as well",
        ),
    },
    "correction": {
        "is_token": Choice("c_t", "1", "AReaL, arXiv 2505.24298", "unbiased per token, noisy"),
        "tis_token": Choice("min(c_t, `correction_cap`)", "1", "IMPALA's ρ, arXiv 1802.01561", "the default"),
        "tis_sequence": Choice(
            "min(Π_t c_t, `correction_cap`), in log space",
            "1",
            "truncated importance sampling",
            "short responses",
        ),
        "mis_token": Choice(
            "0 unless `mis_token_low` ≤ c_t ≤ `mis_token_high`", "0 or 1", "IcePop, arXiv 2510.18855", "MoE"
        ),
        "mis_sequence": Choice(
            "0 for the response unless its geometric mean (or product) of c lies within the bounds",
            "0 or 1",
            "masked importance sampling",
            "drops what has drifted as a whole",
        ),
        "veto": Choice("0 for the response if any c_t < `veto_below`", "0 or 1", "", "catastrophic tokens"),
        "off_policy_mask": Choice(
            "0 where A < 0 and mean log(μ/π_θ) of the response > `off_policy_delta`",
            "0 or 1",
            "DeepSeek-V3.2, arXiv 2512.02556",
            "not to learn from stale failures",
        ),
    },
    "kl_estimator": {
        "k1": Choice("−d", "nats", "", "in the reward; in the loss its expected gradient is 0"),
        "k2": Choice("d²/2", "nats (biased)", "", "in the loss: gradient of KL(π_θ‖π_ref)"),
        "k3": Choice(
            "e^d − 1 − d", "nats", "GRPO, arXiv 2402.03300", "as published; gradient of KL(π_ref‖π_θ)"
        ),
        "k3_plus": Choice(
            "value of k3, gradient of k2",
            "nats",
            "straight-through",
            "the right gradient, and a readable value",
        ),
        "unbiased": Choice(
            "π_θ/μ · k3, gradient through both",
            "nats",
            "DeepSeek-V3.2, arXiv 2512.02556",
            "off-policy tokens",
        ),
    },
    "aggregation": {
        "token_mean": Choice(
            "Σ over tokens / all tokens of the step", "per token", "DAPO, arXiv 2503.14476", "the default"
        ),
        "seq_mean_token_mean": Choice(
            "mean in each response, then over responses",
            "per response; a token of a long response weighs less",
            "GRPO, arXiv 2402.03300",
            "as published",
        ),
        "seq_mean_token_sum_norm": Choice(
            "Σ in each response / `sampling.max_new_tokens`, then mean over responses",
            "per response",
            "Dr. GRPO, arXiv 2503.20783",
            "no bias to length",
        ),
        "seq_mean_token_sum": Choice(
            "Σ in each response, then mean over responses",
            "per response",
            "RLOO, arXiv 2402.14740",
            "unbiased",
        ),
    },
    "truncated": {
        "keep": Choice("trained like the others", "", "", "the default"),
        "mask": Choice(
            "in the group's statistics, out of the loss and its denominator",
            "",
            "DAPO",
            "no lesson from length",
        ),
        "exclude": Choice("out of both", "", "", "truncation says nothing about the answer"),
    },
    "reward_normalization": {
        "none": Choice("R", "reward", "", "the default"),
        "running": Choice(
            "(R − mean) / std of all rewards so far", "standard deviations", "", "learned rewards"
        ),
        "batch": Choice(
            "(R − mean) / std of the step", "standard deviations", "REINFORCE++", "drifting rewards"
        ),
    },
}
