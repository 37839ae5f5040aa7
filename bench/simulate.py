"""How fast the simulator is: a cluster of 1,000 engines that samples a million rollouts, on one core.

    python bench/simulate.py [ENGINES] [GROUPS]

The driver is that of a real run, with its ledger and metrics on disk; only time and the actors are virtual.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from headway.cluster.scenario import Scenario
from headway.cluster.simulate import simulate
from headway.core.config import Config, parse_config

GROUP_SIZE = 8
GROUPS_PER_ENGINE = 8


def cluster(engines: int, groups: int) -> Config:
    """A run of `groups` groups at lag 2, whose engines and queue are large enough to be busy all the time."""
    groups_per_step = engines * GROUPS_PER_ENGINE // 4
    return parse_config(
        {
            "run": {"name": "cluster", "steps": max(1, groups // groups_per_step), "checkpoint_every": 0},
            "sampling": {"group_size": GROUP_SIZE, "max_new_tokens": 8192},
            "lag": {"max_version_lag": 4},
            "learner": {"groups_per_step": groups_per_step},
            "generation": {"replicas": engines, "max_concurrent_requests": GROUP_SIZE * GROUPS_PER_ENGINE},
            "queue": {"max_groups": 4 * groups_per_step, "max_mib": 1 << 30},
            "metrics": {"heartbeat_s": 30.0},
        }
    )


def main() -> None:
    engines, groups = (int(sys.argv[i]) if len(sys.argv) > i else n for i, n in ((1, 1000), (2, 125_000)))
    config = cluster(engines, groups)
    scenario = Scenario(length_median=1000, step_s=20, token_s=0, publish_s=2, update_s=5, pause_s=1)
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        result = simulate(config, scenario, Path(folder))
    cpu_s, groups = time.process_time() - began, result.rollouts // GROUP_SIZE
    print(
        f"{engines} engines, {result.steps} steps, {result.rollouts:,} rollouts trained in {result.wall_s:.1f} s, {cpu_s:.1f} s "
        f"of CPU ({groups / result.wall_s:,.0f} groups/s, {1e6 * cpu_s / groups:.0f} us of CPU a group); "
        f"{result.run_s:,.0f} virtual seconds, engines busy {result.engine_busy_share:.0%}, learner idle "
        f"{result.learner_idle_share:.0%}, lag p50 {result.lag_p50} max {result.lag_max}"
    )


if __name__ == "__main__":
    main()
