"""One frozen configuration tree. Unknown keys, values out of range and values at odds with each other are
refused here, before anything starts."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ValidationError, model_validator

from headway.core.consistency import check_algorithm, check_gpus, check_lag, check_scaling
from headway.core.errors import ConfigError
from headway.core.sections import (
    Algorithm,
    Cluster,
    Critic,
    Data,
    Environment,
    Generation,
    Judge,
    Lag,
    Learner,
    Metrics,
    Model,
    Offline,
    Queue,
    Reference,
    RewardModel,
    Run,
    Sampling,
    Section,
    Verifiers,
)


class Config(Section):
    stage: Literal["rl", "sft", "reward_model", "preference"] = "rl"
    """What the run trains: a policy on its own rollouts; or, from rows that are there already, a policy on demonstrations,
    a reward model, or a policy on preferences. Only `rl` has engines and scorers."""
    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    environment: Environment = Environment()
    sampling: Sampling = Sampling()
    algorithm: Algorithm = Algorithm()
    lag: Lag = Lag()
    learner: Learner = Learner()
    reference: Reference = Reference()
    critic: Critic = Critic()
    generation: Generation = Generation()
    verifiers: Verifiers = Verifiers()
    judge: Judge = Judge()
    reward_model: RewardModel = RewardModel()
    offline: Offline = Offline()
    queue: Queue = Queue()
    metrics: Metrics = Metrics()
    cluster: Cluster = Cluster()

    @property
    def run_folder(self) -> Path:
        return self.run.folder / self.run.name

    @property
    def episodes(self) -> Environment:
        """What a response is an episode of, if it has a name: agents of `data.agents` are one kind."""
        if not self.data.agents:
            return self.environment
        agents = self.data.agents
        return Environment(name="relay", params={"templates": agents}, agents=tuple(agents), max_turns=1)

    @property
    def rows_per_group(self) -> int:
        """Rollouts, at most."""
        turns = self.environment.max_turns if self.environment.rewritten_past == "fork" else 1
        return self.sampling.group_size * max(1, len(self.episodes.agents)) * turns

    @property
    def groups_per_batch(self) -> int:
        """Groups that the learner takes up at a time."""
        return self.learner.groups_per_step * self.learner.steps_per_batch

    @property
    def groups_per_engine(self) -> int:
        """Groups that fit into one engine at a time, at least one."""
        return max(1, self.generation.max_concurrent_requests // self.sampling.group_size)

    @property
    def max_trained_lag(self) -> int:
        """Largest lag of a token in the loss."""
        lag = self.lag
        if lag.policy != "downweight":
            return lag.max_version_lag
        return 2 * lag.max_version_lag + 1 if lag.downweight_limit is None else lag.downweight_limit

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        this: Any = self
        if self.stage == "rl":
            check_algorithm(this)
        check_lag(this)
        check_gpus(this)
        check_scaling("generation", self.generation)
        check_scaling("verifiers", self.verifiers)
        if self.critic.warmup_steps and not self.algorithm.needs_critic:
            raise ValueError(
                f"critic.warmup_steps={self.critic.warmup_steps} with algorithm.advantage={self.algorithm.advantage}, which "
                "has no critic to wait for; set algorithm.advantage=gae or critic.warmup_steps=0"
            )
        offline = self.offline
        if offline.loop != "none" and (self.stage != "preference" or offline.objective == "kto"):
            raise ValueError(
                f"offline.loop={offline.loop} with stage={self.stage} and offline.objective={offline.objective}: a loop makes "
                "pairs to learn from; set stage=preference and another objective than kto, or offline.loop=none"
            )
        if offline.loop == "self_rewarding" and self.sampling.group_size < 2:
            raise ValueError(
                "offline.loop=self_rewarding with sampling.group_size=1: a best and a worst response need at least 2"
            )
        verifiers = self.verifiers
        if verifiers.http_deadline_s < verifiers.http_timeout_s:
            raise ValueError(
                f"verifiers.http_deadline_s={verifiers.http_deadline_s:g} is below verifiers.http_timeout_s="
                f"{verifiers.http_timeout_s:g}; no request could take its whole time"
            )
        if self.run.steps % self.learner.steps_per_batch:
            raise ValueError(
                f"run.steps={self.run.steps} is not divisible by learner.steps_per_batch="
                f"{self.learner.steps_per_batch}; the nearest that is: "
                f"{max(1, round(self.run.steps / self.learner.steps_per_batch)) * self.learner.steps_per_batch}"
            )
        if self.lag.max_version_lag < self.learner.steps_per_batch - 1:
            raise ValueError(
                f"lag.max_version_lag={self.lag.max_version_lag} with learner.steps_per_batch="
                f"{self.learner.steps_per_batch}: the last step of a batch lags by at least "
                f"{self.learner.steps_per_batch - 1}; raise the bound or lower steps_per_batch"
            )
        if self.queue.max_groups < self.groups_per_batch:
            raise ValueError(
                f"queue.max_groups={self.queue.max_groups} cannot hold one batch of {self.groups_per_batch} groups "
                "(learner.groups_per_step * learner.steps_per_batch)"
            )
        if self.run.name in (".", ".."):
            raise ValueError(f"run.name={self.run.name!r} is no folder name")
        return self


SYNONYMS = {
    "max_staleness": "lag.max_version_lag",
    "staleness": "lag.max_version_lag",
    "staleness_threshold": "lag.max_version_lag",
    "max_off_policy_steps": "lag.max_version_lag",
    "max_head_offpolicyness": "lag.max_version_lag",
    "num_generations": "sampling.group_size",
    "rollout_n": "sampling.group_size",
    "lr": "learner.learning_rate",
    "max_steps": "run.steps",
    "max_tokens": "sampling.max_new_tokens",
    "num_engines": "generation.replicas",
}
"""What the same thing is called elsewhere, for the hint on an unknown key."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in `path` (YAML) with `a.b=c` overrides. Raises `ConfigError` with one line per fault."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8: {error.reason} at byte {error.start}") from error
    try:
        tree = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {_yaml_fault(error)}") from error
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} must hold sections such as 'run:' and 'learner:', not {type(tree).__name__}"
        )
    lines = _key_lines(text, path)
    where = {key: f"{path}:{line}" for key, line in lines.items()}
    for override in overrides:
        key = _apply_override(tree, override)
        where[key] = f"argument {override!r}"
    return parse_config(tree, where)


def parse_config(tree: dict[str, Any], where: dict[str, str] | None = None) -> Config:
    """Validates a tree of plain values. `where` says for a dotted key where it was written."""
    where = where or {}
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(fault, where) for fault in error.errors())) from None


def dump_config(config: Config) -> str:
    """The resolved configuration as JSON, every default written out."""
    return json.dumps(config.model_dump(mode="json"), indent=2)


def keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key with its field."""
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from keys(info.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def _apply_override(tree: dict[str, Any], override: str) -> str:
    key, equals, value = override.partition("=")
    key = key.strip().removeprefix("--")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"override {override!r}: expected section.key=value, for example run.steps=20")
    node = tree
    *parents, leaf = key.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {parent!r} is a value, not a section")
    try:
        node[leaf] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not YAML: {_yaml_fault(error)}") from error
    return key


def _yaml_fault(error: yaml.YAMLError) -> str:
    """In one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split())


def _explain(fault: Any, where: dict[str, str]) -> str:
    key = ".".join(str(part) for part in fault["loc"])
    place = f" ({where[key]})" if key in where else ""
    if fault["type"] == "extra_forbidden":
        if nearest_key(key) == key:  # as it is written on the command line
            section, _, leaf = key.partition(".")
            return f"key '{key}'{place} is in one piece; write '{leaf}' below '{section}:'"
        return f"unknown key '{key}'{place}; did you mean '{nearest_key(key)}'?"
    if fault["type"] == "model_type":
        return f"section '{key}'{place} holds {fault['input']!r}; put keys below it, or leave it out"
    if not fault["loc"] or isinstance(fault["input"], dict):
        return fault["msg"].removeprefix("Value error, ")  # it names its keys itself
    return f"{key}={fault['input']!r}{place}: {fault['msg'].removeprefix('Value error, ')}"


def nearest_key(key: str) -> str:
    """The valid key that a mistyped or misplaced one most likely means."""
    leaf = key.rsplit(".", 1)[-1]
    known = [name for name, _ in keys()]
    sections = list(Config.model_fields)
    by_leaf = {name.rsplit(".", 1)[-1]: name for name in reversed(known)}
    for candidates in (SYNONYMS, by_leaf):
        if leaf in candidates:
            return candidates[leaf]
    own = [name for name in known if name.rpartition(".")[0] == key.rpartition(".")[0]]
    if near := difflib.get_close_matches(key, own if "." in key else (), n=1, cutoff=0.85):
        return near[0]
    if near := difflib.get_close_matches(leaf, [*SYNONYMS, *by_leaf, *sections], n=1, cutoff=0.7):
        return SYNONYMS.get(near[0]) or by_leaf.get(near[0]) or near[0]
    return difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]


def _key_lines(text: str, path: Path) -> dict[str, int]:
    """Line of every dotted key in a YAML text. Raises `ConfigError` for one that is there twice, of which YAML itself would
    take the last."""
    lines: dict[str, int] = {}

    def visit(node: yaml.Node, prefix: str) -> None:
        if isinstance(node, yaml.MappingNode):
            here: set[str] = set()
            for key_node, value_node in node.value:
                key, line = f"{prefix}{key_node.value}", key_node.start_mark.line + 1
                if key in here and key_node.value != "<<":
                    raise ConfigError(
                        f"key '{key}' is there twice ({path}:{lines[key]} and {line}); keep one"
                    )
                here.add(key)
                lines[key] = line
                visit(value_node, f"{key}.")

    if root := yaml.compose(text, Loader=yaml.SafeLoader):
        visit(root, "")
    return lines
