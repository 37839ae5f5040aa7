"""Advantage estimators: pure functions of rewards. _G: the responses of one prompt group."""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantages(rewards_G: Tensor, scored_G: Tensor, *, normalize: bool, eps: float = 1e-6) -> Tensor:
    """Reward minus the group's mean, with `normalize` divided by its standard deviation.

    GRPO (arXiv 2402.03300, section 4.1.2) with the unbiased standard deviation, or without `normalize` Dr. GRPO
    (arXiv 2503.20783). Returns [G] float32.

    rewards_G: any real or bool dtype. scored_G: bool; an unscored response has advantage 0, is left out of the
    statistics, and may hold any value. Equal rewards (max == min, because the standard deviation of values that
    float32 cannot hold is not 0) and groups with fewer than two scored responses give exactly 0. A NaN among the
    scored rewards is not hidden: it makes its group's advantages NaN.
    """
    advantages_G = torch.zeros(rewards_G.shape, dtype=torch.float32)
    scored = rewards_G[scored_G].to(torch.float64)
    if scored.numel() < 2 or scored.max() == scored.min():
        return advantages_G
    centred = scored - scored.mean()
    if normalize:
        centred = centred / (scored.std(correction=1) + eps)
    advantages_G[scored_G] = centred.to(torch.float32)
    return advantages_G
