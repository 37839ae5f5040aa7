"""Every key in every mode: it has an effect, or setting it is refused or warned about. The lists here are written by hand; a
new key has to be put where it belongs."""

from __future__ import annotations

import io
import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from rich.console import Console

from headway.cluster.evaluate import evaluation_config
from headway.cluster.groups import Monotony
from headway.cluster.progress import Progress
from headway.cluster.queue import Receipt, receipt_of
from headway.core import rollouts
from headway.core.config import Config, dump_config, keys, parse_config
from headway.core.consistency import EFFECTS, share_with_signal, warnings, without_effect
from headway.core.errors import ConfigError
from headway.core.presets import PRESETS

FIELDS = {key: info for key, info in keys() if key not in ("stage", "critic.replicas")}
"""Without what says the mode, and what has one value."""
OTHERS: dict[str, Any] = {
    "run.steps": 200,
    "data.template": "Solve: {prompt}",
    "data.agents": {"a": "{prompt}"},
    "algorithm.preset": "dapo",
    "algorithm.correction": "veto",
    "algorithm.dual_clip": 3.0,
    "environment.agents": ["a", "b"],
    "learner.adam_betas": (0.8, 0.9),
    "learner.steps_per_batch": 2,
    "generation.max_replicas": 3,
    "verifiers.max_replicas": 3,
    "judge.max_new_tokens": 100,
    "lag.downweight_limit": 3,
    "metrics.traces": "traces.jsonl",
    "verifiers.http_deadline_s": 200.0,
}
"""Where the next value of its type would not do."""


def matching(patterns: str) -> set[str]:
    found = {key for key in FIELDS for pattern in patterns.split() if fnmatchcase(key, pattern)}
    for pattern in patterns.split():
        assert any(fnmatchcase(key, pattern) for key in FIELDS), f"{pattern} is no key"
    return found


def another(key: str, now: Any) -> Any:
    """A value that the key does not have."""
    if key in OTHERS:
        return OTHERS[key]
    kinds = [FIELDS[key].annotation, *get_args(FIELDS[key].annotation)]
    for kind in kinds:
        if get_origin(kind) is Literal:
            return next((value for value in get_args(kind) if value != now), now)
    if bool in kinds:
        return not now
    if int in kinds:
        return (now or 0) + 1
    if float in kinds:
        return 0.25 if now is None or now == 0 else now * 0.75
    if dict in (get_origin(kind) for kind in kinds):
        return {"a": "b"}
    return "other"


def put(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    section, _, name = key.partition(".")
    return {**tree, section: {**tree.get(section, {}), name: value}}


def said(tree: dict[str, Any], key: str) -> str | None:
    """What a person is told who sets this key to another value, in a run that is as `tree` says; None: nothing."""
    node: Any = parse_config(tree)
    for name in key.split("."):
        node = getattr(node, name)
    try:
        config = parse_config(put(tree, key, another(key, node)))
    except ConfigError as refusal:
        return str(refusal)
    return without_effect(config).get(key)


def silent(tree: dict[str, Any]) -> set[str]:
    return {key for key in FIELDS if said(tree, key) is None}


# ---- stages ------------------------------------------------------------------------------------------------

EVERYWHERE = """
    run.name run.folder run.seed run.steps run.checkpoint_every run.max_restarts model.* data.source data.eval_source
    learner.cpus learner.gpus learner.threads learner.labels learner.replicas learner.lora_rank
    learner.activation_checkpointing learner.learning_rate learner.warmup_steps learner.weight_decay learner.adam_betas
    learner.max_grad_norm learner.microbatch_tokens learner.step_deadline_s metrics.port metrics.host metrics.tracker cluster.*
"""
ROWS = f"{EVERYWHERE} offline.rows_per_step offline.held_out offline.evaluate_every"
PREFERENCES = f"{ROWS} offline.objective offline.loop"
ENGINE = """
    sampling.* generation.cpus generation.gpus generation.threads generation.labels generation.max_concurrent_requests
    generation.max_model_len generation.kv_cache_gib generation.prefix_caching generation.start_deadline_s
    lag.straggler_deadline_s
"""
JUDGE = """
    judge.max_model_len judge.max_new_tokens judge.force_verdict judge.temperature judge.max_response_chars judge.deadline_s
    judge.max_concurrent_requests judge.kv_cache_gib
"""
STAGES: dict[str, tuple[dict[str, Any], str]] = {
    "sft": ({"stage": "sft"}, ROWS),
    "reward model": ({"stage": "reward_model"}, f"{ROWS} offline.reward offline.centring"),
    "process reward model": (
        {"stage": "reward_model", "offline": {"reward": "process"}},
        f"{ROWS} offline.reward",
    ),
    **{
        objective: (
            {"stage": "preference", "offline": {"objective": objective}},
            f"{PREFERENCES} {own}",
        )
        for objective, own in {
            "dpo": "offline.beta offline.label_smoothing",
            "ipo": "offline.beta",
            "kto": "offline.beta offline.desirable_weight offline.undesirable_weight",
            "orpo": "offline.orpo_coef",
            "simpo": "offline.beta offline.gamma",
            "beta_dpo": "offline.beta offline.beta_*",
        }.items()
    },
    "spin": (
        {"stage": "preference", "offline": {"loop": "spin"}},
        f"{PREFERENCES} offline.beta offline.label_smoothing offline.rounds offline.loop_prompts {ENGINE}",
    ),
    "self-rewarding": (
        {"stage": "preference", "offline": {"loop": "self_rewarding"}},
        f"{PREFERENCES} offline.beta offline.label_smoothing offline.rounds offline.loop_prompts {ENGINE} {JUDGE} "
        "data.prompt_field data.verifier_params",
    ),
}
REFUSED_ANYWAY = {"offline.loop": "kto", "judge.votes": "self-rewarding"}
"""Values at odds with others, though the key has an effect: kto has no pairs; several votes need a temperature."""


@pytest.mark.parametrize("mode", STAGES)
def test_a_stage_says_which_keys_it_does_not_look_at(mode: str) -> None:
    tree, looked_at = STAGES[mode]
    refused = {key for key, where in REFUSED_ANYWAY.items() if where == mode}
    assert silent(tree) == matching(looked_at) - refused


# ---- rl ----------------------------------------------------------------------------------------------------


def algorithm(**choices: Any) -> dict[str, Any]:
    return {"algorithm": choices}


FILE = {"source": "rows.jsonl"}
IDLE: list[tuple[str, dict[str, Any]]] = [
    ("offline.*", {"stage": "preference"}),
    ("data.prompt_field data.answer_field data.task_field data.verifier", {"data": FILE}),
    ("data.demonstrations algorithm.sft_coef algorithm.sft_rows",
     {**algorithm(sft_coef=0.1), "data": {"demonstrations": "shown.jsonl"}}),
    ("environment.*", {"environment": {"name": "calculator"}}),
    ("environment.agents", {**algorithm(preset="dr_mas"), "environment": {"name": "solver_checker", "agents": ["c", "d"]}}),
    ("algorithm.process_rewards algorithm.gamma algorithm.gae_lambda critic.*", algorithm(preset="ppo")),
    ("critic.vtrace_cap", {**algorithm(preset="ppo"), "critic": {"targets": "vtrace"}}),
    ("algorithm.branches algorithm.step_separator algorithm.max_steps", algorithm(preset="vineppo")),
    ("algorithm.ratio_mix", algorithm(preset="mgpo")),
    ("algorithm.trust_region_kl algorithm.cg_*", {**algorithm(preset="trpo"), "model": {"dtype": "float32"}}),
    ("algorithm.mis_token_*", algorithm(preset="icepop")),
    ("algorithm.veto_below", algorithm(correction="veto")),
    ("algorithm.off_policy_delta", algorithm(preset="deepseek_v32")),
    ("algorithm.kl_estimator algorithm.kl_coef algorithm.kl_target algorithm.reference_refresh_steps reference.*",
     algorithm(preset="grpo")),
    ("algorithm.kl_horizon", algorithm(preset="grpo", kl_target=0.1)),
    ("algorithm.kl_stop", {"learner": {"steps_per_batch": 2}}),
    ("algorithm.reference_decay", algorithm(preset="grpo", reference_refresh_steps=5)),
    ("lag.downweight lag.downweight_limit", {"lag": {"policy": "downweight"}}),
    ("learner.lora_alpha", {"learner": {"lora_rank": 4}}),
    ("generation.min_replicas verifiers.min_replicas",
     {"generation": {"replicas": 2, "max_replicas": 3}, "verifiers": {"replicas": 2, "max_replicas": 3}}),
    ("generation.gpu_memory_utilization", {"generation": {"gpus": 1}}),
    ("verifiers.http_*", {"verifiers": {"http_url": "http://scorer"}}),
    ("judge.*", {"judge": {"model": "m"}}),
    ("judge.votes", {"judge": {"model": "m", "temperature": 0.5}}),
    ("judge.vote", {"judge": {"model": "m", "votes": 3, "temperature": 0.5}}),
    ("judge.gpu_memory_utilization", {"judge": {"model": "m", "gpus": 1}}),
    ("reward_model.*", {"reward_model": {"path": "m"}}),
]  # fmt: skip
"""Keys that a default run does not look at, and a run that does."""
NEVER = "verifiers.threads"
SWITCHES = "environment.name judge.model reward_model.path verifiers.http_url"
"""They wake the others."""
CONFLICTS = "algorithm.old_policy sampling.top_p"
"""Refused for what else the default preset says, in words that name both."""


def test_a_default_run_says_which_keys_it_does_not_look_at() -> None:
    idle = set[str]().union(*(matching(patterns) for patterns, _ in IDLE)) - matching(SWITCHES)
    assert silent({}) == FIELDS.keys() - idle - matching(f"{NEVER} {CONFLICTS}")


@pytest.mark.parametrize(("patterns", "tree"), IDLE, ids=[patterns.split()[0] for patterns, _ in IDLE])
def test_what_a_default_run_does_not_look_at_has_an_effect_elsewhere(
    patterns: str, tree: dict[str, Any]
) -> None:
    """Each key, in the run of its line, or of another line that is about it too."""
    for key in matching(patterns):
        runs = [run for also, run in IDLE if key in matching(also)] + [run for run, _ in STAGES.values()]
        assert None in [said(run, key) for run in (tree, *runs)], key


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_not_blamed_for_what_it_chooses(name: str) -> None:
    agents = {"a": "{prompt}"} if name in ("magrpo", "dr_mas") else {}
    tree = {**algorithm(preset=name), "data": {"agents": agents}, "model": {"dtype": "float32"}}
    assert without_effect(parse_config(tree)) == {}
    # What is written into a run folder has every key, and is what was set all the same.
    assert without_effect(parse_config(json.loads(dump_config(parse_config(tree))))) == {}


def test_what_is_without_effect_is_one_line_for_each_reason() -> None:
    tree = {
        "algorithm": {"preset": "rloo", "clip_low": 0.1, "clip_high": 0.3, "branches": 2, "kl": "none"},
        "sampling": {"group_size": 8},
    }
    assert warnings(parse_config(tree)) == [
        "algorithm.branches: without effect; needs algorithm.advantage=vine",
        "algorithm.clip_low, algorithm.clip_high: without effect; needs algorithm.objective=clip, cispo or masked",
    ]
    assert warnings(
        parse_config({"stage": "sft", "lag": {"max_version_lag": 5}, "queue": {"max_mib": 9}})
    ) == ["lag.max_version_lag, queue.max_mib: without effect; needs stage=rl"]


def test_every_row_of_the_table_is_about_some_key() -> None:
    for patterns, _, _ in EFFECTS:
        assert matching(patterns)


# ---- sampling and corrections, group size ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"algorithm": {"correction": "none", "ess_lr": True}}, "algorithm.ess_lr"),
        ({"algorithm": {"correction": "none", "ess_lr": False}, "lag": {"ess_floor": 0.5}}, "lag.ess_floor"),
        (
            {"algorithm": {"preset": "ppo", "correction": "none"}, "critic": {"targets": "vtrace"}},
            "critic.targets=vtrace",
        ),
        (
            {"algorithm": {"preset": "vcpo", "correction": "none", "ess_lr": False}},
            "algorithm.advantage=min_variance",
        ),
        ({"algorithm": {"preset": "cispo"}}, "algorithm.old_policy=behavior"),
    ],
)
def test_a_nucleus_goes_with_nothing_that_compares_with_the_engine(tree: dict[str, Any], key: str) -> None:
    assert parse_config(tree)
    with pytest.raises(ConfigError, match=f"sampling.top_p=0.9 with .*{key}"):
        parse_config({**tree, "sampling": {"top_p": 0.9}})


def test_groups_with_signal_by_hand() -> None:
    assert share_with_signal(0.18, 2) == pytest.approx(
        2 * 0.18 * 0.82
    )  # right and wrong, in either order: 29.5 %
    assert share_with_signal(0.5, 3) == pytest.approx(6 / 8)
    assert share_with_signal(0.0, 8) == share_with_signal(1.0, 8) == 0.0


@pytest.mark.parametrize(
    ("advantage", "size", "is_warned"),
    [("group", 2, True), ("group", 3, True), ("group", 4, False), ("reinforce_pp", 2, False)],
)
def test_a_small_group_is_warned_about(advantage: str, size: int, is_warned: bool) -> None:
    tree = {"algorithm": {"advantage": advantage}, "sampling": {"group_size": size}}
    found = [line for line in warnings(parse_config(tree)) if line.startswith("sampling.group_size")]
    assert len(found) == is_warned
    if size == 2 and is_warned:
        assert (
            "groups of 2 at most 50% hold a right and a wrong answer" in found[0] and "32% where" in found[0]
        )


def steps_said(config: Config, *steps: tuple[int, float, float, int]) -> list[str]:
    """What a run warns about after steps of (groups, share of them without signal, mean reward, groups dropped so far)."""
    shown = io.StringIO()
    console = Console(file=shown, width=400)
    progress = Progress(config, console)
    for number, (groups, without, mean, dropped) in enumerate(steps, 1):
        progress.step(
            {
                "version": number, "reward_mean": mean, "sampled_reward_mean": mean, "lag": [0] * groups,
                "importance_ess_fraction": 1.0, "behavior_kl": 0.0, "grad_norm": 0.0, "response_tokens": [1] * groups,
                "seconds": {"total": 1.0}, "waited_s": 0.0, "no_signal_groups_fraction": without,
                "dropped": {"no_signal": dropped},
            }
        )  # fmt: skip
    return [line.partition("warning: ")[2] for line in shown.getvalue().splitlines() if "warning" in line]


def test_a_run_whose_groups_teach_little_says_so_once() -> None:
    pairs = parse_config({"sampling": {"group_size": 2}})
    step = (60, 0.7, 0.18, 0)
    (line,) = steps_said(pairs, step, step, step)
    assert line == (
        "70% of 120 groups have equal rewards and teach nothing; at a pass rate of 18% a group of 2 has both right and wrong "
        "answers with 1 - p^n - (1-p)^n = 30%, one of 8 with 80% (sampling.group_size)"
    )
    assert steps_said(pairs, *[(60, 0.5, 0.4, 0)] * 5) == []
    # Dynamic sampling trains groups with signal only: those that it dropped count.
    (line,) = steps_said(Config(), (60, 0.0, 0.9, 0), (60, 0.0, 0.9, 300))
    assert line.startswith("71% of 420 groups have equal rewards")
    (line,) = steps_said(pairs, *[(60, 1.0, 0.0, 0)] * 2)
    assert line == "100% of 120 groups have equal rewards and teach nothing: give easier or harder prompts"
    assert steps_said(parse_config(algorithm(preset="distill")), *[(60, 1.0, 0.0, 0)] * 5) == []


# ---- the bound on the lag, the folder of a loop ------------------------------------------------------------


def test_the_header_shows_the_bound_that_nobody_set(root: Path) -> None:
    def header(**lag: int) -> str:
        shown = io.StringIO()
        config = parse_config({"lag": lag})
        Progress(config, Console(file=shown, width=200)).header(config, num_prompts=3, model="m")
        return shown.getvalue()

    assert "max version lag 2\n" in header()
    assert "max version lag 0 (synchronous)" in header(max_version_lag=0)
    assert "| `lag.max_version_lag` | int ≥ 0 | `2` |" in (root / "docs" / "configuration.md").read_text()


def run_of(tmp_path: Path, tree: dict[str, Any], *models: str) -> Path:
    """A run folder with these model folders."""
    folder = tmp_path / "r"
    for model in models:
        (folder / model).mkdir(parents=True)
        (folder / model / "config.json").write_text("{}")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(dump_config(parse_config(tree)))
    return folder


SPIN = {"stage": "preference", "offline": {"loop": "spin"}}


@pytest.mark.parametrize(
    ("tree", "models", "evaluated"),
    [
        ({"stage": "sft"}, ["model"], "model"),
        (SPIN, ["model", "round-0/model"], "model"),
        (SPIN, ["round-0/model", "round-9/model", "round-10/model"], "round-10/model"),
        (SPIN, ["round-0/model", "round-1"], "round-0/model"),
    ],
)
def test_eval_finds_the_newest_model_of_any_stage(
    tmp_path: Path, tree: dict[str, Any], models: list[str], evaluated: str
) -> None:
    folder = run_of(tmp_path, tree, *models)
    _, model = evaluation_config(str(folder), None, [])
    assert Path(model) == folder / evaluated


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        (SPIN, "has no complete checkpoint yet"),
        ({}, "has no complete checkpoint yet"),
        ({"stage": "reward_model"}, "a reward model, which scores answers and gives none"),
    ],
)
def test_eval_of_a_run_that_answers_nothing_is_refused(
    tmp_path: Path, tree: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        evaluation_config(str(run_of(tmp_path, tree)), None, [])


def test_eval_of_a_folder_that_was_copied_in_part_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"run": {"na', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config.json is not JSON"):
        evaluation_config(str(tmp_path), None, [])


# ---- rewards that are always the same ----------------------------------------------------------------------


def receipt(rewards: list[float], reasons: dict[str, int]) -> Receipt:
    return Receipt(
        group_id=0, num_bytes=1, oldest_version=0, newest_version=0, rewards=tuple(rewards), response_lengths=(1,),
        equal_reward=None, reasons=reasons,
    )  # fmt: skip


def test_a_reward_that_is_always_the_same_is_warned_about_with_the_reasons() -> None:
    found = Monotony()
    for _ in range(50):
        assert found.warning() is None
        found.see(receipt([0.0] * 4, {"wrong": 2, "no_answer": 1, "timeout": 1}))
    assert found.warning() == (
        "all 200 responses in a row have reward 0 (wrong 50%, no_answer 25%, timeout 25%): nothing is learnt from them"
    )
    assert found.warning() is None  # once
    found.see(receipt([0.0, 1.0], {"wrong": 1, "correct": 1}))
    assert found.shares() == ""
    for _ in range(60):
        found.see(receipt([], {"http_timeout": 4}))
    assert found.warning() == (
        "all 240 responses in a row are unscored (http_timeout 100%): nothing is learnt from them"
    )


def test_a_receipt_says_why_responses_have_their_rewards() -> None:
    row = {
        "group_id": 7, "prompt_id": "p", "prompt_ids": [1], "response_ids": [1], "loss_mask": [1],
        "behavior_logprobs": [-1.0], "version_spans": [{"start": 0, "end": 1, "version": 0}], "finish_reason": "stop",
        "truncated": False, "text": "x",
    }  # fmt: skip
    verdicts = [(0.0, "wrong"), (0.0, "wrong"), (1.0, "correct"), (None, "crash")]
    rows = (
        {**row, "rollout_id": f"7/{n}", "sample_index": n, "reward": reward, "verdict_reason": reason}
        for n, (reward, reason) in enumerate(verdicts)
    )
    assert receipt_of(rollouts.build(rows)).reasons == {"wrong": 2, "correct": 1, "crash": 1}
