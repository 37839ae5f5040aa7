"""From the learner's weights to every engine serving them: SmolLM2-135M in bfloat16 (269 MB), one node, two engines.

python bench/weight_sync.py [ENGINES]
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import ray

from headway.cluster.placement import Placement, connect
from headway.core.config import parse_config
from headway.learner.pretrained import model_folder

ROUNDS = 6


def main() -> None:
    engines_wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    config = parse_config(
        {
            "run": {"name": "bench-sync"},
            "generation": {"replicas": engines_wanted, "cpus": 0.5, "threads": 1, "max_model_len": 128},
        }
    )
    folder = str(model_folder(config.model.path))
    connect(config)
    place = Placement(config, config.run_folder.resolve())
    place.reserve()
    (learner,) = place.learners(folder)
    engines = [place.engine(replica, folder) for replica in range(engines_wanted)]
    get: Any = ray.get
    buckets = get(learner.start.remote(0, 1, "", 60.0))
    get([engine.start.remote() for engine in engines])
    totals, published, stages, num_bytes = [], [], [], 0
    for _ in range(ROUNDS):
        began = time.perf_counter()
        manifest, *refs = learner.publish.options(num_returns=1 + buckets).remote(0)
        manifest = get(manifest)
        num_bytes = manifest.num_bytes
        published.append(time.perf_counter() - began)
        stages += get([engine.update_weights.remote(manifest, *refs) for engine in engines])
        totals.append(time.perf_counter() - began)
    warm = slice(1, None)  # the first round touches fresh memory
    print(
        f"{num_bytes / 1e6:.0f} MB to {engines_wanted} engines: publish {statistics.median(published[warm]):.2f} s, "
        f"until every engine serves it {statistics.median(totals[warm]):.2f} s"
    )
    for stage in ("fetch", "pause", "load"):
        print(f"  {stage} per engine: {statistics.median(s[stage] for s in stages[engines_wanted:]):.2f} s")
    get([engine.shutdown.remote() for engine in engines])
    place.close()


if __name__ == "__main__":
    main()
