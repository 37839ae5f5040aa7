"""The same training on one process and on two (this file is also what those run)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from headway.core.errors import Starved
from headway.learner.batching import Group, MicroBatch, pack
from headway.learner.learner_state import load_learner, save_learner
from headway.learner.model import PolicyModel
from headway.learner.publish import contribute, export, layout_of
from headway.learner.sharding import Ranks, alone, free_address, join, leave, whole

DEADLINE_S = 60.0
SHORT_DEADLINE_S = 2.0
VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {"dtype": "float32"},
    "adapter": {"dtype": "float32", "lora_rank": 4, "activation_checkpointing": True},
    "bfloat16": {"dtype": "bfloat16", "activation_checkpointing": True},
    "bfloat16_adapter": {"dtype": "bfloat16", "lora_rank": 4},
}
EXACT = ("whole", "adapter")
PUBLISHED: Literal["bfloat16"] = "bfloat16"


@dataclass(frozen=True)
class Case:
    """Answers with a value per trained token; each part goes to the rank of its number, if there are several."""

    lengths: tuple[tuple[int, ...], tuple[int, ...]]
    """Response lengths, per part."""
    values: tuple[float, float]
    """Of every token of the part."""
    by_response: bool = False
    """Mean over responses of the mean over tokens, instead of the mean over tokens."""
    masked: tuple[bool, bool] = (False, False)
    """Parts of which nothing is trained."""


CASES = {
    # 30 tokens that sum to 30 and 10 that sum to 30: 60 / 40, where a mean of the ranks' means would be 2.
    "token_mean": Case(((12, 10, 8), (10,)), (1.0, 3.0)),
    # Three responses of value 1 and one of value 5: 8 / 4, where a mean of the ranks' means would be 3.
    "response_mean": Case(((5, 3, 9), (4,)), (1.0, 5.0), by_response=True),
    "one_masked": Case(((5, 3), (4,)), (1.0, 5.0), masked=(False, True)),
    "all_masked": Case(((5, 3), (4,)), (1.0, 5.0), masked=(True, True)),
}


def group(lengths: tuple[int, ...], seed: int) -> Group:
    rng = np.random.default_rng(seed)
    num_tokens, num_responses = sum(lengths), len(lengths)
    return Group(
        rollout_ids=tuple(map(str, range(num_responses))),
        prompts=(rng.integers(4, 80, 5),),
        prompt_index=np.zeros(num_responses, dtype=np.int64),
        lengths=np.array(lengths),
        response_ids=rng.integers(4, 80, num_tokens),
        loss_mask=np.ones(num_tokens, dtype=np.bool_),
        behavior_logprobs=np.zeros(num_tokens, dtype=np.float32),
        versions=np.zeros(num_tokens, dtype=np.int64),
        rewards=np.zeros(num_responses, dtype=np.float32),
        scored=np.ones(num_responses, dtype=np.bool_),
        truncated=np.zeros(num_responses, dtype=np.bool_),
    )


def work(case: Case, ranks: Ranks) -> list[tuple[MicroBatch | None, Tensor]]:
    """This rank's micro-batches with the weighted value of each of their tokens; None for an idle pass."""
    num_tokens, num_responses = sum(map(sum, case.lengths)), sum(map(len, case.lengths))
    parts = []
    for part, lengths in enumerate(case.lengths):
        weights = [1 / (n * num_responses) if case.by_response else 1 / num_tokens for n in lengths]
        weighted_N = case.values[part] * torch.tensor(weights).repeat_interleave(torch.tensor(lengths))
        trained_N = np.full(sum(lengths), not case.masked[part])
        batches = pack([group(lengths, seed=part)], trained_N, microbatch_tokens=30)
        parts.append([(batch, weighted_N[batch.token_index]) for batch in batches])
    passes = max(map(len, parts)) if ranks.size > 1 else 0
    own = parts[ranks.rank] if ranks.size > 1 else parts[0] + parts[1]
    return [*own, *[(None, torch.zeros(0))] * (passes - len(own))]


def accumulate(model: PolicyModel, case: Case) -> float:
    """Leaves the gradient of the weighted values times probability ratios, all 1; returns their sum over the ranks."""
    model.zero_grad()
    loss = 0.0
    for batch, weighted_M in work(case, model.ranks):
        if batch is None:
            model.idle_backward()
            continue
        logprobs_M = model.logprobs(batch, temperature=0.8).logprobs
        part = ((logprobs_M - logprobs_M.detach()).exp() * weighted_M).sum()
        part.backward()
        loss += part.item()
    return sum(model.ranks.all_gather(loss))


@torch.no_grad()
def logprobs(model: PolicyModel) -> Tensor:
    """Of a few tokens, the same on every rank."""
    (batch,) = pack([group((6,), seed=9)], np.ones(6, dtype=np.bool_), microbatch_tokens=64)
    return model.logprobs(batch, temperature=1.0).logprobs.clone()


def masters(model: PolicyModel) -> dict[str, Tensor]:
    return {name: whole(p.detach()).clone() for name, p in model.masters.items()}


def gradients(model: PolicyModel) -> dict[str, Tensor]:
    return {name: whole(p.grad).clone() for name, p in model.masters.items() if p.grad is not None}


def adamw(model: PolicyModel) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.masters.values(), lr=1e-3, weight_decay=0.1, fused=True)


def step(model: PolicyModel, optimizer: torch.optim.Optimizer) -> float:
    """Returns the norm before clipping."""
    accumulate(model, CASES["token_mean"])
    norm = model.clip_grad(0.25)
    optimizer.step()
    model.zero_grad()
    model.refresh()
    return norm


def published(model: PolicyModel) -> dict[str, Any]:
    layout = layout_of(model, PUBLISHED, 40_000)
    if model.ranks.rank:
        contribute(model, layout)
        return {}
    manifest, buckets = export(model, layout, 7)
    return {"manifest": manifest, "bytes": [bucket.tobytes() for bucket in buckets]}


def train(ranks: Ranks, model_folder: Path, options: dict[str, Any], saved: Path) -> dict[str, Any]:
    """Everything that must not depend on the number of ranks."""
    model = PolicyModel(model_folder, ranks=ranks, **options)
    found: dict[str, Any] = {"at_start": published(model), "logprobs_at_start": logprobs(model)}
    for name, case in CASES.items():
        loss = accumulate(model, case)
        norm = model.grad_norm()
        found[name] = {"loss": loss, "norm": norm, "gradients": gradients(model)}
    optimizer = adamw(model)
    found["norms"] = [step(model, optimizer)]
    found["norms"] += [step(model, optimizer)]
    found["logprobs"] = logprobs(model)
    found["masters"] = masters(model)
    found["published"] = published(model)
    if ranks.rank == 0:
        saved.mkdir(parents=True)
    save_learner(saved, model, optimizer, 2, {"prompts": [1, 2.5], "name": {"x": "y"}})
    ranks.barrier()
    step(model, optimizer)
    found["masters_later"] = masters(model)
    return found


def go_on(ranks: Ranks, model_folder: Path, options: dict[str, Any], saved: Path) -> dict[str, Any]:
    """The last step of `train` once more, from what it saved."""
    model = PolicyModel(model_folder, ranks=ranks, **options)
    optimizer = adamw(model)
    model.idle_forward()  # gathers weights, which must not be used again after loading
    found: dict[str, Any] = {"version_and_extra": load_learner(saved, model, optimizer)}
    found["logprobs"] = logprobs(model)
    found["masters"] = masters(model)
    step(model, optimizer)
    found["masters_later"] = masters(model)
    return found


def main(rank: int, addresses: str, model_folder: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    first, second = addresses.split(",")
    ranks = join(first, rank, 2, DEADLINE_S)
    found: dict[str, Any] = {}
    for name, options in VARIANTS.items():
        found[name] = train(ranks, model_folder, options, folder / "two" / name)
        found[name]["gone_on"] = go_on(ranks, model_folder, options, folder / "two" / name)
        found[name]["from_one"] = go_on(ranks, model_folder, options, folder / "one" / name)
    found["gathered"] = ranks.all_gather({"rank": rank})
    leave()
    ranks = join(second, rank, 2, SHORT_DEADLINE_S)
    started = time.monotonic()
    if rank == 0:
        try:
            ranks.barrier()
        except RuntimeError:
            found["gave_up_after_s"] = time.monotonic() - started
        torch.save(found, folder / "two.pt")
    else:
        time.sleep(2 * SHORT_DEADLINE_S)


@pytest.fixture(scope="module")
def runs(tiny_random: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What one rank found, and two."""
    folder = tmp_path_factory.mktemp("ranks")
    one: dict[str, Any] = {
        name: train(alone, tiny_random, options, folder / "one" / name) for name, options in VARIANTS.items()
    }
    addresses = f"{free_address()},{free_address()}"
    # Without the repository on the path: a bare `learner` must not be importable in the workers either.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    logs = [folder / f"rank{rank}.log" for rank in range(2)]
    workers = []
    for rank, log in enumerate(logs):
        command = [sys.executable, __file__, str(rank), addresses, str(tiny_random), str(folder)]
        with log.open("w") as out:
            workers.append(subprocess.Popen(command, stdout=out, stderr=out, env=environment))
    try:
        codes = [worker.wait(timeout=150) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    two = torch.load(folder / "two.pt", weights_only=False)
    for name, options in VARIANTS.items():
        one[name]["gone_on"] = go_on(alone, tiny_random, options, folder / "one" / name)
        one[name]["from_two"] = go_on(alone, tiny_random, options, folder / "two" / name)
    return {1: one, 2: two}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor], atol: float) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert_close(left[name], right[name], atol=atol, rtol=0, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_means_are_those_of_the_whole_step(runs, variant: str, ranks: int) -> None:
    found = runs[ranks][variant]
    assert found["token_mean"]["loss"] == pytest.approx(1.5, abs=1e-6)
    assert found["response_mean"]["loss"] == pytest.approx(2.0, abs=1e-6)
    assert found["one_masked"]["loss"] == pytest.approx(8 / 12, abs=1e-6)
    assert found["all_masked"]["loss"] == 0.0


@pytest.mark.parametrize("case", ["token_mean", "response_mean", "one_masked"])
@pytest.mark.parametrize("variant", EXACT)
def test_gradients_of_two_ranks_are_those_of_one(runs, variant: str, case: str) -> None:
    one, two = (runs[n][variant][case] for n in (1, 2))
    assert one["norm"] > 0.01
    assert two["norm"] == pytest.approx(one["norm"], abs=1e-5)
    assert_same(two["gradients"], one["gradients"], atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_in_which_nothing_is_trained_has_gradient_zero(runs, variant: str, ranks: int) -> None:
    found = runs[ranks][variant]["all_masked"]
    assert found["norm"] == 0.0
    assert found["gradients"] and all(not g.any() for g in found["gradients"].values())


@pytest.mark.parametrize("variant", EXACT)
def test_clipped_steps_of_two_ranks_are_those_of_one(runs, variant: str) -> None:
    one, two = (runs[n][variant] for n in (1, 2))
    assert min(one["norms"]) > 0.25  # else nothing was clipped
    assert two["norms"] == pytest.approx(one["norms"], abs=1e-5)
    assert_same(two["masters"], one["masters"], atol=1e-5)
    assert (one["logprobs"] - one["logprobs_at_start"]).abs().max() > 1e-3
    assert_close(two["logprobs"], one["logprobs"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", ["bfloat16", "bfloat16_adapter"])
def test_bfloat16_on_two_ranks_stays_close(runs, variant: str) -> None:
    one, two = (runs[n][variant] for n in (1, 2))
    assert torch.equal(one["logprobs_at_start"], two["logprobs_at_start"])
    assert two["norms"] == pytest.approx(one["norms"], rel=0.02)
    left, right = (
        torch.cat([g.flatten() for g in found["token_mean"]["gradients"].values()]) for found in (one, two)
    )
    assert torch.nn.functional.cosine_similarity(left, right, dim=0) > 0.999
    assert all(g.dtype == torch.float32 for g in two["token_mean"]["gradients"].values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_publish_the_bytes_of_one(runs, variant: str) -> None:
    one, two = (runs[n][variant] for n in (1, 2))
    assert two["at_start"] == one["at_start"]
    assert len(one["at_start"]["manifest"].bucket_bytes) > 1
    changed = {
        name
        for name, digest in two["published"]["manifest"].digests.items()
        if two["at_start"]["manifest"].digests[name] != digest
    }
    assert changed == two["masters"].keys()


@pytest.mark.parametrize("variant", VARIANTS)
def test_published_are_the_trained_weights(runs, variant: str) -> None:
    for ranks in (1, 2):
        found = runs[ranks][variant]
        manifest, buckets = found["published"]["manifest"], found["published"]["bytes"]
        assert manifest.adapter_scale == (8.0 if "adapter" in variant else None)
        for entry in manifest.entries:
            dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[entry.dtype]
            data = buckets[entry.bucket][entry.offset : entry.offset + entry.num_bytes]
            tensor = torch.frombuffer(bytearray(data), dtype=dtype).view(entry.shape)
            assert torch.equal(tensor, found["masters"][entry.name].to(dtype)), entry.name


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_checkpoint_goes_on_bit_for_bit(runs, variant: str, ranks: int) -> None:
    found = runs[ranks][variant]
    assert found["gone_on"]["version_and_extra"] == (2, {"prompts": [1, 2.5], "name": {"x": "y"}})
    assert torch.equal(found["gone_on"]["logprobs"], found["logprobs"])
    assert_same(found["gone_on"]["masters"], found["masters"], atol=0)
    assert_same(found["gone_on"]["masters_later"], found["masters_later"], atol=0)


@pytest.mark.parametrize(("of", "on"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_checkpoint_goes_on_with_another_number_of_ranks(runs, variant: str, of: int, on: int) -> None:
    gone_on = runs[on][variant]["from_one" if of == 1 else "from_two"]
    assert gone_on["version_and_extra"][0] == 2
    assert_same(gone_on["masters"], runs[of][variant]["masters"], atol=0)
    atol = 1e-5 if variant in EXACT else 2e-3  # no parameter moves further than twice the learning rate
    assert_same(gone_on["masters_later"], runs[of][variant]["masters_later"], atol=atol)


def test_values_are_gathered_by_rank(runs) -> None:
    assert runs[2]["gathered"] == [{"rank": 0}, {"rank": 1}]
    assert alone.all_gather("x") == ["x"]
    alone.barrier()


def test_a_collective_that_misses_a_rank_ends(runs) -> None:
    assert runs[2]["gave_up_after_s"] < 2 * SHORT_DEADLINE_S


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_nobody_joins_give_up(rank: int) -> None:
    started = time.monotonic()
    with pytest.raises(Starved, match=rf"learner rank {rank} of 2 waited 1 s for the others at"):
        join(free_address(), rank, 2, 1.0)
    assert time.monotonic() - started < 10
    assert join("nowhere:1", 0, 1, 1.0) == alone
    leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
