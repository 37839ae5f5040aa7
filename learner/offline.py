"""Optimizer steps on rows that are there already: demonstrations, preference pairs, labelled answers, steps of answers.

_U: what a row's loss is made of, of all rows of the step: log-probabilities of whole responses, or scores; _N: response
tokens of the step, flattened; _M: those of a micro-batch that are looked at.

A loss on pairs needs both responses at once, and some need the whole step, however it is cut into micro-batches and
spread over ranks. So a step goes through the model twice: first without gradient for the numbers [U]; the derivative of
the loss with respect to each of them is then that response's weight in the second pass, whose loss is a weighted sum
over tokens. This is the same gradient, exactly, for every cut. Where a rank's share is one micro-batch, the first pass keeps
its gradient and there is no second one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from headway.core.errors import DataError
from headway.learner import preference
from headway.learner.batching import Group, MicroBatch, deal
from headway.learner.checkpoint import writing
from headway.learner.learner_state import load_learner, save_learner, write_model_folder
from headway.learner.model import EMPTY, PolicyModel
from headway.learner.preference import Margins, PreferenceLoss, PreferenceStats
from headway.learner.reward_model import (
    Kind,
    RewardModel,
    bradley_terry,
    calibration_of,
    process_loss,
    token_values,
    with_read_positions,
)
from headway.learner.sft import Demonstration, accumulate, group_of
from headway.learner.sharding import Ranks, alone
from headway.learner.trainer import NonFiniteStep, adamw

Objective = Literal[
    "sft", "reward_model", "process_reward_model", "dpo", "ipo", "kto", "orpo", "simpo", "beta_dpo"
]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
WITH_REFERENCE = frozenset({"dpo", "ipo", "kto", "beta_dpo"})
"""Objectives that compare with the log-probabilities of the initial weights."""
_KINDS: dict[Objective, Kind] = {"reward_model": "outcome", "process_reward_model": "process"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PairIds:
    """A preference pair as tokens."""

    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    """With its end-of-sequence token."""
    rejected_ids: tuple[int, ...]
    margin: float = 0.0
    reference: tuple[float, float] | None = None
    """Log-probabilities of the two under the initial weights, nats; None where not computed."""

    @property
    def answers(self) -> tuple[tuple[int, ...], ...]:
        return self.chosen_ids, self.rejected_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledIds:
    """A labelled answer as tokens, with an answer to another prompt beside it. `labelled_ids` makes them."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    """With its end-of-sequence token."""
    mismatched_ids: tuple[int, ...]
    """The completion of another row."""
    label: bool
    reference: tuple[float, float] | None = None
    """As for pairs, of the completion and of the mismatched one."""

    @property
    def answers(self) -> tuple[tuple[int, ...], ...]:
        return self.completion_ids, self.mismatched_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class StepIds:
    """An answer as tokens, with which of its steps are right."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    step_ends: tuple[int, ...]
    """After how many tokens each step ends, ascending."""
    labels: tuple[bool, ...]

    @property
    def answers(self) -> tuple[tuple[int, ...], ...]:
        return (self.response_ids,)


OfflineRow = Demonstration | PairIds | LabelledIds | StepIds
T = TypeVar("T")
Row = TypeVar("Row", bound=OfflineRow)

_ROWS: dict[Objective, type] = {
    "sft": Demonstration,
    "process_reward_model": StepIds,
    "kto": LabelledIds,
}
"""What an objective learns from, where not pairs."""


def labelled_ids(
    rows: Sequence[tuple[Sequence[int], Sequence[int], bool]],
    more: Sequence[tuple[Sequence[int], Sequence[int], bool]] = (),
) -> list[LabelledIds]:
    """From (prompt ids, completion ids, label): beside each the completion of the next row that has another prompt, the
    first ones following the last; where there is none, of the first such row in `more`. Raises `DataError` when all rows
    have the same prompt."""
    found = []
    for number, (prompt, completion, label) in enumerate(rows):
        others = chain((rows[(number + ahead) % len(rows)] for ahead in range(1, len(rows))), more)
        mismatched = next((other[1] for other in others if list(other[0]) != list(prompt)), None)
        if mismatched is None:
            raise DataError(
                "all rows to train on have the same prompt; kto needs answers to several to estimate its KL"
            )
        found.append(
            LabelledIds(
                prompt_ids=tuple(prompt),
                completion_ids=tuple(completion),
                mismatched_ids=tuple(mismatched),
                label=label,
            )
        )
    return found


def batch_at(rows: Sequence[T], position: int, size: int, seed: int) -> list[T]:
    """`size` rows from number `position` on of an endless sequence in which every epoch holds each row once, in a
    seeded order of its own."""
    found = []
    orders: dict[int, list[int]] = {}
    for number in range(position, position + size):
        epoch, place = divmod(number, len(rows))
        if epoch not in orders:
            orders[epoch] = list(range(len(rows)))
            random.Random(f"{seed}/{epoch}").shuffle(orders[epoch])
        found.append(rows[orders[epoch][place]])
    return found


def write_rows(rows: Sequence[PairIds] | Sequence[LabelledIds] | Sequence[StepIds], path: Path) -> None:
    """A Parquet file of rows of one kind, references included."""
    pq.write_table(pa.Table.from_pylist([asdict(row) for row in rows]), path)


def read_rows(path: Path) -> list[PairIds | LabelledIds | StepIds]:
    """What `write_rows` wrote."""
    table = pq.read_table(path)
    kind = next(k for k in (PairIds, LabelledIds, StepIds) if set(k.__slots__) == set(table.column_names))
    rows: list[dict[str, Any]] = [
        {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
        for row in table.to_pylist()
    ]
    return [kind(**row) for row in rows]


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineSettings:
    """What a trainer is made from."""

    objective: Objective
    dtype: Literal["float32", "bfloat16"]
    """Of the network; masters are float32."""
    microbatch_tokens: int
    learning_rate: float
    warmup_steps: int = 0
    """Linear, then constant."""
    weight_decay: float = 0.0
    adam_betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float = 1.0
    lora_rank: int = 0
    """0: all weights are trained."""
    lora_alpha: float = 32.0
    activation_checkpointing: bool = False
    beta: float = 0.1
    """Of dpo, ipo, kto, simpo, and the fixed part of beta_dpo."""
    label_smoothing: float = 0.0
    """Of dpo: share of wrong labels, below 0.5; 0 is DPO itself."""
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    """Of kto; `preference.kto_weights` balances them."""
    orpo_coef: float = 0.1
    gamma: float = 0.5
    """Of simpo: margin aimed at, in units of its reward."""
    beta_scaling: float = 0.6
    beta_keep_fraction: float = 0.8
    beta_momentum: float = 0.9
    """Of beta_dpo: how much beta follows the margins, share of pairs kept, memory of the running margins."""
    centring: float = 0.01
    """Of reward_model: weight of (chosen + rejected)^2; 0: none."""
    seed: int = 0
    """Of the pairs that beta_dpo draws."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineStats:
    """What one step did, or what the rows held out give."""

    version: int
    """Optimizer steps applied, this one included."""
    loss: float
    preference: PreferenceStats | None
    """None for sft."""
    num_rows: int
    num_tokens: int
    """Of all answers."""
    grad_norm: float | None = None
    """Before clipping; None without a step."""
    learning_rate: float | None = None


class OfflineTrainer:
    """A policy or a reward model with its optimizer. Everything is collective: every rank calls it with the same rows.

    Objectives in `WITH_REFERENCE` need rows that `with_reference` has filled in, before the first step, from the
    initial weights: no second model is held. Raises `DataError` when the model folder cannot be used.
    """

    def __init__(self, settings: OfflineSettings, model_folder: Path, ranks: Ranks = alone) -> None:
        self.settings = settings
        self.ranks = ranks
        body: dict[str, Any] = {
            "lora_rank": settings.lora_rank,
            "lora_alpha": settings.lora_alpha,
            "activation_checkpointing": settings.activation_checkpointing,
        }
        self.reward: RewardModel | None = None
        if settings.objective in _KINDS:
            kind = _KINDS[settings.objective]
            self.reward = RewardModel(model_folder, dtype=settings.dtype, kind=kind, ranks=ranks, **body)
            self.policy = self.reward.body
            # Those of the model that it starts from are not those of what it becomes.
            self.reward.calibration = self.reward.filler_share = None
        else:
            self.policy = PolicyModel(model_folder, dtype=settings.dtype, ranks=ranks, **body)
        self.version = 0
        self.position = 0
        """Rows trained on, counted again in every epoch: where `batch_at` goes on."""
        self.margins = Margins()
        masters = self.policy.masters if self.reward is None else self.reward.body_masters
        self.optimizer = adamw(masters, settings.learning_rate, settings.weight_decay, settings.adam_betas)
        if self.reward is not None:
            # A group of its own: on several ranks it is not sharded, and the two do not mix.
            self.optimizer.add_param_group(
                {"params": list(self.reward.head_masters.values()), "weight_decay": 0.0}
            )

    # ---- steps -----------------------------------------------------------------------------------------------

    def step(self, rows: Sequence[OfflineRow]) -> OfflineStats:
        """One optimizer step on the mean loss of the rows. Raises `NonFiniteStep` (weights and optimizer are then as
        before), and `ValueError` for rows that the objective cannot learn from."""
        self._check(rows)
        work = self._work(rows)
        self._zero_grad()
        loss, stats, margins = self._backward(rows, work)
        norm = self._clip_grad()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._zero_grad()
            what = "the gradient" if math.isfinite(loss) else "the loss"
            numbers = range(self.position, self.position + len(rows))
            raise NonFiniteStep(what, self.version, [f"row {number}" for number in numbers])
        learning_rate = self.settings.learning_rate * min(
            1.0, (self.version + 1) / max(1, self.settings.warmup_steps)
        )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self._zero_grad()
        self.policy.refresh()
        self.margins = margins
        self.version += 1
        self.position += len(rows)
        return OfflineStats(
            version=self.version,
            loss=loss,
            preference=stats,
            num_rows=len(rows),
            num_tokens=work.num_tokens,
            grad_norm=norm,
            learning_rate=learning_rate,
        )

    def evaluate(self, rows: Sequence[OfflineRow]) -> OfflineStats:
        """Loss and statistics of rows under the current weights, which stay as they are. For beta_dpo those of dpo."""
        self._check(rows)
        work = self._work(rows)
        values_U = work.units(self._look(work, self._share(work, work.looked_at_N)))
        objective = "dpo" if self.settings.objective == "beta_dpo" else self.settings.objective
        result, _ = self._loss(objective, values_U, rows, work)
        return OfflineStats(
            version=self.version,
            loss=float(result.loss),
            preference=None if objective == "sft" else result.stats,
            num_rows=len(rows),
            num_tokens=work.num_tokens,
        )

    def with_reference(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with the log-probabilities of their answers under the initial weights; for an objective without a
        reference as they are. To resume, call this before `load`, or keep the rows. Raises `ValueError` after the first
        step."""
        if self.settings.objective not in WITH_REFERENCE or not rows:
            return list(rows)
        if self.version:
            raise ValueError(f"the weights have made {self.version} steps: they are no reference any more")
        work = self._work(rows)
        values_U = work.units(self._look(work, self._share(work, work.looked_at_N)))
        pairs = values_U.reshape(len(rows), 2).tolist()
        return [replace(row, reference=tuple(pair)) for row, pair in zip(rows, pairs, strict=True)]  # type: ignore[misc]

    def calibrate(self, rows: Sequence[OfflineRow]) -> None:
        """Sets the reward model's scale from the scores of all answers of rows held out. Raises `DataError` when they
        do not differ."""
        if self.reward is None:
            raise ValueError(f"{self.settings.objective} trains no reward model")
        scores = self.reward.scores(
            [group_of(row) for row in rows],  # type: ignore[arg-type]
            microbatch_tokens=self.settings.microbatch_tokens,
        )
        self.reward.calibration = calibration_of(scores)

    def _check(self, rows: Sequence[OfflineRow]) -> None:
        objective = self.settings.objective
        kind = _ROWS.get(objective, PairIds)
        if not rows:
            raise ValueError("a step needs rows")
        for row in rows:
            if not isinstance(row, kind):
                raise ValueError(f"{objective} learns from {kind.__name__}, not from {type(row).__name__}")
            if objective in WITH_REFERENCE and row.reference is None:  # type: ignore[union-attr]
                raise ValueError(f"{objective} needs rows with reference log-probabilities (with_reference)")

    # ---- passes ----------------------------------------------------------------------------------------------

    def _work(self, rows: Sequence[OfflineRow]) -> _Work:
        groups = [group_of(row) for row in rows]  # type: ignore[arg-type]
        lengths_R = np.concatenate([group.lengths for group in groups])
        if self.reward is None:
            return _Work(
                groups=groups,
                looked_at_N=np.ones(int(lengths_R.sum()), dtype=np.bool_),
                unit_N=torch.from_numpy(np.repeat(np.arange(len(lengths_R)), lengths_R)),
                lengths_R=torch.from_numpy(lengths_R),
                num_units=len(lengths_R),
            )
        ends_R = [np.array(row.step_ends) for row in rows if isinstance(row, StepIds)] or None
        longer, read_N = with_read_positions(groups, ends_R)
        return _Work(
            groups=longer,
            looked_at_N=read_N,
            unit_N=torch.from_numpy(np.cumsum(read_N) - 1),  # every place that is read by itself
            lengths_R=torch.from_numpy(lengths_R),
            num_units=int(read_N.sum()),
        )

    def _values(self, batch: MicroBatch) -> Tensor:
        """[M] float32: log-probabilities of the tokens, or scores read there."""
        if self.reward is not None:
            return self.reward.outputs(batch)
        return self.policy.logprobs(batch, temperature=1.0).logprobs

    def _share(self, work: _Work, looked_at_N: np.ndarray) -> list[MicroBatch | None]:
        budget = self.settings.microbatch_tokens
        return deal(
            work.groups, looked_at_N, microbatch_tokens=budget, rank=self.ranks.rank, size=self.ranks.size
        )

    def _look(self, work: _Work, share: Sequence[MicroBatch | None]) -> Tensor:
        return token_values(self._values, self.ranks, share, len(work.looked_at_N))

    def _backward(
        self, rows: Sequence[OfflineRow], work: _Work
    ) -> tuple[float, PreferenceStats | None, Margins]:
        """Leaves the gradient of the loss."""
        if self.settings.objective == "sft":  # its weights are known beforehand
            budget = self.settings.microbatch_tokens
            part = accumulate(self.policy, rows, weight=1.0, microbatch_tokens=budget)  # type: ignore[arg-type]
            return sum(self.ranks.all_gather(part)), None, self.margins
        share = self._share(work, work.looked_at_N)
        batch, values_M = EMPTY, None
        if len(share) == 1:
            batch = share[0] or EMPTY
            values_M = self._values(batch)
            own_M = values_M.detach()
            values_N = token_values(lambda _: own_M, self.ranks, share, len(work.looked_at_N))
        else:
            values_N = self._look(work, share)
        values_U = work.units(values_N).requires_grad_()
        result, margins = self._loss(self.settings.objective, values_U, rows, work)
        result.loss.backward()
        assert values_U.grad is not None
        weights_U = values_U.grad.float()
        if not torch.isfinite(weights_U).all():
            return math.nan, None, self.margins  # the same on all ranks: none of them goes on
        if values_M is not None:
            _weigh(values_M, batch, weights_U, work)
        else:
            # What has no weight, such as pairs left out, needs no second pass.
            weighed_N = work.looked_at_N & (weights_U[work.unit_N] != 0).numpy()
            for part in self._share(work, weighed_N):
                _weigh(self._values(part or EMPTY), part or EMPTY, weights_U, work)
        return float(result.loss.detach()), result.stats, margins

    def _loss(
        self, objective: Objective, values_U: Tensor, rows: Sequence[Any], work: _Work
    ) -> tuple[PreferenceLoss, Margins]:
        s = self.settings
        if objective == "sft":
            nothing = PreferenceStats(
                margin=math.nan, accuracy=math.nan, chosen_reward=math.nan, rejected_reward=math.nan
            )
            return PreferenceLoss(-values_U.sum() / work.num_tokens, nothing), self.margins
        if objective == "process_reward_model":
            labels_U = torch.tensor([label for row in rows for label in row.labels])
            return process_loss(values_U, labels_U), self.margins
        first_P, second_P = values_U[0::2], values_U[1::2]
        if objective == "reward_model":
            margin_P = torch.tensor([row.margin for row in rows], dtype=values_U.dtype)
            return bradley_terry(first_P, second_P, margin_P, centring=s.centring), self.margins
        tokens_P = (work.lengths_R[0::2], work.lengths_R[1::2])
        if objective == "orpo":
            return preference.orpo(first_P, second_P, *tokens_P, coef=s.orpo_coef), self.margins
        if objective == "simpo":
            return preference.simpo(first_P, second_P, *tokens_P, beta=s.beta, gamma=s.gamma), self.margins
        reference_P2 = torch.tensor([row.reference for row in rows], dtype=values_U.dtype)
        references = (reference_P2[:, 0], reference_P2[:, 1])
        if objective == "dpo":
            return preference.dpo(
                first_P, second_P, *references, beta=s.beta, label_smoothing=s.label_smoothing
            ), self.margins
        if objective == "ipo":
            return preference.ipo(first_P, second_P, *references, *tokens_P, beta=s.beta), self.margins
        if objective == "kto":
            return preference.kto(
                first_P,
                references[0],
                torch.tensor([row.label for row in rows]),
                second_P,
                references[1],
                beta=s.beta,
                desirable_weight=s.desirable_weight,
                undesirable_weight=s.undesirable_weight,
            ), self.margins
        return preference.beta_dpo(
            first_P,
            second_P,
            *references,
            beta=s.beta,
            scaling=s.beta_scaling,
            keep_fraction=s.beta_keep_fraction,
            momentum=s.beta_momentum,
            before=self.margins,
            generator=torch.Generator().manual_seed((s.seed << 32) + self.version),
        )

    def _zero_grad(self) -> None:
        (self.policy if self.reward is None else self.reward).zero_grad()

    def _clip_grad(self) -> float:
        return (self.policy if self.reward is None else self.reward).clip_grad(self.settings.max_grad_norm)

    # ---- on the disk -----------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Writes a checkpoint into an existing folder (`learner_state.save_learner`). Its `model/` is a folder that
        `model.path` accepts, or a reward model. Raises `CheckpointFailed`, on rank 0 only."""
        extra = {
            "objective": self.settings.objective,
            "position": self.position,
            "margins": [self.margins.mean, self.margins.std],
        }
        save_learner(folder, self.policy, self.optimizer, self.version, extra)
        if self.reward is not None and self.ranks.rank == 0:
            self.reward.save_head(folder / "model")

    def load(self, folder: Path) -> None:
        """Takes up where `save` left off, bit for bit on the same number of ranks. Raises `DataError` when `folder`
        holds another model or objective."""
        if self.reward is not None:
            self.reward.load_head(folder / "model")
        self.version, extra = load_learner(folder, self.policy, self.optimizer)
        if extra["objective"] != self.settings.objective:
            raise DataError(
                f"checkpoint {folder} is of the objective {extra['objective']}, not {self.settings.objective}"
            )
        self.position = extra["position"]
        self.margins = Margins(*extra["margins"])

    @torch.no_grad()
    def export(self, folder: Path) -> None:
        """Writes the new folder: a Hugging Face model with float32 weights that `model.path` accepts, an adapter added
        in, or what `RewardModel.load` reads. Raises `CheckpointFailed`, on rank 0 only."""
        if self.reward is not None:
            self.reward.save(folder)
            return
        weights = {}
        for name, weight in self.policy.checkpoint():
            if self.ranks.rank == 0:
                weights[name] = weight.cpu().contiguous()
        if self.ranks.rank == 0:
            with writing(folder):
                write_model_folder(folder, self.policy.folder, weights)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """The rows of a step, ready for passes."""

    groups: list[Group]
    looked_at_N: np.ndarray
    """bool: where a log-probability or a score is needed."""
    unit_N: Tensor
    """int64 in [0, U) where looked at."""
    lengths_R: Tensor
    """int64, tokens of each answer."""
    num_units: int

    @property
    def num_tokens(self) -> int:
        return int(self.lengths_R.sum())

    def units(self, values_N: Tensor) -> Tensor:
        """[U] float64: sums over each unit's tokens. A response's float32 log-probabilities lose nothing more."""
        looked_at_N = torch.from_numpy(self.looked_at_N)
        sums_U = torch.zeros(self.num_units, dtype=torch.float64)
        return sums_U.index_add_(0, self.unit_N[looked_at_N], values_N[looked_at_N].double())


def _weigh(values_M: Tensor, batch: MicroBatch, weights_U: Tensor, work: _Work) -> None:
    """Adds the gradient of the sum of values, each times its unit's weight."""
    weights_M = weights_U[work.unit_N[batch.token_index]].to(values_M.device)
    (weights_M * values_M).sum().backward()
