"""The learner against the plain way, side by side on this machine: `.venv/bin/python bench/learner.py [--threads N]`.

Tokens per second are trained response tokens over a whole optimizer step. The plain way is one padded row per
response, the whole logits, `cross_entropy`, bfloat16 autocast over float32 weights where the model computes in
bfloat16, and the same fused AdamW.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from headway.core.config import parse_config
from headway.core.rollouts import build
from headway.learner.logprobs import token_logprobs
from headway.learner.pretrained import model_folder
from headway.learner.trainer import Trainer

GROUPS, ANSWERS, PROMPT_TOKENS, MAX_RESPONSE_TOKENS = 8, 8, 43, 24
ROWS_AT_A_TIME = 16
"""Of the plain way."""
MEMORY_TOKENS, HIDDEN, VOCABULARY = 4096, 576, 49152


def rollouts(vocabulary: int, seed: int) -> list[pa.Table]:
    """Groups of random tokens; half of the responses are right, so that every group has signal."""
    rng = np.random.default_rng(seed)
    tables = []
    for group in range(GROUPS):
        prompt = rng.integers(4, vocabulary, PROMPT_TOKENS).tolist()
        rows = []
        for index in range(ANSWERS):
            n = int(rng.integers(MAX_RESPONSE_TOKENS * 3 // 4, MAX_RESPONSE_TOKENS + 1))
            rows.append(
                {
                    "rollout_id": f"{group}/{index}",
                    "group_id": group,
                    "prompt_id": str(group),
                    "sample_index": index,
                    "prompt_ids": prompt,
                    "response_ids": rng.integers(4, vocabulary, n).tolist(),
                    "loss_mask": [1] * n,
                    "behavior_logprobs": [-10.0] * n,
                    "version_spans": [{"start": 0, "end": n, "version": 0}],
                    "finish_reason": "stop",
                    "truncated": False,
                    "text": "",
                    "reward": float(index % 2),
                }
            )
        tables.append(build(rows))
    return tables


class PlainLearner:
    def __init__(self, folder: Path, *, autocast: bool) -> None:
        self.autocast = autocast
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)

    def step(self, tables: list[pa.Table]) -> None:
        rows = [row for table in tables for row in table.to_pylist()]
        num_tokens = sum(len(row["response_ids"]) for row in rows)
        self.optimizer.zero_grad()
        for start in range(0, len(rows), ROWS_AT_A_TIME):
            part = rows[start : start + ROWS_AT_A_TIME]
            longest = PROMPT_TOKENS + max(len(row["response_ids"]) for row in part)
            ids = torch.zeros(len(part), longest, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            labels = torch.full_like(ids, -100)
            advantages = torch.tensor([1.0 if row["reward"] else -1.0 for row in part])
            for i, row in enumerate(part):
                tokens = row["prompt_ids"] + row["response_ids"]
                ids[i, : len(tokens)] = torch.tensor(tokens)
                mask[i, : len(tokens)] = 1
                labels[i, PROMPT_TOKENS : len(tokens)] = torch.tensor(row["response_ids"])
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            losses = cross_entropy(
                logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), reduction="none"
            )
            loss = (losses.view(len(part), -1) * advantages[:, None]).sum() / num_tokens
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def tokens_per_second(step: Callable[[list[pa.Table]], object], batches: list[list[pa.Table]]) -> float:
    """Best of the given batches, after the first one has warmed up."""
    step(batches[0])
    best = 0.0
    for tables in batches[1:]:
        num_tokens = sum(len(ids) for table in tables for ids in table.column("response_ids").to_pylist())
        started = time.perf_counter()
        step(tables)
        best = max(best, num_tokens / (time.perf_counter() - started))
    return best


def compare_speed(name: str, dtype: Literal["float32", "bfloat16"], repeats: int) -> None:
    folder = model_folder(name)
    config = parse_config(
        {
            "model": {"path": name, "dtype": dtype},
            "run": {"steps": 100},
            "lag": {"max_version_lag": 100},
            "learner": {"groups_per_step": GROUPS},
        }
    )
    trainer = Trainer(config, folder)
    vocabulary = trainer.model.network.config.get_text_config().vocab_size
    batches = [rollouts(vocabulary, seed) for seed in range(repeats + 1)]
    ours = tokens_per_second(lambda tables: trainer.train(tables, trainer.version), batches)
    plain = tokens_per_second(PlainLearner(folder, autocast=dtype == "bfloat16").step, batches)
    print(
        f"{name:24} {dtype:9} headway {ours:8,.0f} tokens/s   padded + cross_entropy {plain:8,.0f} tokens/s   "
        f"ratio {ours / plain:.2f}",
        flush=True,
    )


def peak_bytes(way: Literal["blocks", "whole"], dtype: torch.dtype, threads: int) -> int:
    """Peak resident memory that a forward and backward log-probability pass adds, in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_bytes, (way, dtype, threads))


def _peak_bytes(way: str, dtype: torch.dtype, threads: int) -> int:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    targets = torch.randint(0, VOCABULARY, (MEMORY_TOKENS,))
    hidden = torch.randn(MEMORY_TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=dtype, requires_grad=True)

    def once(num_tokens: int) -> None:
        if way == "blocks":
            loss = token_logprobs(hidden[:num_tokens], weight, targets[:num_tokens]).logprobs.sum()
        else:
            logits = (hidden[:num_tokens] @ weight.T).float()
            loss = -cross_entropy(logits, targets[:num_tokens], reduction="sum")
        loss.backward()

    once(8)  # the libraries' own buffers, and both gradients
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = _resident_peak()
    once(MEMORY_TOKENS)
    return _resident_peak() - before


def _resident_peak() -> int:
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(
        f"{GROUPS} prompts x {ANSWERS} answers, {PROMPT_TOKENS} + up to {MAX_RESPONSE_TOKENS} tokens, "
        f"{arguments.threads} threads"
    )
    compare_speed("smollm2-135m-instruct", "bfloat16", arguments.repeats)
    compare_speed("tiny-random", "float32", arguments.repeats)
    print(f"log-probabilities of {MEMORY_TOKENS:,} tokens, vocabulary {VOCABULARY:,}, forward and backward")
    full = MEMORY_TOKENS * VOCABULARY * 4
    for dtype in (torch.bfloat16, torch.float32):
        ours, whole = (peak_bytes(way, dtype, arguments.threads) for way in ("blocks", "whole"))
        print(
            f"{dtype!s:15} headway {ours / 2**20:6,.0f} MiB   cross_entropy on whole logits {whole / 2**20:6,.0f} MiB   "
            f"ratio 1/{whole / ours:.1f}   (one float32 [B, T, V]: {full / 2**20:,.0f} MiB, 1/{full / ours:.1f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
