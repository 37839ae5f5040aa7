import math

import pytest
import torch
from torch.testing import assert_close

from headway.learner.advantages import group_advantages


def advantages(
    rewards: list, scored: list[bool] | None = None, *, normalize: bool = True, dtype=torch.float32
):
    mask = torch.tensor(scored if scored is not None else [True] * len(rewards))
    return group_advantages(torch.tensor(rewards, dtype=dtype), mask, normalize=normalize)


def test_one_right_answer_of_four() -> None:
    # mean 0.25, unbiased std 0.5
    assert_close(advantages([1, 0, 0, 0]), torch.tensor([1.5, -0.5, -0.5, -0.5]), atol=1e-5, rtol=0)
    assert_close(advantages([1, 0, 0, 0], normalize=False), torch.tensor([0.75, -0.25, -0.25, -0.25]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16, torch.float64])
def test_reward_dtype_does_not_matter(dtype: torch.dtype) -> None:
    assert_close(
        advantages([1, 0, 0, 0], dtype=dtype), torch.tensor([1.5, -0.5, -0.5, -0.5]), atol=1e-5, rtol=0
    )


def test_unscored_response_is_left_out_of_the_statistics() -> None:
    # of [1, 0, 0]: mean 1/3, unbiased std 0.57735
    got = advantages([1.0, math.nan, 0.0, 0.0], [True, False, True, True])
    assert_close(got, torch.tensor([1.15470, 0.0, -0.57735, -0.57735]), atol=1e-5, rtol=0)
    assert got[1] == 0


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("rewards", [[1.0] * 4, [0.7] * 7, [0.1] * 8, [0.4] * 7, [-0.0, 0.0, -0.0]])
def test_equal_rewards_give_exactly_zero(rewards: list[float], normalize: bool) -> None:
    assert advantages(rewards, normalize=normalize).tolist() == [0.0] * len(rewards)


def test_fewer_than_two_scored_responses_give_zero() -> None:
    assert advantages([1.0]).tolist() == [0.0]
    assert advantages([1.0, 0.0, 0.0], [True, False, False]).tolist() == [0.0, 0.0, 0.0]
    assert advantages([math.nan, math.nan], [False, False]).tolist() == [0.0, 0.0]


def test_a_nan_among_the_scored_rewards_is_not_hidden() -> None:
    assert advantages([1.0, math.nan, 0.0]).isnan().all()
