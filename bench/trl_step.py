"""Step time of TRL's GRPOTrainer on the demo's task, beside headway's demo run on the same machine.

TRL wants another transformers version, so it lives in an environment of its own:

    python3.11 -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0
    /tmp/trl/bin/pip install trl==1.16.0 transformers==5.24.0 accelerate datasets
    make demo
    /tmp/trl/bin/python bench/trl_step.py MODEL_FOLDER runs/demo

Same model, prompts, arithmetic, group size, token budget, learning rate and sampling; each system uses both cores as it likes.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import TrainerCallback  # pyright: ignore[reportMissingImports]
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

STEPS = 6


def reward(completions: list, answer: list[str], **_: object) -> list[float]:
    """Last number equals the answer: the demo's rule."""
    texts = [completion[0]["content"] for completion in completions]
    last = [re.findall(r"-?\d+", text)[-1:] for text in texts]
    return [float(numbers == [gold]) for numbers, gold in zip(last, answer, strict=True)]


class StepTimes(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        print(f"TRL step {len(self.seconds)}: {self.seconds[-1]:.1f} s", flush=True)


def main() -> None:
    model, run = sys.argv[1], Path(sys.argv[2])
    rows = [json.loads(line) for line in Path("configs/data/sums-train.jsonl").read_text().splitlines()]
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows]
    )
    demo = json.loads((run / "config.json").read_text())
    config = GRPOConfig(
        output_dir="/tmp/trl-out",
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=24,
        learning_rate=demo["learner"]["learning_rate"],
        lr_scheduler_type="constant",
        beta=0.0,
        bf16=demo["model"]["dtype"] == "bfloat16",
        use_cpu=True,
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        model_init_kwargs={"dtype": torch.float32},
    )
    times = StepTimes()
    GRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=data, callbacks=[times]).train()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    theirs = statistics.median(times.seconds[1:])
    ours = statistics.median(record["seconds"]["total"] for record in records[1:STEPS])  # the same steps
    print(f"median step: TRL {theirs:.1f} s, headway {ours:.1f} s, ratio {theirs / ours:.1f}")


if __name__ == "__main__":
    main()
