"""Tokens per second of one generation actor, with and without weight updates under way.

python bench/engine.py [MODEL] [THREADS]
"""

from __future__ import annotations

import asyncio
import sys
import time

from headway.actors.generation import GenerationActor, GroupRequest
from headway.core.config import parse_config
from headway.core.prompts import Prompt
from headway.learner.model import PolicyModel
from headway.learner.pretrained import model_folder
from headway.learner.publish import export, layout_of

GROUPS, GROUP_SIZE, NEW_TOKENS = 8, 8, 64


async def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
    threads = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    dtype = "float32" if name.startswith("tiny") else "bfloat16"
    config = parse_config(
        {
            "run": {"name": "bench-engine"},
            "model": {"path": name, "dtype": dtype},
            "generation": {"threads": threads, "max_model_len": 160},
        }
    )
    folder = model_folder(name)
    engine = GenerationActor(config, str(folder), 0)
    await engine.start()
    await engine.serve_loaded()
    policy = PolicyModel(folder, dtype=dtype)
    layout = layout_of(policy, dtype, 64 << 20)
    prompt = Prompt(prompt_id="p", content="Tell me a long story about a river.", gold="", verifier="exact")

    async def tokens_per_second(first: int, updates: int) -> float:
        requests = [
            GroupRequest(
                group_id=first + n,
                prompt=prompt,
                group_size=GROUP_SIZE,
                temperature=1.0,
                top_p=1.0,
                max_new_tokens=NEW_TOKENS,
                deadline_s=300,
            )
            for n in range(GROUPS)
        ]
        began = time.perf_counter()
        running = asyncio.gather(*map(engine.generate, requests))
        for version in range(updates):
            manifest, buckets = export(policy, layout, first + version)
            await engine.update_weights(manifest, *buckets)
        tables = await running
        tokens = sum(len(ids) for table in tables for ids in table.column("response_ids").to_pylist())
        return tokens / (time.perf_counter() - began)

    for warm_up in range(2):
        await tokens_per_second(1000 + 100 * warm_up, 0)
    plain = await tokens_per_second(2000, 0)
    updated = await tokens_per_second(3000, 2)
    print(
        f"{name} {dtype}, {GROUPS * GROUP_SIZE} requests, threads {threads or 'all'}: {plain:.0f} tokens/s; "
        f"with 2 weight updates meanwhile {updated:.0f} tokens/s"
    )
    await engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
