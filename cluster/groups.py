"""The driver's books on prompt groups: ledger, gate, backlog, room in the queue and audits, kept in step with one
another."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from headway.cluster.audit import Audit
from headway.cluster.gate import Backlog, Cut, Gate
from headway.cluster.lag_bound import LagBound
from headway.cluster.ledger import Ledger
from headway.cluster.queue import Receipt, Room, group_bytes
from headway.cluster.state import Group
from headway.core.config import Config
from headway.core.errors import NoSignal
from headway.core.metrics import Recorder

MONOTONOUS = 200
"""Responses in a row with one reward after which a run is warned."""


class Monotony:
    """Responses in a row that all have the same reward, and what their verdicts say."""

    def __init__(self) -> None:
        self._rewards: set[float] = set()
        self._reasons: Counter[str] = Counter()
        self._is_told = False

    def see(self, receipt: Receipt) -> None:
        if len(self._rewards | set(receipt.rewards)) > 1:
            self.__init__()
        else:
            self._rewards.update(receipt.rewards)
            self._reasons.update(receipt.reasons)

    def shares(self) -> str:
        """Of the reasons, the most frequent first."""
        total = self._reasons.total()
        return ", ".join(f"{reason} {count / total:.0%}" for reason, count in self._reasons.most_common(5))

    def warning(self) -> str | None:
        """Once for each such row."""
        total = self._reasons.total()
        if self._is_told or total < MONOTONOUS:
            return None
        self._is_told = True
        what = f"have reward {next(iter(self._rewards)):g}" if self._rewards else "are unscored"
        return f"all {total} responses in a row {what} ({self.shares()}): nothing is learnt from them"


class Groups:
    """What every group of the run came to. Decides nothing about time or actors."""

    def __init__(
        self, config: Config, longest_prompt: int, ledger: Ledger, gate: Gate, recorder: Recorder
    ) -> None:
        self._config = config
        self._recorder = recorder
        self._responses = config.rows_per_group
        self.ledger = ledger
        self.gate = gate
        self.backlog = Backlog(
            groups_per_step=config.learner.groups_per_step,
            steps_per_batch=config.learner.steps_per_batch,
            max_version_lag=config.lag.max_version_lag,
            max_trained_lag=config.max_trained_lag,
            policy=config.lag.policy,
        )
        self.room = Room(
            max_groups=config.queue.max_groups,
            max_bytes=config.queue.max_mib << 20,
            group_bytes=group_bytes(self._responses, longest_prompt, config.sampling.max_new_tokens),
        )
        self.audit = Audit()
        self.monotony = Monotony()
        self.lag_bound = LagBound(
            config.lag.max_version_lag, config.lag.ess_floor, config.learner.steps_per_batch - 1
        )
        self.live: dict[int, Group] = {}
        self.reissue: deque[int] = deque()
        """Groups that have to be issued again: they ran when the run was resumed, or their rows were lost."""
        self._tasks: dict[int, str] = {}
        """Kinds of task of the groups in `live` and `reissue`."""
        self._ended = [0.0, 0]
        """Sum and number of the rewards of groups that were trained or dropped since the last step."""
        self._without_signal: Counter[float] = Counter()
        """Dropped since the last group with signal, by their reward."""
        self._distances: dict[str, float] | None = None
        """Of the audit, as of the last batch."""
        self._set_bound()

    @classmethod
    def new(cls, config: Config, longest_prompt: int, journal: Path, recorder: Recorder) -> Groups:
        """Of a run that starts."""
        return cls(config, longest_prompt, Ledger(path=journal), _gate(config), recorder)

    @classmethod
    def nothing(cls, config: Config, longest_prompt: int) -> dict[str, Any]:
        """The `state` of a run that has issued no group."""
        return cls(config, longest_prompt, Ledger(), _gate(config), Recorder()).state()

    @classmethod
    def resume(
        cls,
        config: Config,
        longest_prompt: int,
        journal: Path,
        recorder: Recorder,
        *,
        state: dict[str, Any],
        version: int,
        receipts: Sequence[Receipt],
    ) -> tuple[Groups, list[int]]:
        """Of a run that goes on from `state`, with what the queue holds; also the queue's groups that the ledger does
        not know.

        The two snapshots are not of one instant: what finished between them is in the queue but not yet in the ledger,
        or the other way round. The queue decides what is finished, the ledger what exists.
        """
        ledger = Ledger.resume(state["ledger"], path=journal, version=version)
        known = [receipt for receipt in receipts if receipt.group_id in ledger.live]
        ledger.restate(finished={receipt.group_id for receipt in known})
        groups = cls(config, longest_prompt, ledger, _gate(config, version, len(known)), recorder)
        groups.audit = Audit.resume(state["audit"])
        groups.lag_bound.resume(state["lag_bound"])
        groups._set_bound()
        groups._tasks = {int(group_id): task for group_id, task in state["tasks"].items()}
        for receipt in known:
            group_id = receipt.group_id
            groups.live[group_id] = Group(
                group_id=group_id,
                task=groups._tasks[group_id],
                since_version=receipt.oldest_version,
                dispatched=0.0,  # on the clock of another process; a finished group has no deadline any more
                receipt=receipt,
                finished_at_version=version,
            )
            groups.backlog.start(group_id, receipt.oldest_version)
            groups.backlog.finish(group_id, receipt.oldest_version, receipt.newest_version)
            groups._enter_queue(receipt)
        groups.reissue.extend(sorted(group_id for group_id in ledger.live if group_id not in groups.live))
        return groups, [receipt.group_id for receipt in receipts if receipt.group_id not in groups.live]

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON values."""
        return {
            "ledger": self.ledger.state(),
            "audit": self.audit.state(),
            "lag_bound": self.lag_bound.state(),
            "tasks": {str(group_id): task for group_id, task in self._tasks.items()},
        }

    def issue(self, engine_version: int, task: Callable[[int], str], now: float) -> Group:
        """A group that starts, at time `now`, on an engine which serves this version. `task` says the kind of task of a
        group id."""
        if self.reissue:
            group_id = self.reissue.popleft()
            self._recorder.inc("headway_groups_reissued_total")
        else:
            group_id = self.ledger.issue()
            self._tasks[group_id] = task(group_id)
            self.audit.dispatch(self._tasks[group_id])
            self._recorder.inc("headway_groups_total", label="issued")
        group = Group(
            group_id=group_id, task=self._tasks[group_id], since_version=engine_version, dispatched=now
        )
        self.live[group_id] = group
        self.backlog.start(group_id, engine_version)
        self.gate.start()
        return group

    def restart(self, group: Group, engine_version: int, now: float) -> None:
        """A running group whose actor died starts over, at an engine that serves its version or a newer one."""
        assert engine_version >= group.since_version, (engine_version, group)
        self.ledger.restart(group.group_id)
        self.backlog.restart(group.group_id, engine_version)
        group.since_version, group.dispatched = engine_version, now
        self._recorder.inc("headway_groups_reissued_total")

    def finish(self, group: Group, receipt: Receipt, version: int) -> str | None:
        """The group lies in the queue, the learner being at `version`. Returns why it is not to be trained, if so."""
        group.receipt, group.finished_at_version = receipt, version
        self.ledger.finish(group.group_id)
        self.backlog.finish(group.group_id, receipt.oldest_version, receipt.newest_version)
        self.gate.finish()
        self._enter_queue(receipt)
        self._recorder.inc("headway_groups_total", label="finished")
        self._recorder.observe("headway_sampled_response_tokens", receipt.response_lengths)
        self.monotony.see(receipt)
        if receipt.num_scored < min(2, self._config.sampling.group_size):
            return "verifier_failed" if receipt.num_scored == 0 else "group_too_small"
        if not self._config.algorithm.dynamic_sampling:
            return None
        if receipt.equal_reward is None:
            self._without_signal.clear()
            return None
        self._without_signal[receipt.equal_reward] += 1
        return "no_signal"

    def lose(self, group_ids: Iterable[int]) -> None:
        """The rows of these finished groups died with the queue: they are issued again, before any other."""
        again = sorted(group_ids)
        for group_id in again:
            group = self.live[group_id]
            assert group.receipt is not None, group
            self.ledger.lose(group_id)
            self.gate.reject(finished=True)
            self._forget(group)
            self._leave_queue(group.receipt)
        self.reissue.extendleft(reversed(again))

    def drop(self, group: Group, reason: str) -> None:
        self.ledger.drop(group.group_id, reason)
        self.gate.reject(finished=group.receipt is not None)
        self._forget(group)
        del self._tasks[group.group_id]
        if group.receipt is None:
            self.audit.give_up(self._responses)
        else:
            self.audit.drop(group.receipt.response_lengths, group.receipt.rewards)
            self._end(group.receipt)
        self._recorder.inc("headway_groups_total", label="dropped")
        self._recorder.inc("headway_groups_dropped_total", label=reason)

    def cut(self, version: int) -> Cut:
        """What a learner at `version` does next."""
        return self.backlog.cut(version)

    def train(self, batch: Sequence[Group], version: int) -> None:
        """The batch, taken up at `version`, is part of the weights from here on."""
        lags: dict[str, list[int]] = {"total": [], "queue": [], "generation": []}
        for position, group in enumerate(batch):
            receipt = group.receipt
            assert receipt is not None, group
            trained_at = version + position // self._config.learner.groups_per_step
            lag = self._trained_lag(receipt, trained_at)
            queue_lag = trained_at - group.finished_at_version
            lags["total"].append(lag)
            lags["queue"].append(queue_lag)
            lags["generation"].append(lag - queue_lag)
            self.ledger.train(group.group_id, trained_at + 1)
            self._forget(group)
            del self._tasks[group.group_id]
            self.audit.train(group.task, receipt.response_lengths, receipt.rewards)
            self._end(receipt)
        for phase, steps in lags.items():
            self._recorder.observe("headway_version_lag_steps", steps, label=phase)
        self._recorder.inc("headway_groups_total", len(batch), label="trained")
        self._distances = None

    def _trained_lag(self, receipt: Receipt, trained_at: int) -> int:
        """Lag of the group's oldest token that is in the loss: older ones are left out where the lag policy allows them
        to exist. The last check on the bound."""
        limit = self._config.max_trained_lag
        whole = self._config.lag.policy in ("pace", "drop")
        assert receipt.newest_version <= trained_at, (trained_at, receipt)
        assert trained_at - (receipt.oldest_version if whole else receipt.newest_version) <= limit, (
            trained_at,
            receipt,
        )
        return min(trained_at - receipt.oldest_version, limit)

    def observe_ess(self, ess_fraction: float | None) -> None:
        """Moves the effective bound by the importance ESS fraction of an optimizer step."""
        self.lag_bound.observe(ess_fraction)
        self._set_bound()

    def no_signal(self, version: int) -> NoSignal | None:
        """Set once `dynamic_sampling_tries` batches' worth of groups in a row had equal rewards."""
        limit = self._config.algorithm.dynamic_sampling_tries * self._config.groups_per_batch
        if self._without_signal.total() < limit:
            return None
        rewards = ", ".join(f"{count} at {reward:g}" for reward, count in self._without_signal.most_common(3))
        return NoSignal(
            f"{limit} groups in a row had equal rewards ({rewards}): nothing to learn at version {version}"
            + (f" (verdicts: {shares})" if (shares := self.monotony.shares()) else "")
            + "; give harder "
            "or easier prompts (data), raise sampling.group_size or algorithm.dynamic_sampling_tries, or set "
            "algorithm.dynamic_sampling=false; --resume goes on from here"
        )

    def take_sampled_reward(self) -> float | None:
        """Mean reward of the responses whose groups were trained or dropped since the last call: of all that was
        sampled, each counted once. None without any."""
        total, number = self._ended
        self._ended = [0.0, 0]
        return total / number if number else None

    def observe(self) -> None:
        """Gauges of the moment; those of the audit are of the last batch."""
        self._recorder.set("headway_groups_running", self.gate.running)
        self._recorder.set("headway_queue_groups", self.room.queued_groups)
        self._recorder.set("headway_queue_bytes", self.room.queued_bytes)
        if self._distances is None:
            self._distances = {
                "headway_audit_length_ks": self.audit.length_ks(),
                "headway_audit_reward_ks": self.audit.reward_ks(),
                "headway_audit_task_distance": self.audit.task_distance(),
            }
        for name, distance in self._distances.items():
            self._recorder.set(name, distance)

    def _set_bound(self) -> None:
        self.gate.bound = self.lag_bound.bound
        self._recorder.set("headway_effective_version_lag_steps", self.gate.bound)

    def _enter_queue(self, receipt: Receipt) -> None:
        self.room.queued_groups += 1
        self.room.queued_bytes += receipt.num_bytes

    def _leave_queue(self, receipt: Receipt) -> None:
        self.room.queued_groups -= 1
        self.room.queued_bytes -= receipt.num_bytes

    def _end(self, receipt: Receipt) -> None:
        """The group leaves the queue for good."""
        self._ended[0] += receipt.reward_sum
        self._ended[1] += receipt.num_scored
        self._leave_queue(receipt)

    def _forget(self, group: Group) -> None:
        del self.live[group.group_id]
        self.backlog.remove(group.group_id)


def _gate(config: Config, version: int = 0, queued: int = 0) -> Gate:
    """The gate of a run that has applied `version` steps and holds `queued` finished groups."""
    return Gate.resume(
        version=version,
        queued=queued,
        groups_per_step=config.learner.groups_per_step,
        total_groups=config.run.steps * config.learner.groups_per_step,
        bound=config.lag.max_version_lag,
    )
