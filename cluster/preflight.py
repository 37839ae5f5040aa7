"""Everything that can be known to be wrong before a cluster is touched."""

from __future__ import annotations

import errno
import importlib.util
import platform
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from headway.actors import environments
from headway.actors.chat import answer_end, encode, rewrites_past
from headway.actors.episodes import longest_prompt
from headway.actors.policy import demonstrations_file
from headway.actors.verifier import VerifierWorker
from headway.cluster.queue import group_bytes
from headway.core.config import Config
from headway.core.consistency import warnings
from headway.core.errors import ConfigError, DataError
from headway.core.prompts import Prompt, load_prompts
from headway.learner.pretrained import is_to_be_made, model_folder
from headway.learner.sft import Demonstration, write_demonstrations
from headway.verifiers import registry, sandbox
from headway.verifiers.judging import JUDGE
from headway.verifiers.pending import HTTP, REWARD_MODEL

CHECKED_GOLDS = 100
CHECKED_LENGTHS = 64
TRIED_GOLDS = 4
ROUND_TOKENS_TO = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """Inputs of a run that passed."""

    config: Config
    """With what was left open filled in."""
    model_folder: Path
    longest_prompt: int
    """Tokens."""


def prompts_of(config: Config, source: str, seed: int) -> tuple[Prompt, ...]:
    """The prompts of `source` under this configuration's fields and templates."""
    data = config.data
    return load_prompts(
        source,
        verifier=data.verifier,
        prompt_field=data.prompt_field,
        answer_field=data.answer_field,
        task_field=data.task_field,
        template=data.template,
        num_prompts=data.num_prompts,
        seed=seed,
        params=data.params,
        verifier_params=data.verifier_params,
    )


def preflight(config: Config, prompts: tuple[Prompt, ...], say: Callable[[str], None]) -> Checked:
    """Checks model, golds and lengths of these prompts, and disk. Raises `UserError`s that say what to change.

    `say` is told what takes long.
    """
    check_outputs(config)
    endpoint_fault(config)
    for caution in cautions(config):
        say(f"warning: {caution}")
    check_golds(config, prompts)
    kinds = kinds_of(*prompts)
    check_remote(config, kinds, say)
    if "code" in kinds and (gap := sandbox.unprotected()):
        say(f"warning: {gap}")
    folder = made_model(config.model.path, say)
    if config.judge.model is not None:
        judge = config.judge.model_copy(update={"model": str(made_model(config.judge.model, say))})
        config = config.model_copy(update={"judge": judge})
    if config.critic.path is not None:
        started = made_model(config.critic.path, say).resolve()
        _check_vocabulary(config, "critic.path", started, folder)
        critic = config.critic.model_copy(update={"path": str(started)})
        config = config.model_copy(update={"critic": critic})
    if config.reference.path is not None:
        teacher = made_model(config.reference.path, say)
        _check_vocabulary(config, "reference.path", teacher, folder)
        reference = config.reference.model_copy(update={"path": str(teacher)})
        config = config.model_copy(update={"reference": reference})
    if config.reward_model.path is not None:
        config = _with_reward_model(config, config.reward_model.path, folder)
    tokenizer = tokenizer_of(folder)
    check_template(config, folder, tokenizer)
    longest = longest_of(config, tokenizer, prompts)
    check_batch(config, longest)
    generation = config.generation.model_copy(update={"max_model_len": model_len(config, longest)})
    config = config.model_copy(update={"generation": generation})
    check_disk(config, folder)
    return Checked(config=config, model_folder=folder, longest_prompt=longest)


def cautions(config: Config) -> list[str]:
    """What is allowed and hardly meant, of the configuration by itself and on the CPU of this machine."""
    found = warnings(config)
    if config.model.dtype == "bfloat16" and not config.learner.gpus and not _multiplies_bfloat16():
        found.append(
            "model.dtype=bfloat16 on a CPU without instructions for it (AVX512 or AMX), which takes the learner about "
            "eight times as long as model.dtype=float32"
        )
    return found


def _multiplies_bfloat16() -> bool:
    import torch

    return platform.machine() != "x86_64" or torch.backends.cpu.get_cpu_capability() not in (
        "DEFAULT",
        "AVX2",
    )


def endpoint_fault(config: Config) -> OSError | None:
    """Why the endpoint will not be at its port, if another program is. Raises `ConfigError` where it could be at none."""
    host, port = config.metrics.host, config.metrics.port
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return error
        raise ConfigError(
            f"metrics.host={host}, metrics.port={port}: nothing can listen there ({error.strerror or error}); set metrics.host to "
            "an address of this machine (0.0.0.0: all), metrics.port to one from 1024 on"
        ) from error
    return None


def check_outputs(config: Config) -> None:
    """What curves and traces need must be installed. Raises `ConfigError`."""
    metrics = config.metrics
    if metrics.traces is not None and config.stage != "rl":
        raise ConfigError(
            f"metrics.traces={metrics.traces} with stage={config.stage}, which makes no rollouts to trace; set "
            "metrics.traces=null"
        )
    wanted = [] if metrics.tracker == "none" else [("tracker", metrics.tracker, metrics.tracker)]
    if metrics.traces is not None:
        exporter = "opentelemetry.exporter.otlp.proto.http"
        wanted.append(("traces", exporter, "opentelemetry-exporter-otlp-proto-http"))
    for key, module, package in wanted:
        if not _is_installed(module):
            raise ConfigError(
                f"metrics.{key}={getattr(metrics, key)} needs a package that is missing: pip install {package}"
            )


def _is_installed(module: str) -> bool:
    """A folder of that name that happens to be on the path is none."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # a package above it
        return False
    return spec is not None and spec.origin is not None


def check_batch(config: Config, longest: int) -> None:
    """The queue must hold a batch. `longest`: tokens of the longest prompt. Raises `ConfigError`."""
    batch = config.groups_per_batch * group_bytes(
        config.rows_per_group, longest, config.sampling.max_new_tokens
    )
    if batch > config.queue.max_mib << 20:
        raise ConfigError(
            f"queue.max_mib={config.queue.max_mib} may not hold one batch of {config.groups_per_batch} groups; set it to "
            f"at least {-(-batch >> 20)}"
        )


def model_len(config: Config, longest: int) -> int:
    """Tokens that an engine must hold: `generation.max_model_len`, or what it takes. Raises `ConfigError`."""
    needed = longest + config.sampling.max_new_tokens
    limit = config.generation.max_model_len
    if limit is None:
        return -(-needed // ROUND_TOKENS_TO) * ROUND_TOKENS_TO
    if limit < needed:
        raise ConfigError(
            f"generation.max_model_len={limit} cannot hold the longest prompt ({longest} tokens) and "
            f"sampling.max_new_tokens={config.sampling.max_new_tokens}; it needs {needed}"
        )
    return limit


def kinds_of(*prompts: Prompt) -> frozenset[str]:
    """Names of the verifiers that score them."""
    needed = (registry.needed(each.verifier, each.gold, "", each.context) for each in prompts)
    return frozenset[str]().union(*needed)


def versions_of(prompts: tuple[Prompt, ...]) -> str:
    """Names and versions of the verifiers that score these prompts: a resumed run must have the same."""
    kinds = kinds_of(*prompts)
    return ", ".join(f"{kind} {registry.lookup(kind).version}" for kind in sorted(kinds))


def known_to_judge(prompts: tuple[Prompt, ...]) -> list[Prompt]:
    """A few of those whose gold a judge can be tried on."""
    judged = (prompt for prompt in prompts if prompt.gold is not None and JUDGE in kinds_of(prompt))
    return list(islice(judged, TRIED_GOLDS))


def check_remote(config: Config, kinds: frozenset[str], say: Callable[[str], None]) -> None:
    """Scorers that these verifiers need must be named. Raises `ConfigError`."""
    for kind, key, value in (
        (JUDGE, "judge.model", config.judge.model),
        (HTTP, "verifiers.http_url", config.verifiers.http_url),
        (REWARD_MODEL, "reward_model.path", config.reward_model.path),
    ):
        if kind in kinds and value is None:
            raise ConfigError(
                f"verifier {kind!r} scores rows of {config.data.source}, but {key} is null; set it"
            )
        if value is not None and kind not in kinds:
            say(f"warning: {key}={value}, but no row of {config.data.source} has verifier {kind!r}")


def made_model(name: str, say: Callable[[str], None]) -> Path:
    """The model's folder, made first if headway makes it itself. Raises `DataError`."""
    if is_to_be_made(name):
        say(f"making model {name}, once (a minute or two)")
    return model_folder(name)


def _with_reward_model(config: Config, path: str, policy: Path) -> Config:
    """The configuration with the reward model's full path. Raises `DataError` when it cannot judge this policy."""
    from headway.learner.reward_model import read_about

    folder = Path(path).resolve()
    about = read_about(folder)
    if about["kind"] == "outcome" and about["calibration"] is None:
        raise DataError(
            f"reward_model.path={path} has no scale, which the end of its training makes from rows held out; train it to its "
            "end with offline.held_out above 0"
        )
    share, limit = about.get("filler_share"), config.reward_model.max_filler_share
    if share is not None and share > limit:
        raise DataError(
            f"reward_model.path={path} scores empty or filler answers at least as high as right ones for {share:.0%} of the "
            f"prompts that it was held out from, more than reward_model.max_filler_share={limit:g}: a policy would learn to "
            "write filler; train it on pairs that have such answers as rejected ones"
        )
    _check_vocabulary(config, "reward_model.path", folder, policy)
    own = config.reward_model.model_copy(update={"path": str(folder)})
    return config.model_copy(update={"reward_model": own})


def _check_vocabulary(config: Config, key: str, folder: Path, policy: Path) -> None:
    """Whether this model reads the policy's tokens. Raises `DataError`."""
    if tokenizer_of(policy).get_vocab() != tokenizer_of(folder).get_vocab():
        raise DataError(
            f"{key}={folder} has another vocabulary than model.path={config.model.path}, whose tokens it is to read; choose "
            "a model of the same family"
        )


def check_golds(config: Config, prompts: tuple[Prompt, ...]) -> None:
    """Every gold answer must score 1 with its own verifier, or no response ever could."""
    worker = VerifierWorker(config.verifiers.model_copy(update={"processes": 1}))
    try:
        failures = worker.check_golds(prompts, CHECKED_GOLDS)
    finally:
        worker.close()
    if failures:
        raise DataError(
            f"{len(failures)} of the first {min(CHECKED_GOLDS, len(prompts))} gold answers in {config.data.source} do "
            f"not score 1 with their own verifier (data.verifier={config.data.verifier}); first: {failures[0]}"
        )


def tokenizer_of(folder: Path) -> Any:
    """Of a model folder. Raises `DataError`."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:  # the library's Rust part raises plain ones
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise DataError(f"the tokenizer in {folder} cannot be loaded: {lines[0]}") from error


def check_template(config: Config, folder: Path, tokenizer: Any) -> None:
    """Whether prompts, and conversations if there are any, can be put as the configuration wants it. Raises
    `ConfigError`."""
    if config.model.chat_template and not tokenizer.chat_template:
        raise ConfigError(
            f"model {folder} has no chat template; set model.chat_template=false to use prompts as plain text"
        )
    _check_environment(config, tokenizer)


def longest_of(config: Config, tokenizer: Any, prompts: tuple[Prompt, ...]) -> int:
    """Tokens of the longest prompt, looked for among those with the most characters."""
    longest = sorted(prompts, key=lambda prompt: len(str(prompt.content)))[-CHECKED_LENGTHS:]

    def tokens(prompt: Prompt) -> list[int]:
        return encode(tokenizer, prompt, chat_template=config.model.chat_template)

    return max(
        longest_prompt(prompt, config.episodes, tokens, max_new_tokens=config.sampling.max_new_tokens)
        for prompt in longest
    )


def _check_environment(config: Config, tokenizer: Any) -> None:
    """Whether its agents are those of the configuration, and its conversations can go on token for token."""
    settings = config.environment
    if settings.name is None:
        return
    agents = environments.make(settings.name, settings.params).agents
    if agents != (settings.agents or agents[:1]):
        raise ConfigError(
            f"environment.agents={list(settings.agents)}, but in {settings.name} {', '.join(agents)} speak; set "
            f"environment.agents={list(agents)}"
        )
    if not config.model.chat_template or settings.rewritten_past == "fork":
        return
    if why := rewrites_past(tokenizer):
        raise ConfigError(
            f"the chat template of {config.model.path} rewrites past turns ({why}), so that what an engine has seen would "
            "not be what the policy is asked next; set environment.rewritten_past=fork to train every turn as a row of its "
            "own"
        )


def encode_demonstrations(config: Config, folder: Path) -> None:
    """Writes `data.demonstrations`, if there are any, as token ids into the run folder, for the learner. `folder`: the
    model's. Raises `DataError`."""
    source = config.data.demonstrations
    if source is None:
        return
    tokenizer = tokenizer_of(folder)
    end = answer_end(folder, tokenizer, chat_template=config.model.chat_template)
    demonstrations = []
    for prompt in prompts_of(config, source, config.run.seed):
        prompt_ids = encode(tokenizer, prompt, chat_template=config.model.chat_template)
        answer_ids = tokenizer(str(prompt.gold), add_special_tokens=False)["input_ids"]
        demonstrations.append(Demonstration(prompt_ids, [[*answer_ids, end]]))
    write_demonstrations(demonstrations, demonstrations_file(config.run_folder))


def trained_positions(folder: Path) -> int | None:
    """How many positions the model knows; None where it does not say."""
    from transformers import PretrainedConfig

    found, _ = PretrainedConfig.get_config_dict(folder)
    return found.get("max_position_embeddings", found.get("n_positions"))


def check_disk(config: Config, folder: Path) -> None:
    """Two checkpoints of weights and both AdamW moments in float32 must fit beside each other."""
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    needed = 2 * weights * 6  # bfloat16 on disk: x2 to float32, x3 with the moments
    try:
        config.run.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run.folder={config.run.folder} cannot be made: {error.strerror}; set run.folder"
        ) from error
    free = shutil.disk_usage(config.run.folder).free
    if free < needed:
        raise ConfigError(
            f"run.folder={config.run.folder} has {free >> 20} MiB free; two checkpoints of this model need about "
            f"{needed >> 20} MiB"
        )
