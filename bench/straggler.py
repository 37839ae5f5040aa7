"""What the lag policies do to a few very long answers, in the simulator.

    python bench/straggler.py [STEPS]

One prompt in a hundred has answers a hundred times as long. The driver is that of a real run; time and actors are
virtual. For each policy: the time of a step; how many of the groups that ended were long, and how many of those that were
trained; which share of the sampled tokens reached the loss; what was dropped and what withheld; and what the audit's
gauges say of it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from headway.cluster.scenario import Scenario
from headway.cluster.simulate import in_folder, virtual_run
from headway.cluster.virtual import VirtualCrew
from headway.cluster.virtual_actors import VirtualRows
from headway.cluster.virtual_clock import run_virtual
from headway.core.config import Config, parse_config

SHARE, FACTOR = 0.01, 100.0
GROUP_SIZE = 8
BOUND = 4
"""On the version lag (optimizer steps)."""
POLICIES = ("pace", "drop", "withhold")


class Watched(VirtualCrew):
    """Remembers at which version of the learner each group was trained."""

    def __init__(self, config: Config, scenario: Scenario) -> None:
        super().__init__(config, scenario)
        self.rows: dict[int, tuple[VirtualRows, int]] = {}

    def _check(self, row: VirtualRows, version: int) -> None:
        super()._check(row, version)
        self.rows[row.group_id] = (row, version)


def configuration(policy: str, steps: int) -> Config:
    """16 engines that can keep one learner busy; no deadline on a group."""
    return parse_config(
        {
            "run": {"name": policy, "steps": steps, "checkpoint_every": 0, "no_progress_deadline_s": 1e5},
            "sampling": {"group_size": GROUP_SIZE, "max_new_tokens": 32768},
            "algorithm": {"dynamic_sampling": False},
            "lag": {"max_version_lag": BOUND, "policy": policy, "straggler_deadline_s": 1e5},
            "learner": {"groups_per_step": 32},
            "generation": {"replicas": 16, "max_concurrent_requests": 16 * GROUP_SIZE},
            "queue": {"max_groups": 1024, "max_mib": 1 << 20},
        }
    )


def withheld_tokens(row: VirtualRows, version: int) -> float:
    """Tokens beyond the bound when the group was trained. The longest answer took all the versions from the oldest to the
    newest, taken to have sampled as many tokens each."""
    per_version = max(row.lengths) / (row.newest - row.oldest + 1)
    too_old = max(0, version - BOUND - row.oldest)
    return sum(min(length, per_version * too_old) for length in row.lengths)


def line(policy: str, steps: int, scenario: Scenario, folder: Path) -> str:
    config = in_folder(configuration(policy, steps), folder)
    crew = Watched(config, scenario)
    run = virtual_run(config, crew)
    run_virtual(run.execute())
    records = [json.loads(text) for text in (config.run_folder / "metrics.jsonl").read_text().splitlines()]
    journal = [json.loads(text) for text in (config.run_folder / "ledger.jsonl").read_text().splitlines()]
    dropped = [record["group"] for record in journal if record["event"] == "dropped"]
    prompts = {group_id: run.prompts.at(group_id) for group_id in (*crew.rows, *dropped)}
    tokens = {
        group_id: sum(
            scenario.draw_lengths(group_id, prompt.prompt_id, GROUP_SIZE, config.sampling.max_new_tokens)
        )
        for group_id, prompt in prompts.items()
    }
    long = {group_id for group_id, prompt in prompts.items() if prompt.task == "long"}
    withheld = sum(withheld_tokens(*trained) for trained in crew.rows.values())
    of_long = sum(tokens[n] for n in crew.rows if n in long) - sum(
        withheld_tokens(*trained) for n, trained in crew.rows.items() if n in long
    )
    all_tokens, all_long = sum(tokens.values()), sum(tokens[group_id] for group_id in long)
    settled = records[BOUND + 1 :]
    step_s = (settled[-1]["time_s"] - settled[0]["time_s"]) / (len(settled) - 1)
    waited = sum(record["waited_s"] for record in settled) / sum(
        record["seconds"]["total"] for record in settled
    )
    audit = records[-1]["audit"]
    return (
        f"{policy:<9}{step_s:>8.1f} s{waited:>9.0%}{len(long) / len(prompts):>10.2%}"
        f"{len(long & crew.rows.keys()) / len(crew.rows):>9.2%}{of_long / all_long:>12.1%}"
        f"{len(dropped):>9}{sum(tokens[n] for n in dropped) / all_tokens:>10.1%}{withheld / all_tokens:>10.1%}"
        f"{max(crew.lags):>9}{audit['length_ks']:>10.4f}{audit['task_distance']:>10.4f}"
        f"{audit['trained_mean'] / audit['sampled_mean']:>10.2f}"
    )


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    scenario = Scenario(
        length_median=200,
        length_sigma=0.5,
        straggler_share=SHARE,
        straggler_factor=FACTOR,
        decode_s=0.01,
        decode_request_s=0.0001,
        engine_start_s=5,
        update_s=1,
        step_s=8,
        token_s=0,
    )
    print(
        f"{SHARE:.0%} of the prompts {FACTOR:g} x as long; {steps} steps of 32 groups of {GROUP_SIZE}, bound {BOUND}\n"
        "policy      step  learner      long     long        long     groups    tokens    tokens   largest    length      task  "
        "mean length\n"
        "                    waits     ended  trained  in the loss  dropped   dropped  withheld       lag        KS  distance  "
        "/ sampled"
    )
    with tempfile.TemporaryDirectory() as folder:
        for policy in POLICIES:
            print(line(policy, steps, scenario, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
