"""Reward models: a language model with a scalar head, read at the end of a response or of each of its steps.

_R: responses; _P: pairs; _S: steps of responses; _N: response tokens, flattened; _M: positions read in a micro-batch;
_H: hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from headway.core.errors import DataError
from headway.core.weights import digest
from headway.learner.batching import Group, MicroBatch, deal
from headway.learner.checkpoint import writing
from headway.learner.head_model import HeadModel
from headway.learner.learner_state import write_model_folder
from headway.learner.model import EMPTY
from headway.learner.preference import PreferenceLoss, PreferenceStats
from headway.learner.pretrained import fingerprint
from headway.learner.sharding import Ranks, alone

HEAD_FILE, ABOUT_FILE, WEIGHTS_FILE = "head.safetensors", "reward_model.json", "model.safetensors"
FORMAT = 1
NEVER_FED = 0
"""A token that stands behind a response, so that there is a next one to be predicted from its end."""

Kind = Literal["outcome", "process"]


@torch.no_grad()
def token_values(
    forward: Callable[[MicroBatch], Tensor], ranks: Ranks, share: Sequence[MicroBatch | None], num_tokens: int
) -> Tensor:
    """[N] float32 on the CPU of every rank: what `forward` gives at the tokens of all ranks' micro-batches, NaN
    elsewhere. Collective."""
    parts = []
    for batch in share:
        values_M = forward(batch or EMPTY)
        if batch is not None:
            parts.append((batch.token_index, values_M.cpu()))
    values_N = torch.full((num_tokens,), torch.nan)
    for part in ranks.all_gather(parts):
        for tokens_M, values_M in part:
            values_N[tokens_M] = values_M
    return values_N


def with_read_positions(
    groups: Sequence[Group], ends_R: Sequence[np.ndarray] | None = None
) -> tuple[list[Group], np.ndarray]:
    """The groups with one more token behind each response, and [N] bool: True at the token that comes after each end,
    whose prediction the head reads. It has seen exactly the tokens up to the end, and what comes later is not even fed.

    ends_R: for each response of all groups, after how many of its tokens (1 to all) the head reads; without it, after
    the last one.
    """
    lengths_R = np.concatenate([group.lengths for group in groups]) if groups else np.zeros(0, dtype=np.int64)
    if (lengths_R == 0).any():
        raise ValueError(
            f"response {int(np.argmin(lengths_R))} has no tokens, so there is none to read a score at"
        )
    ends_R = [np.array([n]) for n in lengths_R] if ends_R is None else ends_R
    starts_R = np.cumsum(lengths_R + 1) - (lengths_R + 1)
    read_N = np.zeros(int((lengths_R + 1).sum()), dtype=np.bool_)
    for start, length, ends in zip(starts_R, lengths_R, ends_R, strict=True):
        if len(ends) and (ends.min() < 1 or ends.max() > length):
            raise ValueError(f"steps end after {ends.tolist()} tokens of a response of {length}")
        read_N[start + ends] = True
    longer = [
        replace(
            group,
            lengths=group.lengths + 1,
            response_ids=np.insert(group.response_ids, np.cumsum(group.lengths), NEVER_FED),
        )
        for group in groups
    ]
    return longer, read_N


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Scale of the scores of answers to held-out prompts."""

    mean: float
    std: float
    """Above 0."""
    num_responses: int

    def apply(self, scores: np.ndarray) -> np.ndarray:
        """(score - mean) / std, float32: mean 0 and deviation 1 over the answers that it was made from."""
        return ((scores.astype(np.float64) - self.mean) / self.std).astype(np.float32)


def calibration_of(scores_R: np.ndarray) -> Calibration:
    """Raises `DataError` when the scores do not differ, or are not finite: they would rank nothing."""
    scores = scores_R.astype(np.float64)
    if scores.size == 0 or not np.isfinite(scores).all() or scores.std() == 0.0:
        raise DataError(
            f"the reward model gives {scores.size} held-out answers scores from {scores.min(initial=np.inf):g} to "
            f"{scores.max(initial=-np.inf):g}, which rank nothing; train it longer or on other pairs"
        )
    return Calibration(mean=float(scores.mean()), std=float(scores.std()), num_responses=scores.size)


class RewardModel(HeadModel):
    """Scores of responses.

    The score of a response (`outcome`) is read at its last token, whichever that is: its end-of-sequence token where it
    has one, else the token that it was cut off at. Padding does not exist: micro-batches are packed, and a response's
    length is part of the data, so end-of-sequence tokens inside a response (turns of an episode) end nothing. A
    `process` model is read at the end of each step; the output is the logit of the step being right.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: Literal["float32", "bfloat16"],
        kind: Kind,
        ranks: Ranks = alone,
        frozen: bool = False,
        **body: Any,
    ) -> None:
        """From a folder that `RewardModel.save` wrote it takes over the head and the calibration; from any other the
        head is zero. `body`: further arguments of `PolicyModel`. Raises `DataError`, also for a saved model of the
        other kind or one whose files have changed since."""
        super().__init__(folder, dtype=dtype, head_name="reward_head", ranks=ranks, frozen=frozen, **body)
        self.kind: Kind = kind
        self.base_model, self.base_digest = str(folder), ""
        self.calibration: Calibration | None = None
        self.filler_share: float | None = None
        """What `long_empty_beats_right` found on held-out prompts; None where nobody looked."""
        if (folder / ABOUT_FILE).exists():
            self.load_head(folder)
        else:
            self.base_digest = fingerprint(folder)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        dtype: Literal["float32", "bfloat16"],
        kind: Kind,
        ranks: Ranks = alone,
    ) -> RewardModel:
        """For scoring only, without masters. Raises `DataError` when `save` did not write this folder."""
        if not (folder / ABOUT_FILE).exists():
            raise DataError(
                f"{folder} holds no {ABOUT_FILE}, so it is no reward model; train one with stage: reward_model"
            )
        return cls(folder, dtype=dtype, kind=kind, ranks=ranks, frozen=True)

    def scores(self, groups: Sequence[Group], *, microbatch_tokens: int) -> np.ndarray:
        """[R] float32, raw, of the responses of all groups in order. Collective. Raises `ValueError` for a response
        without tokens."""
        return self._read(groups, None, microbatch_tokens)

    def step_scores(
        self, groups: Sequence[Group], ends_R: Sequence[np.ndarray], *, microbatch_tokens: int
    ) -> list[np.ndarray]:
        """[R] arrays of float32 logits, one per step; `ends_R`: after how many tokens each step ends, ascending."""
        read = self._read(groups, ends_R, microbatch_tokens)
        return np.split(read, np.cumsum([len(ends) for ends in ends_R])[:-1])

    def _read(
        self, groups: Sequence[Group], ends_R: Sequence[np.ndarray] | None, microbatch_tokens: int
    ) -> np.ndarray:
        longer, read_N = with_read_positions(groups, ends_R)
        share = deal(
            longer,
            read_N,
            microbatch_tokens=microbatch_tokens,
            rank=self.ranks.rank,
            size=self.ranks.size,
        )
        return token_values(self.outputs, self.ranks, share, len(read_N)).numpy()[read_N]

    # ---- on the disk -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def save(self, folder: Path) -> None:
        """Collective. Writes the new folder: the network as a Hugging Face model with float32 weights, the head, and
        `reward_model.json`. Raises `CheckpointFailed`, on rank 0 only."""
        weights = {}
        for name, weight in self.body.checkpoint():
            if self.ranks.rank == 0:
                weights[name] = weight.cpu().contiguous()
        if self.ranks.rank == 0:
            with writing(folder):
                write_model_folder(folder, self.folder, weights)
            self.save_head(folder)

    def save_head(self, folder: Path) -> None:
        """What makes a reward model of a folder that holds the network already. Raises `CheckpointFailed`."""
        head = {name: p.detach().cpu().contiguous() for name, p in self.head.named_parameters()}
        with writing(folder):
            save_file(head, folder / HEAD_FILE)
            about = {
                "format": FORMAT,
                "kind": self.kind,
                "base_model": self.base_model,
                "base_digest": self.base_digest,
                "calibration": None if self.calibration is None else asdict(self.calibration),
                "filler_share": self.filler_share,
                "digest": _digest_of_weights(folder),
            }
            (folder / ABOUT_FILE).write_text(json.dumps(about, indent=2), encoding="utf-8")

    @torch.no_grad()
    def load_head(self, folder: Path) -> None:
        """Takes over the head and what else `save_head` wrote. Raises `DataError`."""
        about = read_about(folder)
        if about["kind"] != self.kind:
            raise DataError(f"{folder} is a reward model of kind {about['kind']}, not {self.kind}")
        head = load_file(folder / HEAD_FILE)
        for name, parameter in self.head.named_parameters():
            if name not in head or head[name].shape != parameter.shape:
                raise DataError(
                    f"{folder / HEAD_FILE} holds the head of another network: no {name} of shape {tuple(parameter.shape)}"
                )
            parameter.copy_(head[name])
        self.calibration = about["calibration"] and Calibration(**about["calibration"])
        self.filler_share = about["filler_share"]
        self.base_model, self.base_digest = about["base_model"], about["base_digest"]


def read_about(folder: Path) -> dict[str, Any]:
    """What `reward_model.json` says, after checking that the weights beside it are those that it was written with.
    Raises `DataError`."""
    try:
        about = json.loads((folder / ABOUT_FILE).read_text(encoding="utf-8"))
        written = about["digest"]
        if about["format"] != FORMAT:
            raise DataError(
                f"{folder / ABOUT_FILE} has format {about['format']}, this version reads {FORMAT}"
            )
        found = _digest_of_weights(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder} is no complete reward model: {error}") from error
    if found != written:
        raise DataError(
            f"the weights in {folder} are not those that {ABOUT_FILE} was written with (digest {found}, there {written}); "
            "copy the whole folder again"
        )
    return about


def _digest_of_weights(folder: Path) -> str:
    """Of both files' content, mapped and not read: a large network never lies in memory twice."""
    parts = [digest(np.memmap(folder / name, mode="r").data) for name in (WEIGHTS_FILE, HEAD_FILE)]
    return digest("".join(parts).encode())


# ---- losses ------------------------------------------------------------------------------------------------


def bradley_terry(
    chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor, *, centring: float
) -> PreferenceLoss:
    """Mean of -log sigmoid(chosen - rejected - margin) + centring * (chosen + rejected)^2, of scores.

    The Bradley-Terry model of preferences as in arXiv 2203.02155, with the margin of Llama 2 (arXiv 2307.09288). Scores
    are determined up to a constant of the prompt; the second term (arXiv 2312.09244; 0.01 there) draws it to 0. For
    `centring` 0, d/d chosen = -sigmoid(margin - (chosen - rejected)). Accuracy counts chosen > rejected, whatever the
    margin.
    """
    loss_P = -logsigmoid(chosen_P - rejected_P - margin_P) + centring * (chosen_P + rejected_P).square()
    fixed_chosen_P, fixed_rejected_P = chosen_P.detach(), rejected_P.detach()
    stats = PreferenceStats(
        margin=float((fixed_chosen_P - fixed_rejected_P).mean()),
        accuracy=float((fixed_chosen_P > fixed_rejected_P).double().mean()),
        chosen_reward=float(fixed_chosen_P.mean()),
        rejected_reward=float(fixed_rejected_P.mean()),
    )
    return PreferenceLoss(loss_P.mean(), stats)


def process_loss(logits_S: Tensor, labels_S: Tensor) -> PreferenceLoss:
    """Mean over all steps of -log sigmoid(+-logit), + where the step is right: arXiv 2305.20050. `labels_S`: bool.

    d/d logit = sigmoid(logit) - label. Statistics: rewards are mean logits of right and of wrong steps, accuracy is the
    share of steps on the right side of 0.
    """
    loss = binary_cross_entropy_with_logits(logits_S, labels_S.to(logits_S.dtype))
    fixed_S = logits_S.detach()
    right, wrong = float(fixed_S[labels_S].mean()), float(fixed_S[~labels_S].mean())
    stats = PreferenceStats(
        margin=right - wrong,
        accuracy=float(torch.where(labels_S, fixed_S > 0, fixed_S < 0).double().mean()),
        chosen_reward=right,
        rejected_reward=wrong,
    )
    return PreferenceLoss(loss, stats)


# ---- before PPO --------------------------------------------------------------------------------------------


def fillers(prompt_ids: Sequence[int], end_id: int, *, num_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Answers that say nothing and must not score well: the end alone, the prompt over and over, and its last token
    over and over, the latter two with `num_tokens` tokens and the end."""
    prompt = tuple(prompt_ids)
    again = (prompt * (num_tokens // len(prompt) + 1))[:num_tokens]
    return (end_id,), (*again, end_id), (*(prompt[-1:] * num_tokens), end_id)


def long_empty_beats_right(right_P: np.ndarray, filler_P: np.ndarray) -> float:
    """Share of prompts whose filler answer scores at least as high as its right one. Equal counts, and so does a score
    that is not a number: a model that tells nothing apart fails. A policy trained on the scores of such a model learns
    to write filler, so this is looked at before PPO begins. Raises `ValueError` without scores."""
    if right_P.shape != filler_P.shape or right_P.ndim != 1 or right_P.size == 0:
        raise ValueError(f"one right and one filler score per prompt, not {right_P.shape}, {filler_P.shape}")
    return float(np.mean(~(right_P > filler_P)))
