"""The driver's books on prompt groups: ledger, gate, room in the queue and audits, kept in step with one another."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.cluster.audit import LengthAudit
from headway.cluster.gate import Cut, Finished, Gate, cut_batch
from headway.cluster.ledger import Ledger
from headway.cluster.queue import Receipt, Room, group_bytes
from headway.cluster.state import Group
from headway.core.config import Config
from headway.core.errors import NoSignal
from headway.core.metrics import Recorder


class Groups:
    """What every group of the run came to. Decides nothing about time or actors."""

    def __init__(
        self, config: Config, longest_prompt: int, ledger: Ledger, gate: Gate, recorder: Recorder
    ) -> None:
        self._config = config
        self._recorder = recorder
        self.ledger = ledger
        self.gate = gate
        self.room = Room(
            max_groups=config.queue.max_groups,
            max_bytes=config.queue.max_mib << 20,
            group_bytes=group_bytes(
                config.sampling.group_size * max(1, len(config.data.agents)),
                longest_prompt,
                config.sampling.max_new_tokens,
            ),
        )
        self.audit = LengthAudit()
        self.live: dict[int, Group] = {}
        self.reissue: deque[int] = deque()
        """Groups that a resumed run has to issue again."""
        self._ended = [0.0, 0]
        """Sum and number of the rewards of groups that were trained or dropped since the last step."""
        self._without_signal: Counter[float] = Counter()
        """Dropped since the last group with signal, by their reward."""

    @classmethod
    def new(cls, config: Config, longest_prompt: int, journal: Path, recorder: Recorder) -> Groups:
        """Of a run that starts."""
        return cls(config, longest_prompt, Ledger(path=journal), Gate(**_limits(config)), recorder)

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
        gate = Gate.resume(version=version, queued=len(known), **_limits(config))
        groups = cls(config, longest_prompt, ledger, gate, recorder)
        groups.audit = LengthAudit.resume(state["audit"])
        for receipt in known:
            group = Group(
                group_id=receipt.group_id,
                since_version=receipt.oldest_version,
                dispatched=time.monotonic(),
                receipt=receipt,
                finished_at_version=version,
            )
            groups.live[receipt.group_id] = group
            groups._enter_queue(receipt)
        groups.reissue.extend(sorted(group_id for group_id in ledger.live if group_id not in groups.live))
        return groups, [receipt.group_id for receipt in receipts if receipt.group_id not in groups.live]

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON values."""
        return {"ledger": self.ledger.state(), "audit": self.audit.state()}

    def issue(self, engine_version: int) -> Group:
        """A group that starts on an engine which serves this version."""
        if self.reissue:
            group_id = self.reissue.popleft()
        else:
            group_id = self.ledger.issue()
            self._recorder.inc("headway_groups_total", label="issued")
        group = Group(group_id=group_id, since_version=engine_version, dispatched=time.monotonic())
        self.live[group_id] = group
        self.gate.start()
        return group

    def finish(self, group: Group, receipt: Receipt, version: int) -> str | None:
        """The group lies in the queue, the learner being at `version`. Returns why it is not to be trained, if so."""
        group.receipt, group.finished_at_version = receipt, version
        self.ledger.finish(group.group_id)
        self.gate.finish()
        self._enter_queue(receipt)
        self._recorder.inc("headway_groups_total", label="finished")
        self._recorder.observe("headway_sampled_response_tokens", receipt.response_lengths)
        self.audit.sampled.update(receipt.response_lengths)
        if receipt.num_scored < min(2, self._config.sampling.group_size):
            return "verifier_failed" if receipt.num_scored == 0 else "group_too_small"
        if not self._config.algorithm.dynamic_sampling:
            return None
        if receipt.equal_reward is None:
            self._without_signal.clear()
            return None
        self._without_signal[receipt.equal_reward] += 1
        return "no_signal"

    def drop(self, group: Group, reason: str) -> None:
        del self.live[group.group_id]
        self.ledger.drop(group.group_id, reason)
        self.gate.reject(finished=group.receipt is not None)
        if group.receipt is not None:
            self._end(group.receipt)
        self._recorder.inc("headway_groups_total", label="dropped")
        self._recorder.inc("headway_groups_dropped_total", label=reason)

    def cut(self, version: int) -> Cut:
        """What a learner at `version` does next."""
        return cut_batch(
            [
                Finished(group_id=group.group_id, oldest_version=group.receipt.oldest_version)
                for group in self.live.values()
                if group.receipt is not None
            ],
            {g.group_id: g.since_version for g in self.live.values() if g.receipt is None},
            version=version,
            groups_per_step=self._config.learner.groups_per_step,
            steps_per_batch=self._config.learner.steps_per_batch,
            max_version_lag=self._config.lag.max_version_lag,
        )

    def train(self, batch: Sequence[Group], version: int) -> None:
        """The batch, taken up at `version`, is part of the weights from here on."""
        for position, group in enumerate(batch):
            assert group.receipt is not None
            trained_at = version + position // self._config.learner.groups_per_step
            lag = trained_at - group.receipt.oldest_version
            assert 0 <= lag <= self._config.lag.max_version_lag, (lag, group)
            queue_lag = trained_at - group.finished_at_version
            self._recorder.observe("headway_version_lag_steps", [lag], label="total")
            self._recorder.observe("headway_version_lag_steps", [queue_lag], label="queue")
            self._recorder.observe("headway_version_lag_steps", [lag - queue_lag], label="generation")
            self.ledger.train(group.group_id, trained_at + 1)
            self._recorder.inc("headway_groups_total", label="trained")
            self.audit.trained.update(group.receipt.response_lengths)
            self._end(group.receipt)
            del self.live[group.group_id]

    def no_signal(self, version: int) -> NoSignal | None:
        """Set once `dynamic_sampling_tries` batches' worth of groups in a row had equal rewards."""
        limit = self._config.algorithm.dynamic_sampling_tries * self._config.groups_per_batch
        if self._without_signal.total() < limit:
            return None
        rewards = ", ".join(f"{count} at {reward:g}" for reward, count in self._without_signal.most_common(3))
        return NoSignal(
            f"{limit} groups in a row had equal rewards ({rewards}): nothing to learn at version {version}; give harder "
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
        """Gauges of the moment."""
        self._recorder.set("headway_groups_running", self.gate.running)
        self._recorder.set("headway_queue_groups", self.room.queued_groups)
        self._recorder.set("headway_queue_bytes", self.room.queued_bytes)
        self._recorder.set("headway_audit_length_ks", self.audit.ks())

    def _enter_queue(self, receipt: Receipt) -> None:
        self.room.queued_groups += 1
        self.room.queued_bytes += receipt.num_bytes

    def _end(self, receipt: Receipt) -> None:
        """The group leaves the queue for good."""
        self._ended[0] += receipt.reward_sum
        self._ended[1] += receipt.num_scored
        self.room.queued_groups -= 1
        self.room.queued_bytes -= receipt.num_bytes


def _limits(config: Config) -> dict[str, int]:
    return {
        "groups_per_step": config.learner.groups_per_step,
        "max_version_lag": config.lag.max_version_lag,
        "max_running": config.max_groups_running,
        "total_groups": config.run.steps * config.learner.groups_per_step,
    }
