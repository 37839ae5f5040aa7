"""Configuration: refusals that name the key, the place, the value and the remedy."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headway.core.config import dump_config, keys, load_config, parse_config
from headway.core.consistency import warnings
from headway.core.errors import ConfigError
from headway.core.presets import PRESETS


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (
            "run:\n  steps: 3\nlag:\n  max_version_lagg: 1\n",
            [],
            r"'lag.max_version_lagg' \(.*c.yaml:4\); did you mean 'lag.max_version_lag'",
        ),
        ("max_stalness: 2\n", [], "did you mean 'lag.max_version_lag'"),
        (
            "lag:\n  learning_rate: 1\n",
            [],
            "unknown key 'lag.learning_rate'.*did you mean 'learner.learning_rate'",
        ),
        ("samplng:\n  top_p: 1\n", [], "did you mean 'sampling'"),
        ("{}", ["sampling.group_size=1"], "sampling.group_size=1: .* needs at least 2"),
        ("{}", ["run.steps=0"], r"run.steps=0 \(argument 'run.steps=0'\): .*greater than or equal to 1"),
        (
            "{}",
            ["run.steps=5", "learner.steps_per_batch=2", "lag.max_version_lag=1"],
            "run.steps=5 is not divisible by learner.steps_per_batch=2; the nearest that is: 4",
        ),
        (
            "{}",
            ["learner.steps_per_batch=4", "lag.max_version_lag=2"],
            "the last step of a batch lags by at least 3",
        ),
        ("{}", ["sampling.top_p=0.9"], "set sampling.top_p=1, or algorithm.correction=none"),
        ("{}", ["queue.max_groups=4"], "queue.max_groups=4 cannot hold one batch of 8 groups"),
        ("lag:\n  max_version_lag: yes\n", [], r"max_version_lag=True \(.*:2\): .* number, not a switch"),
        ("{}", ["metrics.port=off"], "metrics.port=False .*: Input should be a number, not a switch"),
        ("{}", ["generation.max_replicas=true"], "generation.max_replicas=True .* not a switch"),
        ("{}", ["run.name=" + 101 * "a"], "run.name=.* at most 100 characters"),
        ("{}", ["sampling.temperature=hot"], "sampling.temperature='hot'"),
        ("{}", ["run.name=../x"], "run.name='../x'"),
        ("{}", ["nonsense"], "expected section.key=value"),
        (
            "{}",
            ["algorithm.preset=dapoo"],
            "algorithm.preset='dapoo' is unknown; nearest: dapo; there are async_grpo",
        ),
        (
            "{}",
            ["algorithm.correction=tis_token+tis_sequence"],
            "tis_token and tis_sequence would weight the same token twice; keep one",
        ),
        ("{}", ["algorithm.correction=veto+veto"], "names one correction twice"),
        (
            "{}",
            ["algorithm.preset=cispo", "algorithm.correction=tis_token"],
            "correction=tis_token with algorithm.old_policy=behavior: the ratio is the importance weight already",
        ),
        (
            "{}",
            ["algorithm.preset=rloo", "algorithm.correction=none", "algorithm.old_policy=behavior"],
            "objective=none, which has no ratio, would correct nothing",
        ),
        (
            "{}",
            ["algorithm.preset=cispo", "algorithm.old_policy=proximal"],
            "preset=cispo with algorithm.old_policy=proximal has no off-policy correction",
        ),
        ("{}", ["algorithm.advantage=none"], "only a KL in the loss would train"),
        (
            "{}",
            ["reference.path=teacher"],
            "a model of its own needs a KL, and cannot take the policy's weights",
        ),
        (
            "{}",
            ["critic.warmup_steps=3"],
            "critic.warmup_steps=3 with algorithm.advantage=group, which has no critic",
        ),
        ("{}", ["verifiers.min_replicas=2"], "verifiers.min_replicas=2 without verifiers.max_replicas"),
        (
            "{}",
            ["verifiers.http_timeout_s=200"],
            "verifiers.http_deadline_s=120 is below verifiers.http_timeout_s=200",
        ),
        ("{}", ["algorithm.mis_token_low=6"], "mis_token_low=6.0 must be below algorithm.mis_token_high=5.0"),
        (
            "{}",
            ["algorithm.preset=ppo", "algorithm.ratio=sequence"],
            "ratio=sequence with algorithm.advantage=gae: one ratio for the response cannot weight",
        ),
        (
            "{}",
            ["algorithm.preset=ppo", "algorithm.kl_estimator=unbiased"],
            "kl_estimator=unbiased is about gradients and a reward has none",
        ),
        (
            "{}",
            ["algorithm.preset=trpo"],
            "objective=trpo with model.dtype=bfloat16.*set model.dtype=float32",
        ),
        (
            "{}",
            ["algorithm.preset=trpo", "model.dtype=float32", "learner.replicas=2"],
            "objective=trpo runs on one learner rank",
        ),
        (
            "{}",
            ["algorithm.preset=vcpo", "learner.replicas=2"],
            "advantage=min_variance runs on one learner rank",
        ),
        (
            "{}",
            ["algorithm.preset=dr_mas"],
            "advantage=per_agent is for several agents, and neither data.agents nor environment.agents names any",
        ),
        (
            "data:\n  agents: {a: '{prompt}', b: '{a}'}\n",
            [],
            "advantage=group would compare the rewards of different agents; choose per_agent",
        ),
        (
            "data:\n  agents: {a: '{b}', b: '{prompt}'}\nalgorithm: {preset: dr_mas}\n",
            [],
            r"data.agents.a reads \{b\}, who has not answered yet",
        ),
        ("{}", ["algorithm.kl_stop=0.1"], "needs learner.steps_per_batch > 1"),
        ("{}", ["algorithm.kl_target=0.1"], "adapts the weight of a KL, and algorithm.kl=none has none"),
        ("{}", ["algorithm.kl=loss", "algorithm.kl_target=0.1", "algorithm.kl_coef=0"], "and 0 stays 0"),
        ("{}", ["algorithm.process_rewards=true"], "only sees the reward of the whole response"),
        (
            "{}",
            ["sampling.top_p=0.9", "algorithm.correction=none", "algorithm.staleness_adaptive=0.5"],
            "the engine renormalises over the nucleus",
        ),
        ("run: [1]\n", [], r"section 'run' .*:1\) holds \[1\]; put keys below it"),
        (
            "learner:\nrun: {steps: 3}\n",
            [],
            "section 'learner' .*:1.* holds None; put keys below it, or leave it out",
        ),
        ("run: {steps: 3}\nlag: {}\nrun: {name: x}\n", [], "key 'run' is there twice .*:1 and 3"),
        ("lag.max_version_lag: 2\n", [], "is in one piece; write 'max_version_lag' below 'lag:'"),
        ("generation: {gpu: 1}\n", [], "did you mean 'generation.gpus'"),
        ("generation: {group_size: 4}\n", [], "did you mean 'sampling.group_size'"),
        ("{}", ["lag..x=1"], "expected section.key=value"),
        (
            "{}",
            ["reference.gpus=2.5"],
            "reference.gpus=2.5: a replica has whole GPUs or a part of one; set reference.gpus=2 or 3",
        ),
        ("- a\n", [], "must hold sections"),
        ("run: {\n", [], "is not YAML"),
    ],
)
def test_a_mistake_is_refused_with_its_place_and_remedy(
    tmp_path: Path, text: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text), overrides)


def test_a_configuration_is_text(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes("run: {name: ä}".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"c.yaml is no text in UTF-8: .* at byte 12"):
        load_config(path)


def test_overrides_win_and_numbers_in_exponent_notation_are_numbers(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "run:\n  steps: 3\n"), ["run.steps=7", "learner.learning_rate=3e-5"])
    assert (config.run.steps, config.learner.learning_rate) == (7, 3e-5)


def test_the_resolved_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    config = parse_config({"data": {"params": {"max_digits": 2}}, "run": {"name": "x"}})
    path = tmp_path / "config.json"
    path.write_text(dump_config(config))
    assert load_config(path) == config


def test_every_key_is_documented() -> None:
    undocumented = [name for name, info in keys() if not info.description]
    assert undocumented == []


@pytest.mark.parametrize("name", ["demo", "tiny"])
def test_shipped_configurations_load(root: Path, name: str) -> None:
    assert load_config(root / "configs" / f"{name}.yaml").run.name == name


def test_reading_a_configuration_is_quick_and_light(tmp_path: Path) -> None:
    """A mistake is told in under two seconds, before anything heavy is loaded."""
    path = write(tmp_path, "run:\n  stpes: 3\n")
    seconds = []
    for _ in range(3):  # the best of three: other programs use this machine too
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "headway.cluster.cli", "train", str(path)], capture_output=True, text=True
        )
        seconds.append(time.monotonic() - began)
        assert done.returncode == 2
        assert "did you mean 'run.steps'" in done.stderr
    assert min(seconds) < 2.0
    probe = (
        "import sys, headway.cluster.cli; print({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules))"
    )
    assert (
        subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True).stdout.strip()
        == "set()"
    )


def test_a_preset_is_one_word_and_gives_way_key_by_key() -> None:
    dapo = parse_config({"algorithm": {"preset": "dapo"}}).algorithm
    assert (dapo.clip_high, dapo.correction, dapo.dynamic_sampling) == (0.28, ("tis_token",), True)
    mine = parse_config(
        {"algorithm": {"preset": "dapo", "clip_high": 0.3, "dynamic_sampling": False}}
    ).algorithm
    assert (mine.clip_high, mine.correction, mine.dynamic_sampling) == (0.3, ("tis_token",), False)
    assert mine.aggregation == dapo.aggregation == "token_mean"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_legal_and_survives_being_written_out(name: str) -> None:
    agents = {"a": "{prompt}", "b": "{prompt} {a}"} if name in ("magrpo", "dr_mas") else {}
    tree = {
        "algorithm": {"preset": name},
        "data": {"agents": agents},
        "model": {"dtype": "float32"},
        "run": {"steps": 4},
    }
    config = parse_config(tree)
    assert parse_config(json.loads(dump_config(config))) == config
    assert config.algorithm.correction or config.algorithm.old_policy == "behavior"


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"kl": "loss", "kl_estimator": "k1"}, "expected gradient zero"),
        ({"kl": "loss", "kl_estimator": "k3"}, "forward KL"),
        ({"kl": "reward", "kl_estimator": "k3"}, "biased gradient; k1 is unbiased"),
        ({"correction": "none"}, "nothing makes up for the age of rollouts"),
        ({"preset": "gspo"}, "the clip never acts"),
        ({"kl": "loss", "kl_estimator": "k2"}, None),
        ({"kl": "reward", "kl_estimator": "k1"}, None),
        ({}, None),
    ],
)
def test_doubtful_choices_are_warned_about(algorithm: dict[str, str], words: str | None) -> None:
    found = warnings(parse_config({"algorithm": algorithm}))
    assert found == [] if words is None else len(found) == 1 and words in found[0]


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"stage": "reward_model", "offline": {"held_out": 0, "evaluate_every": 0}}, "has no scale"),
        ({"algorithm": {"preset": "distill"}}, "set reference.path to a teacher"),
        (
            {"algorithm": {"preset": "ppo"}, "critic": {"warmup_steps": 5}, "run": {"steps": 5}},
            "the policy would not move",
        ),
    ],
)
def test_runs_that_would_come_to_nothing_are_warned_about(tree: dict[str, Any], words: str) -> None:
    assert any(words in warning for warning in warnings(parse_config(tree)))
