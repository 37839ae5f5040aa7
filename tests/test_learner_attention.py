import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from headway.learner import attention
from headway.learner.attention import packed_attention, packing_of


def one_mask(query, key, value, prompts: list[int], answers: list[list[int]], scaling: float) -> torch.Tensor:
    """The definition: one softmax over all T tokens with a mask that says who sees whom."""
    group, segment = [], []
    for number, (prompt, lengths) in enumerate(zip(prompts, answers, strict=True)):
        parts = [prompt, *lengths]
        group += [number] * sum(parts)
        segment += [index for index, length in enumerate(parts) for _ in range(length)]
    group_T, segment_T = torch.tensor(group), torch.tensor(segment)
    same_group = group_T[:, None] == group_T
    visible = (
        same_group
        & ((segment_T[:, None] == segment_T) | (segment_T == 0))
        & torch.ones(len(group), len(group)).tril().bool()
    )
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~visible, float("-inf"))
    return (scores.softmax(dim=-1) @ value).transpose(1, 2)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 5), st.lists(st.integers(0, 4), min_size=1, max_size=3)),
        min_size=1,
        max_size=3,
    ),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    max_dense_length=st.sampled_from([0, 256]),
    seed=st.integers(0, 99),
)
def test_equals_one_softmax_under_a_mask(rows, heads, max_dense_length, seed) -> None:
    prompts, answers = [prompt for prompt, _ in rows], [lengths for _, lengths in rows]
    tokens = sum(prompts) + sum(map(sum, answers))
    generator = torch.Generator().manual_seed(seed)
    inputs = query, key, value = tuple(
        torch.randn(1, n, tokens, 3, generator=generator, dtype=torch.float64).requires_grad_()
        for n in (heads[0], heads[1], heads[1])
    )
    upstream = torch.randn(1, tokens, heads[0], 3, generator=generator, dtype=torch.float64)
    expected = one_mask(query, key, value, prompts, answers, 0.5)
    expected_grads = torch.autograd.grad((expected * upstream).sum(), inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MAX_DENSE_LENGTH", max_dense_length)
        packing = packing_of(prompts, answers)
        got, _ = packed_attention(torch.nn.Module(), query, key, value, None, packing=packing, scaling=0.5)
        grads = torch.autograd.grad((got * upstream).sum(), inputs)
    assert_close(got, expected)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert_close(grad, expected_grad)


def test_slots_by_hand() -> None:
    # Q=2 prompts padded to P=2, A=2 answers padded to R=3: prompts take slots 0-3, answers 4-15.
    packing = packing_of([2, 1], [[3, 0], [1, 2]])
    assert packing.sizes == (2, 2, 2, 3)
    assert packing.answer_lengths == ((3,), (1, 2))
    assert packing.slots_T.tolist() == [0, 1, 4, 5, 6, 2, 10, 13, 14]
    assert packing.prompt_padding_QP is not None
    assert packing.prompt_padding_QP.tolist() == [[False, False], [False, True]]
    assert packing_of([2, 2], [[1], [1]]).prompt_padding_QP is None
