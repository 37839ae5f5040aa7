"""The doctor's checks of what is on this machine: run folder, model, data, endpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from headway.cluster.doctor_facts import GIB, Facts, Row, ok, warning
from headway.core.config import Config
from headway.core.errors import ConfigError, DataError
from headway.core.weights import ITEM_BYTES

# ---- files -------------------------------------------------------------------------------------------------


def _run_folder(facts: Facts) -> Iterable[Row]:
    from headway.cluster.run_folder import check_same_run
    from headway.learner.checkpoint import newest_complete

    config, folder = facts.config, facts.config.run_folder
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ConfigError(f"run.folder={config.run.folder}: {existing} cannot be written to; set run.folder")
    if not folder.exists() or not any(folder.iterdir()):
        yield ok(f"{folder} will be made")
        return
    newest = newest_complete(folder / "checkpoints")
    try:
        check_same_run(config, newest or folder)
        goes_on = f"--resume goes on from {newest.name if newest else 'its start'}"
    except ConfigError as error:
        goes_on = f"it cannot be resumed ({error})"
    yield warning(f"{folder} exists: {goes_on}", "--overwrite replaces it; run.name gives another")


def _model(facts: Facts) -> Iterable[Row]:
    folder, parameters = facts.model_folder, facts.parameters
    yield ok(f"{folder}: {parameters / 1e6:,.1f} million parameters")
    if (path := facts.config.judge.model) is not None:
        from headway.learner.pretrained import model_folder

        judge = model_folder(path)
        yield ok(f"judge {judge}: {parameters_of(judge, facts.config) / 1e6:,.1f} million parameters")


def parameters_of(folder: Path, config: Config) -> int:
    """Raises `DataError` for weights that are missing or damaged."""
    from safetensors import SafetensorError, safe_open

    from headway.cluster.room import published_bytes

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(f"{folder} holds no *.safetensors; save the model with save_pretrained")
    for file in files:
        try:
            with safe_open(file, framework="np"):
                pass
        except (OSError, SafetensorError) as error:
            raise DataError(f"{file} is damaged or cut off ({error}); copy it again") from error
    whole = config.model_copy(update={"learner": config.learner.model_copy(update={"lora_rank": 0})})
    return published_bytes(whole, str(folder)) // ITEM_BYTES[config.model.dtype]


def _disk(facts: Facts) -> Iterable[Row]:
    from headway.cluster.preflight import check_disk

    check_disk(facts.config, facts.model_folder)
    free = shutil.disk_usage(facts.config.run.folder).free
    yield ok(f"{free / GIB:,.0f} GiB free in {facts.config.run.folder}")


def _tokenizer(facts: Facts) -> Iterable[Row]:
    from headway.actors.chat import eos_token_ids
    from headway.cluster.preflight import check_template

    tokenizer = facts.tokenizer
    check_template(facts.config, facts.model_folder, tokenizer)
    ends = ", ".join(tokenizer.convert_ids_to_tokens(list(eos_token_ids(facts.model_folder, tokenizer))))
    template = "chat template" if facts.config.model.chat_template else "prompts as plain text"
    yield ok(f"{len(tokenizer):,} tokens, {template}, a response ends with {ends}")


# ---- data --------------------------------------------------------------------------------------------------


def _prompts(facts: Facts) -> Iterable[Row]:
    from headway.cluster.preflight import prompts_of, versions_of

    data, seed = facts.config.data, facts.config.run.seed
    yield ok(f"{len(facts.prompts):,} from {data.source}; verifiers: {versions_of(facts.prompts)}")
    for key in ("eval_source", "demonstrations"):
        source = getattr(data, key)
        if source is not None:
            yield ok(f"data.{key}: {len(prompts_of(facts.config, source, seed)):,} from {source}")


def _golds(facts: Facts) -> Iterable[Row]:
    from headway.cluster.preflight import CHECKED_GOLDS, check_golds

    check_golds(facts.config, facts.prompts)
    yield ok(f"the first {min(CHECKED_GOLDS, len(facts.prompts))} score 1 with their own verifier")


def _scorers(facts: Facts) -> Iterable[Row]:
    from headway.cluster.preflight import check_remote

    said: list[str] = []
    check_remote(facts.config, facts.kinds, said.append)
    yield from (warning(text.removeprefix("warning: ")) for text in said)
    if not said:
        yield ok(f"all there is for {', '.join(sorted(facts.kinds))}")


def _sandbox(facts: Facts) -> Iterable[Row]:
    from headway.verifiers import sandbox

    if "code" not in facts.kinds:
        yield ok("no prompt is scored by running code")
    elif gap := sandbox.unprotected():
        yield warning(gap)
    else:
        yield ok("bubblewrap")


def _lengths(facts: Facts) -> Iterable[Row]:
    from headway.cluster.preflight import model_len, trained_positions

    config = facts.config
    limit = model_len(config, facts.longest)
    trained = trained_positions(facts.model_folder)
    yield ok(
        f"longest prompt {facts.longest} + sampling.max_new_tokens={config.sampling.max_new_tokens} tokens, engines hold "
        f"{limit}"
    )
    if trained is not None and limit > trained:
        raise ConfigError(
            f"engines would hold {limit} tokens, but {config.model.path} knows {trained} positions "
            "(max_position_embeddings); lower sampling.max_new_tokens or generation.max_model_len, or leave long prompts out"
        )


def _queue(facts: Facts) -> Iterable[Row]:
    from headway.cluster.preflight import check_batch

    check_batch(facts.config, facts.longest)
    yield ok(
        f"queue.max_mib={facts.config.queue.max_mib} holds a batch of {facts.config.groups_per_batch} groups"
    )


def _rows(facts: Facts) -> Iterable[Row]:
    from headway.actors.offline import objective_of
    from headway.core import preferences

    config = facts.config
    if config.offline.loop != "none":
        from headway.cluster import loops

        found = loops.prompts_of(config)
    else:
        read: dict[str, Callable[[str], Sequence[Any]]] = {
            "sft": preferences.read_supervised,
            "process_reward_model": preferences.read_stepwise,
            "kto": preferences.read_labelled,
        }
        found = read.get(objective_of(config), preferences.read_pairs)(config.data.source)
        preferences.split_by_prompt(found, config.offline.held_out, config.run.seed)
    yield ok(f"{len(found):,} from {config.data.source}")


# ---- this machine ------------------------------------------------------------------------------------------


def _endpoint(facts: Facts) -> Iterable[Row]:
    from headway.cluster.preflight import endpoint_fault

    port, fault = facts.config.metrics.port, endpoint_fault(facts.config)
    if fault is not None:
        yield warning(
            f"port {port} is not free here ({_holder(port) or fault.strerror or fault})",
            "a run takes the next one that is, and says so; metrics.port=0 takes any",
        )
    else:
        yield ok(f"port {port} is free" if port else "any free port")


def _holder(port: int) -> str:
    """The process that listens there, as far as this user may know."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            is_there = (
                getattr(connection.laddr, "port", None) == port and connection.status == psutil.CONN_LISTEN
            )
            if is_there and connection.pid:
                command = " ".join(psutil.Process(connection.pid).cmdline())
                return f"process {connection.pid}: {command[:80]}"
    except psutil.Error:
        pass
    return ""


def _outputs(facts: Facts) -> Iterable[Row]:
    from headway.cluster.preflight import check_outputs

    check_outputs(facts.config)
    metrics = facts.config.metrics
    yield ok(f"metrics.tracker={metrics.tracker}, metrics.traces={metrics.traces or 'none'}")


CHECKS: tuple[tuple[str, Callable[[Facts], Iterable[Row]]], ...] = (
    ("run folder", _run_folder),
    ("model", _model),
    ("tokenizer", _tokenizer),
    ("prompts", _prompts),
    ("rows", _rows),
    ("golds", _golds),
    ("scorers", _scorers),
    ("sandbox", _sandbox),
    ("lengths", _lengths),
    ("queue", _queue),
    ("disk", _disk),
    ("endpoint", _endpoint),
    ("outputs", _outputs),
)
