"""The published algorithms as rows over independent choices: keys of the `algorithm` section.

A preset only supplies defaults; any key that the user sets wins over it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """What one word stands for."""

    source: str
    when: str
    """When to choose it, in one sentence."""
    choices: dict[str, Any]


_PPO_CLIP = {"objective": "clip", "ratio": "token", "clip_low": 0.2, "clip_high": 0.2}
_CLIP_HIGHER = {"objective": "clip", "ratio": "token", "clip_low": 0.2, "clip_high": 0.28}
_TIS = {"correction": ["tis_token"], "correction_cap": 2.0}
_TIS_SEQUENCE = {"correction": ["tis_sequence"], "correction_cap": 2.0}
_KL_IN_REWARD = {"kl": "reward", "kl_estimator": "k1", "kl_coef": 0.01}

PRESETS: dict[str, Preset] = {
    "async_grpo": Preset(
        "this project; AReaL (arXiv 2505.24298), DAPO (2503.14476), VCPO (2602.17616)",
        "the default: asynchronous runs with verifiable rewards",
        {
            "advantage": "group",
            **_CLIP_HIGHER,
            "correction": ["tis_token", "mis_sequence"],
            "correction_cap": 2.0,
            "aggregation": "token_mean",
            "ess_lr": True,
            "dynamic_sampling": True,
        },
    ),
    "ppo": Preset(
        "arXiv 1707.06347; RLHF form: arXiv 2203.02155",
        "a learned reward or dense rewards, and memory for a critic and a reference",
        {
            "advantage": "gae",
            **_PPO_CLIP,
            **_TIS,
            **_KL_IN_REWARD,
            "aggregation": "seq_mean_token_mean",
        },
    ),
    "grpo": Preset(
        "DeepSeekMath, arXiv 2402.03300",
        "to reproduce published GRPO; `algorithm.kl_estimator=k2` has the right KL gradient",
        {
            "advantage": "group",
            **_PPO_CLIP,
            **_TIS,
            "kl": "loss",
            "kl_estimator": "k3",
            "kl_coef": 0.04,
            "aggregation": "seq_mean_token_mean",
        },
    ),
    "dr_grpo": Preset(
        "arXiv 2503.20783",
        "when responses grow without getting better: no bias to length or difficulty",
        {"advantage": "group_mean", **_PPO_CLIP, **_TIS, "aggregation": "seq_mean_token_sum_norm"},
    ),
    "dapo": Preset(
        "arXiv 2503.14476",
        "long reasoning with verifiable rewards",
        {
            "advantage": "group",
            **_CLIP_HIGHER,
            **_TIS,
            "aggregation": "token_mean",
            "dynamic_sampling": True,
            "overlong_penalty": 0.2,
        },
    ),
    "cispo": Preset(
        "MiniMax-M1, arXiv 2506.13585",
        "when rare tokens matter: no token loses its gradient to the clip",
        {
            "advantage": "group",
            "objective": "cispo",
            "ratio": "token",
            "clip_low": 1.0,
            "clip_high": 0.28,
            "old_policy": "behavior",
            "correction": [],
            "aggregation": "token_mean",
            "dynamic_sampling": True,
        },
    ),
    "gspo": Preset(
        "arXiv 2507.18071",
        "mixture-of-experts models and long responses, where token ratios are mostly noise",
        {
            "advantage": "group",
            "objective": "clip",
            "ratio": "sequence",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "correction": ["mis_sequence"],
            "aggregation": "seq_mean_token_mean",
        },
    ),
    "gspo_token": Preset(
        "arXiv 2507.18071, section 4.3",
        "GSPO with advantages that differ by token",
        {
            "advantage": "group",
            "objective": "clip",
            "ratio": "sequence_token",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "correction": ["mis_sequence"],
            "aggregation": "seq_mean_token_mean",
        },
    ),
    "rloo": Preset(
        "arXiv 2402.14740",
        "few responses per prompt and an unbiased gradient",
        {
            "advantage": "rloo",
            "objective": "none",
            **_TIS_SEQUENCE,
            **_KL_IN_REWARD,
            "aggregation": "seq_mean_token_sum",
        },
    ),
    "reinforce_pp": Preset(
        "REINFORCE++, arXiv 2501.03262",
        "many prompts with few responses each: normalises over the batch, not the group",
        {"advantage": "reinforce_pp", **_PPO_CLIP, **_TIS, **_KL_IN_REWARD, "aggregation": "token_mean"},
    ),
    "remax": Preset(
        "arXiv 2310.10505",
        "one or two samples per prompt; the greedy answer's reward is the baseline",
        {
            "advantage": "remax",
            "objective": "none",
            **_TIS_SEQUENCE,
            **_KL_IN_REWARD,
            "aggregation": "seq_mean_token_sum",
        },
    ),
    "vineppo": Preset(
        "arXiv 2410.01679",
        "credit to single steps of a solution, where sampling is cheap",
        {
            "advantage": "vine",
            **_PPO_CLIP,
            **_TIS,
            "kl": "loss",
            "kl_estimator": "k3",
            "kl_coef": 1e-4,
            "aggregation": "seq_mean_token_mean",
        },
    ),
    "tic_grpo": Preset(
        "arXiv 2508.02833",
        "several steps per batch with the gradient of the current policy",
        {
            "advantage": "group",
            "objective": "clip",
            "ratio": "trajectory",
            "clip_low": 0.2,
            "clip_high": 0.28,
            **_TIS_SEQUENCE,
            "aggregation": "seq_mean_token_mean",
        },
    ),
    "lite_ppo": Preset(
        "arXiv 2508.08221",
        "base models: two tricks only, group mean with batch std, and token mean",
        {"advantage": "group_batch_std", **_PPO_CLIP, **_TIS, "aggregation": "token_mean"},
    ),
    "mgpo": Preset(
        "multi-grained ratios between GRPO and GSPO",
        "between token and sequence ratios (`algorithm.ratio_mix`)",
        {
            "advantage": "group",
            "objective": "clip",
            "ratio": "mixed",
            "clip_low": 0.2,
            "clip_high": 0.28,
            **_TIS,
            "aggregation": "seq_mean_token_mean",
        },
    ),
    "magrpo": Preset(
        "arXiv 2508.04652",
        "several agents that share one reward",
        {"advantage": "joint_group", **_PPO_CLIP, **_TIS, "aggregation": "token_mean"},
    ),
    "dr_mas": Preset(
        "arXiv 2602.08847",
        "several agents whose rewards differ in scale",
        {"advantage": "per_agent", **_PPO_CLIP, **_TIS, "aggregation": "token_mean"},
    ),
    "trpo": Preset(
        "arXiv 1502.05477",
        "a hard bound on the step's KL, at the cost of about twelve passes per step (float32 only)",
        {"advantage": "group", "objective": "trpo", **_TIS, "aggregation": "token_mean"},
    ),
    "distill": Preset(
        "arXiv 2306.08543, 2306.13649 (reverse KL on the student's own samples)",
        "a teacher with the same vocabulary (`reference.path`); rewards are only looked at",
        {
            "advantage": "none",
            "objective": "none",
            **_TIS,
            "kl": "loss",
            "kl_estimator": "k2",
            "kl_coef": 1.0,
            "aggregation": "token_mean",
        },
    ),
    "reinforce": Preset(
        "Williams 1992",
        "the plain score-function gradient with a running mean as baseline",
        {
            "advantage": "reinforce_baseline",
            "objective": "none",
            **_TIS_SEQUENCE,
            "aggregation": "token_mean",
        },
    ),
    "a2c": Preset(
        "arXiv 1602.01783",
        "a critic without a trust region",
        {"advantage": "gae", "objective": "none", **_TIS, "aggregation": "token_mean"},
    ),
    "vcpo": Preset(
        "arXiv 2602.17616",
        "very old rollouts: minimum-variance baseline and a learning rate that follows the ESS",
        {
            "advantage": "min_variance",
            "objective": "none",
            **_TIS_SEQUENCE,
            "aggregation": "token_mean",
            "ess_lr": True,
        },
    ),
    "sat": Preset(
        "arXiv 2607.18722",
        "the behavior policy as the old one, with less room for tokens that it and the learner disagree on",
        {
            "advantage": "group",
            **_CLIP_HIGHER,
            "old_policy": "behavior",
            "staleness_adaptive": 0.5,
            "correction": [],
            "aggregation": "token_mean",
        },
    ),
    "icepop": Preset(
        "arXiv 2510.18855",
        "mixture-of-experts models: tokens on which engine and learner disagree leave the gradient",
        {
            "advantage": "group",
            **_CLIP_HIGHER,
            "correction": ["is_token", "mis_token"],
            "aggregation": "token_mean",
        },
    ),
    "deepseek_v32": Preset(
        "arXiv 2512.02556",
        "an unbiased KL and no learning from stale failures",
        {
            "advantage": "group_mean",
            **_PPO_CLIP,
            "correction": ["tis_token", "off_policy_mask"],
            "correction_cap": 2.0,
            "kl": "loss",
            "kl_estimator": "unbiased",
            "kl_coef": 0.01,
            "aggregation": "seq_mean_token_mean",
        },
    ),
}
