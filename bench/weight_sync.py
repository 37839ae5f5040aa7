"""From the learner's weights to every engine serving them: SmolLM2-135M in bfloat16 (269 MB), one node, two engines.

python bench/weight_sync.py [ENGINES]
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

from headway.cluster.joining import connect, disconnect
from headway.cluster.ray_crew import RayCrew
from headway.core.config import Config, parse_config
from headway.learner.pretrained import model_folder

ROUNDS = 6


async def measure(config: Config, folder: Path) -> None:
    crew = RayCrew(config, folder, str(model_folder(config.model.path)))
    engines = range(config.generation.replicas)
    totals, published, num_bytes = [], [], 0
    stages: dict[str, list[float]] = {"fetch": [], "pause": [], "load": []}
    try:
        await crew.open()
        await crew.start_learner()
        await asyncio.gather(*(crew.start_engine(replica) for replica in engines))
        for number in range(ROUNDS):
            began = time.perf_counter()
            release = await crew.publish(0)
            num_bytes = release.manifest.num_bytes
            took = time.perf_counter() - began
            await asyncio.gather(*(crew.update_engine(replica, release) for replica in engines))
            if number == 0:
                [await crew.report(replica) for replica in engines]
                continue  # the first round touches fresh memory
            published.append(took)
            totals.append(time.perf_counter() - began)
            for report in [await crew.report(replica) for replica in engines]:
                for name, stage, payload in report.updates:
                    if (
                        name == "headway_weight_sync_seconds"
                        and stage in stages
                        and isinstance(payload, tuple)
                    ):
                        stages[stage].append(payload[1])
    finally:
        await crew.close()
    print(
        f"{num_bytes / 1e6:.0f} MB to {len(engines)} engines: publish {statistics.median(published):.2f} s, until every "
        f"engine serves it {statistics.median(totals):.2f} s"
    )
    for stage, seconds in stages.items():
        print(f"  {stage} per engine: {statistics.median(seconds):.2f} s")


def main() -> None:
    config = parse_config(
        {
            "run": {"name": "bench-sync"},
            "generation": {
                "replicas": int(sys.argv[1]) if len(sys.argv) > 1 else 2,
                "cpus": 0.5,
                "threads": 1,
                "max_model_len": 128,
            },
        }
    )
    connect(config)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(config, Path(folder)))
    disconnect()


if __name__ == "__main__":
    main()
