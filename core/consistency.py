"""What a configuration's values say to each other: combinations that are refused, with the reason and what to change, and
those that work but that their user most likely did not mean."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from headway.core.datasets import PACKAGED
from headway.core.sections import (
    OUTCOME_GROUPS,
    WEIGHTS,
    Algorithm,
    Generation,
    Resources,
    Section,
    Verifiers,
)

if TYPE_CHECKING:
    from headway.core.config import Config

FEW_WITH_SIGNAL = 0.8
"""Below this share of groups with signal, at the best pass rate that there is, the group size is warned about."""


def check_algorithm(config: Config) -> None:
    """Refuses choices that cannot work together, with the reason. Raises `ValueError`."""
    algorithm, sampling = config.algorithm, config.sampling
    if sampling.group_size < 2 and (algorithm.advantage in OUTCOME_GROUPS or algorithm.dynamic_sampling):
        what = "algorithm.dynamic_sampling" if algorithm.dynamic_sampling else "algorithm.advantage"
        value = algorithm.dynamic_sampling or algorithm.advantage
        if algorithm.advantage in OUTCOME_GROUPS:
            what, value = "algorithm.advantage", algorithm.advantage
        raise ValueError(
            f"sampling.group_size={sampling.group_size}: {what}={value} compares the responses of one prompt and "
            "needs at least 2"
        )
    if sampling.top_p < 1 and algorithm.uses_behavior:
        words = "+".join(algorithm.correction) or "none"
        raise ValueError(
            f"sampling.top_p={sampling.top_p} with algorithm.correction={words}, algorithm.old_policy="
            f"{algorithm.old_policy}: the engine renormalises over the nucleus, the learner over the whole "
            "vocabulary, so every importance weight would be wrong; set sampling.top_p=1, or "
            "algorithm.correction=none with algorithm.old_policy=proximal and no kl_estimator=unbiased"
        )
    for key, is_on in (
        ("algorithm.ess_lr", algorithm.ess_lr),
        ("lag.ess_floor", config.lag.ess_floor is not None),
        ("critic.targets=vtrace", algorithm.needs_critic and config.critic.targets == "vtrace"),
        ("algorithm.advantage=min_variance", algorithm.advantage == "min_variance"),
    ):
        if sampling.top_p < 1 and is_on:
            raise ValueError(
                f"sampling.top_p={sampling.top_p} with {key}, which goes by importance weights: the engine renormalises over the "
                "nucleus, the learner over the whole vocabulary, so they would be wrong; set sampling.top_p=1, or turn it off"
            )
    weights = [word for word in algorithm.correction if word in WEIGHTS]
    if len(weights) > 1:
        raise ValueError(
            f"algorithm.correction={'+'.join(algorithm.correction)}: {' and '.join(weights)} would weight the same "
            "token twice; keep one of them"
        )
    if len(set(algorithm.correction)) < len(algorithm.correction):
        raise ValueError(f"algorithm.correction={'+'.join(algorithm.correction)} names one correction twice")
    if weights and algorithm.old_policy == "behavior":
        raise ValueError(
            f"algorithm.correction={weights[0]} with algorithm.old_policy=behavior: the ratio is the importance "
            "weight already; keep only rejecting corrections (mis_token, mis_sequence, veto, off_policy_mask) or set "
            "algorithm.old_policy=proximal"
        )
    if algorithm.old_policy == "behavior" and algorithm.objective in ("none", "trpo"):
        raise ValueError(
            f"algorithm.old_policy=behavior with algorithm.objective={algorithm.objective}, which has no ratio, "
            "would correct nothing; set algorithm.old_policy=proximal with a correction"
        )
    for name in ("mis_token", "mis_sequence"):
        low, high = getattr(algorithm, f"{name}_low"), getattr(algorithm, f"{name}_high")
        if low >= high:
            raise ValueError(
                f"algorithm.{name}_low={low} must be below algorithm.{name}_high={high}, or nothing is kept"
            )
    if algorithm.ratio in ("sequence", "trajectory") and algorithm.advantage in (
        "gae",
        "reinforce",
        "reinforce_baseline",
        "reinforce_pp",
        "vine",
    ):
        raise ValueError(
            f"algorithm.ratio={algorithm.ratio} with algorithm.advantage={algorithm.advantage}: one ratio for the "
            "response cannot weight advantages that differ by token; set algorithm.ratio=sequence_token or token"
        )
    if algorithm.kl_estimator in ("k3_plus", "unbiased") and algorithm.kl == "reward":
        raise ValueError(
            f"algorithm.kl_estimator={algorithm.kl_estimator} is about gradients and a reward has none; set "
            "algorithm.kl_estimator=k1"
        )
    if algorithm.objective == "trpo":
        if config.model.dtype != "float32":
            raise ValueError(
                f"algorithm.objective=trpo with model.dtype={config.model.dtype}: its Fisher products are small "
                "differences that rounding would swallow; set model.dtype=float32"
            )
        if algorithm.ratio != "token":
            raise ValueError(
                f"algorithm.objective=trpo with algorithm.ratio={algorithm.ratio}: its line search measures token "
                "ratios; set algorithm.ratio=token"
            )
        if algorithm.kl == "loss" or algorithm.entropy_coef or algorithm.sft_coef:
            raise ValueError(
                "algorithm.objective=trpo bounds the step by itself; set algorithm.kl=none (or reward), "
                "algorithm.entropy_coef=0 and algorithm.sft_coef=0"
            )
    if algorithm.kl_stop is not None and (
        config.learner.steps_per_batch == 1 or algorithm.old_policy == "behavior"
    ):
        raise ValueError(
            f"algorithm.kl_stop={algorithm.kl_stop} ends the later steps of a batch by their KL from the proximal "
            f"policy; it needs learner.steps_per_batch > 1 (is {config.learner.steps_per_batch}) and "
            "algorithm.old_policy=proximal"
        )
    if algorithm.advantage == "none" and (algorithm.kl != "loss" or algorithm.dynamic_sampling):
        raise ValueError(
            f"algorithm.advantage=none with algorithm.kl={algorithm.kl}, algorithm.dynamic_sampling="
            f"{str(algorithm.dynamic_sampling).lower()}: only a KL in the loss would train, and all groups have equal "
            "advantages; set algorithm.kl=loss and algorithm.dynamic_sampling=false, or another advantage"
        )
    if config.reference.path is not None and (algorithm.kl == "none" or algorithm.reference_refresh_steps):
        raise ValueError(
            f"reference.path={config.reference.path} with algorithm.kl={algorithm.kl}, algorithm.reference_refresh_steps="
            f"{algorithm.reference_refresh_steps}: a model of its own needs a KL, and cannot take the policy's weights; set "
            "algorithm.kl=loss or reward and algorithm.reference_refresh_steps=0, or reference.path=null"
        )
    if algorithm.kl_target is not None and algorithm.kl == "none":
        raise ValueError(
            f"algorithm.kl_target={algorithm.kl_target} adapts the weight of a KL, and algorithm.kl=none has none; "
            "set algorithm.kl=reward or loss"
        )
    if algorithm.kl_target is not None and algorithm.kl_coef == 0:
        raise ValueError(
            f"algorithm.kl_target={algorithm.kl_target} with algorithm.kl_coef=0: the weight of the KL is steered by factors, "
            "and 0 stays 0; set algorithm.kl_coef to what it shall begin with"
        )
    if algorithm.reference_refresh_steps and algorithm.kl == "none":
        raise ValueError(
            f"algorithm.reference_refresh_steps={algorithm.reference_refresh_steps} refreshes a reference that "
            "algorithm.kl=none does not start; set algorithm.kl=loss or reward"
        )
    if algorithm.process_rewards and algorithm.advantage in OUTCOME_GROUPS:
        raise ValueError(
            f"algorithm.process_rewards with algorithm.advantage={algorithm.advantage}, which only sees the reward of "
            "the whole response; choose gae, reinforce, reinforce_baseline or reinforce_pp"
        )
    if algorithm.objective == "trpo" or algorithm.advantage == "min_variance":
        what = "objective=trpo" if algorithm.objective == "trpo" else "advantage=min_variance"
        if config.learner.replicas > 1:
            raise ValueError(f"algorithm.{what} runs on one learner rank; set learner.replicas=1")
    if (algorithm.sft_coef > 0) != (config.data.demonstrations is not None):
        raise ValueError(
            f"algorithm.sft_coef={algorithm.sft_coef} with data.demonstrations={config.data.demonstrations}: the one "
            "needs the other; set both or neither"
        )
    if "{prompt}" not in config.data.template:
        raise ValueError(
            f"data.template={config.data.template!r} has no {{prompt}}, so every prompt would be the same; put it where the "
            "prompt's text goes"
        )
    environment, agents = config.environment, config.episodes.agents
    if environment.name is not None and config.data.agents:
        raise ValueError(
            f"environment.name={environment.name} and data.agents={list(config.data.agents)} both say what an episode is; "
            "choose one"
        )
    if environment.rewritten_past == "fork" and (
        algorithm.process_rewards or algorithm.advantage == "min_variance"
    ):
        what = "process_rewards" if algorithm.process_rewards else "advantage=min_variance"
        raise ValueError(
            f"environment.rewritten_past=fork makes a row of every turn, which algorithm.{what} does not put together "
            "again; use a chat template that keeps past turns, or turn it off"
        )
    if config.episodes.name is not None and algorithm.advantage in ("remax", "vine"):
        raise ValueError(
            f"algorithm.advantage={algorithm.advantage} compares with other answers to the same prompt, not with episodes of "
            f"{config.episodes.name}; choose another, e.g. group"
        )
    if algorithm.advantage in ("per_agent", "joint_group") and not agents:
        raise ValueError(
            f"algorithm.advantage={algorithm.advantage} is for several agents, and neither data.agents nor "
            "environment.agents names any; add them (configs/solver_checker.yaml shows how) or choose "
            "algorithm.advantage=group"
        )
    named: list[str] = []
    for name, template in config.data.agents.items():
        if name == "prompt" or not name.isidentifier():
            raise ValueError(f"data.agents.{name}: an agent's name must be a word, and not 'prompt'")
        early = [other for other in config.data.agents if f"{{{other}}}" in template and other not in named]
        if early:
            raise ValueError(
                f"data.agents.{name} reads {{{early[0]}}}, who has not answered yet; agents answer in their order: "
                f"{', '.join(config.data.agents)}"
            )
        named.append(name)
    if len(agents) > 1 and algorithm.advantage not in ("per_agent", "joint_group"):
        raise ValueError(
            f"agents {', '.join(agents)} with algorithm.advantage={algorithm.advantage} would compare "
            "the rewards of different agents; choose per_agent or joint_group"
        )


def check_lag(config: Config) -> None:
    """Refuses a lag policy that its bound makes meaningless. Raises `ValueError`."""
    lag = config.lag
    if lag.max_version_lag == 0 and lag.policy != "pace":
        raise ValueError(
            f"lag.policy={lag.policy} with lag.max_version_lag=0: synchronous training has no groups beyond the bound; "
            "set lag.policy=pace or a higher bound"
        )
    if lag.max_version_lag == 0 and lag.ess_floor is not None:
        raise ValueError(
            f"lag.ess_floor={lag.ess_floor} with lag.max_version_lag=0: there is no lower bound to tighten to; set "
            "lag.ess_floor=null or a higher bound"
        )
    if lag.downweight_limit is not None and lag.policy != "downweight":
        raise ValueError(
            f"lag.downweight_limit={lag.downweight_limit} with lag.policy={lag.policy}, which trains no token beyond "
            "lag.max_version_lag; set lag.policy=downweight or lag.downweight_limit=null"
        )
    if config.max_trained_lag < lag.max_version_lag:
        raise ValueError(
            f"lag.downweight_limit={lag.downweight_limit} is below lag.max_version_lag={lag.max_version_lag}; raise it"
        )


def check_gpus(config: Config) -> None:
    """Ray gives a part of one GPU, or whole ones. Raises `ValueError`."""
    for name, section in config:
        if isinstance(section, Resources) and section.gpus > 1 and section.gpus % 1:
            raise ValueError(
                f"{name}.gpus={section.gpus:g}: a replica has whole GPUs or a part of one; set {name}.gpus={int(section.gpus)} or "
                f"{int(section.gpus) + 1}"
            )


def check_scaling(name: str, group: Generation | Verifiers) -> None:
    if group.max_replicas is None and group.min_replicas is None:
        return
    if group.max_replicas is None:
        raise ValueError(
            f"{name}.min_replicas={group.min_replicas} without {name}.max_replicas: the run scales by itself only when "
            f"both ends are known; set {name}.max_replicas"
        )
    if not (group.min_replicas or group.replicas) <= group.replicas <= group.max_replicas:
        raise ValueError(
            f"{name}.replicas={group.replicas} is not within {name}.min_replicas={group.min_replicas} and "
            f"{name}.max_replicas={group.max_replicas}"
        )


def share_with_signal(pass_rate: float, group_size: int) -> float:
    """1 - p^n - (1 - p)^n: how many groups of n responses, each right with probability p, are neither all right nor all
    wrong."""
    return 1.0 - pass_rate**group_size - (1.0 - pass_rate) ** group_size


def warnings(config: Config) -> list[str]:
    """Choices that work but that their user most likely did not mean."""
    idle: dict[str, list[str]] = {}
    for key, needs in without_effect(config).items():
        idle.setdefault(needs, []).append(key)
    doubtful = _doubtful(config) if config.stage == "rl" else []
    if config.stage == "reward_model" and config.offline.reward == "outcome" and config.offline.held_out == 0:
        doubtful.append(
            "offline.held_out=0: without rows held out the reward model has no scale, and no run takes it as reward_model.path"
        )
    return [*doubtful, *(f"{', '.join(keys)}: without effect; needs {needs}" for needs, keys in idle.items())]


def _doubtful(config: Config) -> list[str]:
    algorithm = config.algorithm
    found: list[str] = []
    if (
        algorithm.advantage == "none"
        and config.reference.path is None
        and not algorithm.reference_refresh_steps
    ):
        found.append(
            "algorithm.advantage=none with reference.path=null: the KL to the weights that the run starts from is all that "
            "would train, and it is 0 from the start; set reference.path to a teacher"
        )
    if config.critic.warmup_steps >= config.run.steps:
        found.append(
            f"critic.warmup_steps={config.critic.warmup_steps} with run.steps={config.run.steps}: the policy would not move"
        )
    if algorithm.kl == "loss" and algorithm.kl_estimator == "k1":
        found.append(
            "algorithm.kl_estimator=k1 in the loss has expected gradient zero: it restrains nothing; k2 has the "
            "gradient of the KL"
        )
    if algorithm.kl == "loss" and algorithm.kl_estimator == "k3":
        found.append(
            "algorithm.kl_estimator=k3 in the loss has the gradient of the forward KL(reference || policy); k2 has "
            "that of the KL which it estimates"
        )
    if algorithm.kl == "reward" and algorithm.kl_estimator in ("k2", "k3"):
        found.append(
            f"algorithm.kl_estimator={algorithm.kl_estimator} in the reward gives a biased gradient; k1 is unbiased"
        )
    corrected = algorithm.correction or algorithm.old_policy == "behavior"
    if not corrected and config.lag.max_version_lag > 0:
        found.append(
            f"algorithm.correction=none with lag.max_version_lag={config.lag.max_version_lag}: nothing makes up for "
            "the age of rollouts"
        )
    if config.run.no_progress_deadline_s <= config.lag.straggler_deadline_s:
        found.append(
            f"run.no_progress_deadline_s={config.run.no_progress_deadline_s:g} is not above lag.straggler_deadline_s="
            f"{config.lag.straggler_deadline_s:g}: one slow group would end the run before it is dropped"
        )
    if algorithm.objective == "none" and config.learner.steps_per_batch > 1:
        found.append(
            f"algorithm.objective=none with learner.steps_per_batch={config.learner.steps_per_batch}: nothing bounds "
            "or corrects the later steps of a batch"
        )
    if (
        algorithm.ratio in ("sequence", "sequence_token")
        and config.learner.steps_per_batch == 1
        and algorithm.old_policy == "proximal"
    ):
        found.append(
            f"algorithm.ratio={algorithm.ratio} with learner.steps_per_batch=1: the ratio to the proximal policy is "
            "1, so the clip never acts"
        )
    size = config.sampling.group_size
    if algorithm.advantage in OUTCOME_GROUPS:
        best = share_with_signal(0.5, size)
        if best < FEW_WITH_SIGNAL:
            found.append(
                f"sampling.group_size={size}: of groups of {size} at most {best:.0%} hold a right and a wrong answer, which is what "
                f"algorithm.advantage={algorithm.advantage} learns from, and {share_with_signal(0.2, size):.0%} where every fifth "
                f"answer is right (of 8: {share_with_signal(0.5, 8):.0%} and {share_with_signal(0.2, 8):.0%})"
            )
    return found


# ---- keys without effect -----------------------------------------------------------------------------------


def _rl(config: Config) -> bool:
    return config.stage == "rl"


def _evaluates(config: Config) -> bool:
    """`headway eval` reads what scores and what is scored, whatever the stage."""
    return _rl(config) or config.data.eval_source is not None


def _samples(config: Config) -> bool:
    return _evaluates(config) or config.offline.loop != "none"


def _judges(config: Config) -> bool:
    return _evaluates(config) or config.offline.loop == "self_rewarding"


def _prompts_from(*kinds: str) -> Callable[[Config], bool]:
    """Whether some source of prompts is of one of these kinds, or, without any, a file."""

    def some(config: Config) -> bool:
        data = config.data
        own = (data.source, data.demonstrations) if _rl(config) else ()
        named = {source.partition(":")[0] for source in (*own, data.eval_source) if source is not None}
        return bool(named & {*kinds} if kinds else named - {"reasoning_gym", *PACKAGED})

    return some


def _learns_by(*objectives: str) -> Callable[[Config], bool]:
    return lambda config: config.stage == "preference" and config.offline.objective in objectives


def _corrects_by(*words: str) -> Callable[[Config], bool]:
    return lambda config: bool({*words} & {*config.algorithm.correction})


def _estimates_by(*advantages: str) -> Callable[[Config], bool]:
    return lambda config: config.algorithm.advantage in advantages


def _bounds_by(*objectives: str) -> Callable[[Config], bool]:
    return lambda config: config.algorithm.objective in objectives


_EVALUATED = "stage=rl, or data.eval_source for headway eval"
_SAMPLED = "stage=rl, an offline.loop, or data.eval_source for headway eval"

EFFECTS: tuple[tuple[str, str, Callable[[Config], bool]], ...] = (
    # Stages.
    ("algorithm.* queue.* critic.* reference.* reward_model.* lag.max_version_lag lag.policy lag.downweight* lag.ess_floor "
     "learner.groups_per_step learner.steps_per_batch learner.bucket_mib run.no_progress_deadline_s run.save_rollouts "
     "metrics.heartbeat_s metrics.traces data.demonstrations generation.replicas generation.*_replicas generation.drain_s "
     "generation.answer_deadline_s generation.update_deadline_s", "stage=rl", _rl),
    ("environment.* verifiers.* data.agents data.answer_field data.task_field data.template data.verifier data.num_prompts "
     "data.params", _EVALUATED, _evaluates),
    ("sampling.* generation.* lag.straggler_deadline_s", _SAMPLED, _samples),
    ("judge.* data.prompt_field data.verifier_params", f"{_EVALUATED}, or offline.loop=self_rewarding", _judges),
    ("offline.*", "another stage than rl", lambda c: not _rl(c)),
    ("offline.objective offline.beta* offline.label_smoothing offline.*desirable_weight offline.orpo_coef offline.gamma",
     "stage=preference", lambda c: c.stage == "preference"),
    ("offline.reward offline.centring", "stage=reward_model", lambda c: c.stage == "reward_model"),
    ("offline.centring", "offline.reward=outcome", lambda c: c.offline.reward == "outcome"),
    ("offline.beta", "an offline.objective with beta", _learns_by("dpo", "ipo", "kto", "simpo", "beta_dpo")),
    ("offline.label_smoothing", "offline.objective=dpo", _learns_by("dpo")),
    ("offline.*desirable_weight", "offline.objective=kto", _learns_by("kto")),
    ("offline.orpo_coef", "offline.objective=orpo", _learns_by("orpo")),
    ("offline.gamma", "offline.objective=simpo", _learns_by("simpo")),
    ("offline.beta_*", "offline.objective=beta_dpo", _learns_by("beta_dpo")),
    ("offline.rounds offline.loop_prompts", "an offline.loop", lambda c: c.offline.loop != "none"),
    ("offline.evaluate_every", "offline.held_out above 0", lambda c: c.offline.held_out > 0),
    # Data.
    ("data.answer_field data.task_field", "prompts from a file", _prompts_from()),
    ("data.prompt_field", "prompts from a file", lambda c: c.offline.loop == "self_rewarding" or _prompts_from()(c)),
    ("data.num_prompts data.params", "prompts from reasoning_gym", _prompts_from("reasoning_gym")),
    ("data.verifier", "prompts that reasoning_gym does not score by itself",
     lambda c: _prompts_from()(c) or _prompts_from(*PACKAGED)(c)),
    ("environment.*", "environment.name", lambda c: c.environment.name is not None),
    # Groups: those that are not started, and what others do not look at.
    ("critic.*", "algorithm.advantage=gae", lambda c: c.algorithm.needs_critic),
    ("critic.vtrace_cap", "critic.targets=vtrace", lambda c: c.critic.targets == "vtrace"),
    ("reference.*", "an algorithm.kl", lambda c: c.algorithm.needs_reference),
    ("reward_model.*", "reward_model.path", lambda c: c.reward_model.path is not None),
    ("judge.*", "judge.model", lambda c: c.judge.model is not None or c.offline.loop == "self_rewarding"),
    ("judge.model judge.replicas judge.cpus judge.labels judge.gpus judge.threads judge.dtype judge.gpu_memory_utilization",
     "another judge than the model of a loop, which judges itself", _evaluates),
    ("judge.vote", "judge.votes above 1", lambda c: c.judge.votes > 1),
    ("judge.gpu_memory_utilization", "judge.gpus", lambda c: c.judge.gpus > 0),
    ("judge.kv_cache_gib judge.threads", "a judge on CPUs (gpus=0)",
     lambda c: (c.judge if c.offline.loop == "none" else c.generation).gpus == 0),
    ("generation.gpu_memory_utilization", "generation.gpus", lambda c: c.generation.gpus > 0),
    ("generation.kv_cache_gib generation.threads", "engines on CPUs (generation.gpus=0)", lambda c: c.generation.gpus == 0),
    ("verifiers.http_*", "verifiers.http_url", lambda c: c.verifiers.http_url is not None),
    ("verifiers.threads", "verifiers.processes instead", lambda c: False),
    ("learner.lora_alpha", "learner.lora_rank", lambda c: c.learner.lora_rank > 0),
    # The algorithm.
    ("lag.downweight", "lag.policy=downweight", lambda c: c.lag.policy == "downweight"),
    ("algorithm.overlong_penalty algorithm.reward_* algorithm.process_rewards", "an algorithm.advantage that looks at rewards",
     lambda c: c.algorithm.advantage != "none"),
    ("algorithm.gamma", "algorithm.advantage=gae, reinforce, reinforce_baseline or reinforce_pp",
     _estimates_by("gae", "reinforce", "reinforce_baseline", "reinforce_pp")),
    ("algorithm.gae_lambda", "algorithm.advantage=gae", _estimates_by("gae")),
    ("algorithm.branches", "algorithm.advantage=vine", _estimates_by("vine")),
    ("algorithm.step_separator algorithm.max_steps", "algorithm.advantage=vine or algorithm.process_rewards",
     lambda c: c.algorithm.advantage == "vine" or c.algorithm.process_rewards),
    ("algorithm.ratio algorithm.ratio_mix algorithm.clip_* algorithm.staleness_adaptive",
     "algorithm.objective=clip, cispo or masked", _bounds_by("clip", "cispo", "masked")),
    ("algorithm.ratio_mix", "algorithm.ratio=mixed", lambda c: c.algorithm.ratio == "mixed"),
    ("algorithm.dual_clip", "algorithm.objective=clip", _bounds_by("clip")),
    ("algorithm.trust_region_kl algorithm.cg_*", "algorithm.objective=trpo", _bounds_by("trpo")),
    ("algorithm.ess_lr learner.learning_rate learner.warmup_steps learner.weight_decay learner.adam_betas learner.max_grad_norm",
     "another algorithm.objective than trpo, whose steps have a size of their own",
     lambda c: not _rl(c) or c.algorithm.objective != "trpo"),
    ("algorithm.correction_cap", "tis_token or tis_sequence in algorithm.correction",
     lambda c: _corrects_by("tis_token", "tis_sequence")(c)
     or (c.algorithm.kl == "loss" and c.algorithm.old_policy == "behavior")),
    ("algorithm.mis_token_*", "mis_token in algorithm.correction", _corrects_by("mis_token")),
    ("algorithm.mis_sequence_*", "mis_sequence in algorithm.correction", _corrects_by("mis_sequence")),
    ("algorithm.veto_below", "veto in algorithm.correction", _corrects_by("veto")),
    ("algorithm.off_policy_delta", "off_policy_mask in algorithm.correction", _corrects_by("off_policy_mask")),
    ("algorithm.rejected_in_denominator", "a rejecting word in algorithm.correction",
     _corrects_by("mis_token", "mis_sequence", "veto", "off_policy_mask")),
    ("algorithm.kl_estimator algorithm.kl_coef", "an algorithm.kl", lambda c: c.algorithm.kl != "none"),
    ("algorithm.kl_horizon", "algorithm.kl_target", lambda c: c.algorithm.kl_target is not None),
    ("algorithm.reference_decay", "algorithm.reference_refresh_steps", lambda c: c.algorithm.reference_refresh_steps > 0),
    ("algorithm.sft_rows", "algorithm.sft_coef", lambda c: c.algorithm.sft_coef > 0),
    ("algorithm.dynamic_sampling_tries", "algorithm.dynamic_sampling", lambda c: c.algorithm.dynamic_sampling),
)  # fmt: skip
"""Keys (patterns), what they need to have an effect, and whether it is there. Keys that are in no row always have one."""


def without_effect(config: Config) -> dict[str, str]:
    """What each key would need that is not as it is by itself and that this run does not look at. What a preset chooses is
    as it is by itself."""
    by_itself, preset = type(config)(), Algorithm(preset=config.algorithm.preset)
    found: dict[str, str] = {}
    for section, values in config:
        if not isinstance(values, Section):
            continue
        for name, value in values:
            chosen = section == "algorithm" and name != "preset" and value == getattr(preset, name)
            if chosen or value == getattr(getattr(by_itself, section), name):
                continue
            key = f"{section}.{name}"
            for patterns, needs, holds in EFFECTS:
                if any(fnmatchcase(key, pattern) for pattern in patterns.split()) and not holds(config):
                    found[key] = needs
                    break
    return found
