"""PPO for RLHF with its five roles, against PPO in one process that shares no line of arithmetic with them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from headway.core import rollouts
from headway.learner.reward_model import Calibration, RewardModel
from headway.learner.tiny_adder import PHRASES

pytestmark = pytest.mark.timeout(600)

STEPS, GROUPS, GROUP_SIZE = 3, 4, 4
BETA, GAMMA, LAMBDA = 0.05, 1.0, 0.95
CLIP, VALUE_CLIP, WEIGHT_CAP, MAX_NORM = 0.2, 0.2, 2.0, 1.0
LEARNING_RATE, CRITIC_LEARNING_RATE = 2e-4, 5e-4
MEAN, STD = -0.6, 0.25
"""Scale of the reward model: near that of its raw scores."""


@pytest.fixture(scope="module")
def reward_model(tiny_adder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that has learnt nothing, and so pays for anything: its head is random."""
    folder = tmp_path_factory.mktemp("reward-model") / "model"
    model = RewardModel(tiny_adder, dtype="float32", kind="outcome")
    generator = torch.Generator().manual_seed(5)
    size = model.head.weight.shape[1]
    with torch.no_grad():
        model.head.weight.copy_(torch.randn(1, size, generator=generator) / size**0.5)
        model.head.bias.fill_(0.25)
    model.calibration = Calibration(mean=MEAN, std=STD, num_responses=1)
    model.save(folder)
    return folder


@pytest.fixture(scope="module")
def finished(root: Path, reward_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in which nothing is older than the weights that it trains."""
    folder = tmp_path_factory.mktemp("runs")
    prompts = folder / "prompts.jsonl"
    rows = [
        {"prompt": f"{PHRASES[0]}{a} + {b} =", "answer": str(a + b)} for a in range(10, 16) for b in (7, 38)
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        *(sys.executable, "-P", "-m", "headway.cluster.cli", "train", "configs/rlhf/ppo.yaml"),
        *("model.path=tiny-adder", f"data.source={prompts}", f"run.folder={folder}", "run.name=ppo"),
        *(f"reward_model.path={reward_model}", f"critic.path={reward_model}", "critic.warmup_steps=0"),
        *(f"run.steps={STEPS}", f"learner.groups_per_step={GROUPS}", f"sampling.group_size={GROUP_SIZE}"),
        *("sampling.max_new_tokens=40", "lag.max_version_lag=0", "generation.replicas=1", "run.seed=11"),
        *(f"algorithm.kl_coef={BETA}", f"algorithm.gamma={GAMMA}", f"algorithm.gae_lambda={LAMBDA}"),
        *(f"critic.value_clip={VALUE_CLIP}", f"critic.learning_rate={CRITIC_LEARNING_RATE}"),
        *(f"learner.learning_rate={LEARNING_RATE}", "run.save_rollouts=true", "metrics.port=0"),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "ppo"


class Sampled(NamedTuple):
    """A response: all that the plain loop takes from the run."""

    prompt: list[int]
    response: list[int]
    behavior: Tensor
    """Log-probabilities by the engine."""


def stored(finished: Path, step: int) -> list[dict[str, Any]]:
    return rollouts.read_parquet(finished / "rollouts" / f"step-{step:06d}.parquet").to_pylist()


# ---- the plain way: one row at a time, no packing, no padding ----------------------------------------------------


def network_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logprobs(policy: Any, row: Sampled) -> Tensor:
    """[T] of the response's tokens."""
    logits = policy(input_ids=torch.tensor([row.prompt + row.response])).logits[0]
    predicting = logits[len(row.prompt) - 1 : -1].log_softmax(dim=-1)
    return predicting[torch.arange(len(row.response)), torch.tensor(row.response)]


def outputs(network: Any, head: torch.nn.Linear, row: Sampled) -> Tensor:
    """[T + 1] of the head: before each token of the response, and after the last one."""
    ids = torch.tensor([row.prompt + row.response])
    states = network(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
    return head(states[len(row.prompt) - 1 :])[:, 0]


def head_of(folder: Path) -> torch.nn.Linear:
    """Whose outputs are calibrated scores."""
    saved = load_file(folder / "head.safetensors")
    head = torch.nn.Linear(saved["weight"].shape[1], 1)
    with torch.no_grad():
        head.weight.copy_(saved["weight"] / STD)
        head.bias.copy_((saved["bias"] - MEAN) / STD)
    return head


def gae(rewards: list[float], values: list[float]) -> tuple[list[float], list[float]]:
    """Advantages and returns, from the last token backwards."""
    advantages = [0.0] * len(rewards)
    value_after, advantage_after = 0.0, 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + GAMMA * value_after - values[t]
        advantages[t] = delta + GAMMA * LAMBDA * advantage_after
        value_after, advantage_after = values[t], advantages[t]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


@dataclass
class PlainPPO:
    policy: Any
    reference: Any
    reward_network: Any
    reward_head: torch.nn.Linear
    value_network: Any
    value_head: torch.nn.Linear

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        self.critic_parameters = [*self.value_network.parameters(), *self.value_head.parameters()]
        self.critic_optimizer = torch.optim.AdamW(
            self.critic_parameters, lr=CRITIC_LEARNING_RATE, weight_decay=0.0
        )

    def step(self, rows: list[Sampled]) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """What the line of `metrics.jsonl` must say, and what must stand in each row."""
        scored = [self.score(row) for row in rows]
        returns = torch.tensor([r for each in scored for r in each["returns"]])
        residual = returns - torch.tensor([v for each in scored for v in each["values"]])
        metrics = {
            "reward_mean": sum(each["reward"] for each in scored) / len(scored),
            "explained_variance": float(1 - residual.var(correction=0) / returns.var(correction=0)),
        }
        metrics |= self.policy_step(rows, scored) | self.critic_step(rows, scored)
        return metrics, scored

    @torch.no_grad()
    def score(self, row: Sampled) -> dict[str, Any]:
        reference = logprobs(self.reference, row)
        values = outputs(self.value_network, self.value_head, row)[:-1].tolist()
        reward = float(outputs(self.reward_network, self.reward_head, row)[-1])
        rewards = (-BETA * (row.behavior - reference)).tolist()
        rewards[-1] += reward
        advantages, returns = gae(rewards, values)
        return {
            "reward": reward,
            "reference_logprobs": reference.tolist(),
            "values": values,
            "advantages": advantages,
            "returns": returns,
        }

    def policy_step(self, rows: list[Sampled], scored: list[dict[str, Any]]) -> dict[str, float]:
        """Mean over responses of the mean over their tokens."""
        losses, kls = [], []
        for row, each in zip(rows, scored, strict=True):
            current = logprobs(self.policy, row)
            weight = (current.detach() - row.behavior).exp().clamp(max=WEIGHT_CAP)
            ratio = (current - current.detach()).exp()
            advantages = torch.tensor(each["advantages"])
            surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
            losses.append(-(weight * surrogate).mean())
            gap = torch.tensor(each["reference_logprobs"]) - current.detach()
            kls.append(gap.exp() - 1 - gap)
        loss = torch.stack(losses).mean()
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), MAX_NORM)
        self.optimizer.step()
        return {
            "loss": float(loss.detach()),
            "kl_reference": float(torch.cat(kls).mean()),
            "grad_norm": float(norm),
        }

    def critic_step(self, rows: list[Sampled], scored: list[dict[str, Any]]) -> dict[str, float]:
        """Mean over all tokens. With one step per batch the values have not moved since scoring, so that the clip is not
        reached."""
        errors = []
        for row, each in zip(rows, scored, strict=True):
            values = outputs(self.value_network, self.value_head, row)[:-1]
            returns, old = torch.tensor(each["returns"]), torch.tensor(each["values"])
            clipped = old + (values - old).clamp(-VALUE_CLIP, VALUE_CLIP)
            errors.append(0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2))
        loss = torch.cat(errors).mean()
        self.critic_optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.critic_parameters, MAX_NORM)
        self.critic_optimizer.step()
        return {"value_loss": float(loss.detach()), "critic_grad_norm": float(norm)}


@pytest.fixture(scope="module")
def plain(
    finished: Path, tiny_adder: Path, reward_model: Path
) -> tuple[PlainPPO, list[tuple[dict[str, float], list[dict[str, Any]]]]]:
    """After the steps that the run made, and what each step said."""
    ppo = PlainPPO(
        policy=network_of(tiny_adder),
        reference=network_of(tiny_adder),
        reward_network=network_of(reward_model),
        reward_head=head_of(reward_model),
        value_network=network_of(reward_model),
        value_head=head_of(reward_model),
    )
    steps = []
    for number in range(1, STEPS + 1):
        rows = [
            Sampled(row["prompt_ids"], row["response_ids"], torch.tensor(row["behavior_logprobs"]))
            for row in stored(finished, number)
        ]
        assert len(rows) == GROUPS * GROUP_SIZE
        steps.append(ppo.step(rows))
    return ppo, steps


def test_every_number_of_every_step(finished: Path, plain: Any) -> None:
    """Losses, explained variance, reward, KL and gradient norms, measured to differ by 2e-5 at most."""
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["lag"] for line in lines] == [[0] * GROUPS] * STEPS
    for line, (expected, _) in zip(lines, plain[1], strict=True):
        assert {name: line[name] for name in expected} == pytest.approx(expected, abs=1e-4), line["version"]
    assert lines[0]["kl_reference"] < 1e-9 < 1e-4 < lines[2]["kl_reference"]
    assert all(abs(line["loss"]) > 1e-2 and line["value_loss"] > 1e-2 for line in lines)


def test_every_row_of_every_step(finished: Path, plain: Any) -> None:
    """What the reward model, the reference and the critic said of each response, and what the learner made of it."""
    for number, (_, scored) in enumerate(plain[1], start=1):
        for row, each in zip(stored(finished, number), scored, strict=True):
            for column in ("reward", "reference_logprobs", "values", "advantages"):
                assert row[column] == pytest.approx(each[column], abs=1e-4), (row["rollout_id"], column)


def test_the_weights_after_the_last_step(finished: Path, tiny_adder: Path, plain: Any) -> None:
    """Adam divides a gradient by its own size, so where one is all rounding error the step is too: such weights are fewer
    than one in ten thousand (the worst measured: 2e-5 for the policy, whose weights move by 6e-4, and 7e-5 for the critic,
    where it is 1.5e-3). All others agree to 1e-6."""
    ppo, _ = plain
    checkpoint = finished / "checkpoints" / f"version-{STEPS:08d}"
    critic = torch.load(checkpoint / "critic" / "critic.pt", weights_only=True)["masters"]
    policy = load_file(checkpoint / "learner" / "model" / "model.safetensors")
    heads = {f"value_head.{name}": weight for name, weight in ppo.value_head.named_parameters()}
    pairs = [
        (policy, dict(ppo.policy.named_parameters()), LEARNING_RATE),
        (critic, dict(ppo.value_network.named_parameters()) | heads, CRITIC_LEARNING_RATE),
    ]
    for found, expected, learning_rate in pairs:
        assert found.keys() == expected.keys()
        apart = torch.cat(
            [(found[name] - weight.detach()).abs().flatten() for name, weight in expected.items()]
        )
        assert apart.mean() < 1e-7 and (apart > 1e-6).float().mean() < 1e-3
        assert apart.max() < learning_rate / 2
    before = load_file(tiny_adder / "model.safetensors")
    assert max(float((policy[name] - weight).abs().max()) for name, weight in before.items()) > LEARNING_RATE
