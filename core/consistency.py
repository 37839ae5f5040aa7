"""What a configuration's values say to each other: combinations that are refused, with the reason and what to change, and
those that work but that their user most likely did not mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.sections import OUTCOME_GROUPS, WEIGHTS, Generation, Verifiers

if TYPE_CHECKING:
    from headway.core.config import Config


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


def warnings(config: Config) -> list[str]:
    """Choices that work but that their user most likely did not mean."""
    algorithm = config.algorithm
    found = []
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
    return found
