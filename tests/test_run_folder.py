"""Whether a folder may be used, and what a run may be resumed with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from headway.cluster.record import keep_batches
from headway.cluster.run_folder import alone_in, check_same_inputs, check_same_run, prepare_folder
from headway.core.config import Config, dump_config, parse_config
from headway.core.errors import ConfigError
from headway.core.prompts import Prompt
from headway.core.prompts import fingerprint as fingerprint_of_prompts
from headway.learner import checkpoint
from headway.learner.pretrained import fingerprint as fingerprint_of_model


def saved(tmp_path: Path, config: Config) -> Path:
    (tmp_path / "config.json").write_text(dump_config(config))
    return tmp_path


def test_more_steps_and_other_machines_are_the_same_run(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, parse_config({"generation": {"max_model_len": 96}}))
    check_same_run(
        parse_config(
            {"run": {"steps": 999}, "generation": {"replicas": 4, "gpus": 1}, "metrics": {"port": 0}}
        ),
        checkpoint,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learner": {"groups_per_step": 4}}, "learner.groups_per_step was 8, is 4"),
        ({"data": {"params": {"max_terms": 3}}}, r"data.params was {}, is {'max_terms': 3}"),
        ({"run": {"seed": 1}}, "run.seed was 0, is 1"),
        ({"lag": {"max_version_lag": 0}}, "lag.max_version_lag was 2, is 0"),
        (
            {"algorithm": {"correction": "none"}},
            r"algorithm.correction was \['tis_token', 'mis_sequence'\], is \[\]",
        ),
    ],
)
def test_other_data_or_another_algorithm_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_same_run(parse_config(change), saved(tmp_path, Config()))


def test_a_checkpoint_without_its_configuration_is_no_match(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no readable config.json"):
        check_same_run(Config(), tmp_path)


def test_a_key_that_is_newer_than_the_run_was_as_it_is_by_itself(tmp_path: Path) -> None:
    tree = json.loads(dump_config(parse_config({"algorithm": {"preset": "dapo"}})))
    del tree["lag"]["policy"], tree["algorithm"]["clip_high"], tree["judge"]
    (tmp_path / "config.json").write_text(json.dumps(tree))
    dapo = {"algorithm": {"preset": "dapo"}}
    check_same_run(parse_config(dapo), tmp_path)
    with pytest.raises(ConfigError, match=r"but lag.policy was 'pace', is 'drop'; set"):
        check_same_run(parse_config({**dapo, "lag": {"policy": "drop"}}), tmp_path)
    with pytest.raises(ConfigError, match=r"but algorithm.clip_high was 0.28, is 0.3; set"):
        check_same_run(parse_config({"algorithm": {"preset": "dapo", "clip_high": 0.3}}), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tree | {"gone": {"away": 1}}))
    with pytest.raises(ConfigError, match=r"but gone.away was 1, is None; set"):
        check_same_run(parse_config(dapo), tmp_path)


@pytest.mark.parametrize("text", ["{}", "[]", '{"run": {}, "model": {}, "data": {}}'])
def test_what_is_no_configuration_of_a_run_is_no_match(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"holds no readable config.json"):
        check_same_run(Config(), tmp_path)


def test_a_run_goes_on_with_the_content_that_it_began_with(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    weights = {"a": np.zeros((8, 8), np.float32), "b": np.ones(3, np.float32)}
    save_file(weights, model / "model.safetensors")
    prompts = [Prompt(prompt_id=str(n), content=f"{n}", gold=n, verifier="numeric") for n in range(3)]

    def inputs() -> dict[str, str]:
        return {"model.path": fingerprint_of_model(model), "data.source": fingerprint_of_prompts(prompts)}

    check_same_inputs(tmp_path, inputs(), resume=False)
    check_same_inputs(tmp_path, inputs(), resume=True)
    save_file({**weights, "b": np.float32(1.001) * weights["b"]}, model / "model.safetensors")
    with pytest.raises(ConfigError, match=r"the content of model\.path is not what it was"):
        check_same_inputs(tmp_path, inputs(), resume=True)
    save_file(weights, model / "model.safetensors")
    prompts.reverse()
    with pytest.raises(ConfigError, match=r"the content of data\.source is not what it was"):
        check_same_inputs(tmp_path, inputs(), resume=True)
    (tmp_path / "inputs.json").unlink()
    with pytest.raises(ConfigError, match=r"holds no readable inputs\.json"):
        check_same_inputs(tmp_path, inputs(), resume=True)


def test_a_damaged_checkpoint_is_not_taken_for_none(tmp_path: Path) -> None:
    """Going on from the start would throw the damaged one away, and what could be saved of it."""
    config = parse_config({"run": {"folder": str(tmp_path)}})
    draft = checkpoint.begin(config.run_folder / "checkpoints", 1000)
    (draft / "weights").write_bytes(b"12345")
    saved(draft, config)
    newest = checkpoint.commit(draft)
    assert prepare_folder(config, resume=True, overwrite=False) == newest
    (newest / "weights").write_bytes(b"1234")
    with pytest.raises(ConfigError, match=r"is whole \(version-00001000: weights has 4 of 5 bytes\)"):
        prepare_folder(config, resume=True, overwrite=False)


def test_a_run_that_ended_before_its_first_checkpoint_goes_on_from_its_start(tmp_path: Path) -> None:
    config = parse_config({"run": {"folder": str(tmp_path)}})
    with pytest.raises(ConfigError, match="holds no run"):
        prepare_folder(config, resume=True, overwrite=False)
    config.run_folder.mkdir()
    saved(config.run_folder, config)
    assert prepare_folder(config, resume=True, overwrite=False) is None
    other = parse_config({"run": {"folder": str(tmp_path), "seed": 1}})
    with pytest.raises(ConfigError, match=r"run\.seed was 0, is 1"):
        prepare_folder(other, resume=True, overwrite=False)


def test_a_folder_has_one_driver(tmp_path: Path) -> None:
    """Two of them would write one another's checkpoints and metrics."""
    folder = tmp_path / "runs" / "r"
    with alone_in(folder):
        (folder / "config.json").touch()
        with pytest.raises(ConfigError, match="r is in use: a run is training in it"), alone_in(folder):
            pass
    with alone_in(folder):
        pass


def test_a_driver_that_was_killed_leaves_its_folder(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from headway.cluster.run_folder import alone_in\n"
        "with alone_in(Path(sys.argv[1])): print(flush=True); time.sleep(60)"
    )
    driver = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert driver.stdout and driver.stdout.readline()
    with pytest.raises(ConfigError, match="is in use"), alone_in(tmp_path):
        pass
    driver.kill()
    driver.wait()
    with alone_in(tmp_path):
        pass


def test_a_folder_in_which_nothing_was_written_is_not_left_behind(tmp_path: Path) -> None:
    config = parse_config({"run": {"folder": str(tmp_path)}})
    with pytest.raises(ConfigError, match="holds no run"), alone_in(config.run_folder):
        prepare_folder(config, resume=True, overwrite=False)
    assert not config.run_folder.exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"r cannot be made: Not a directory; set run\.folder"),
        alone_in(tmp_path / "file" / "r"),
    ):
        pass


def test_overwriting_replaces_runs_and_nothing_else(tmp_path: Path) -> None:
    config = parse_config({"run": {"folder": str(tmp_path), "name": "r"}})
    folder = config.run_folder
    (folder / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "file").touch()
    with pytest.raises(ConfigError, match="r exists; go on with --resume, replace it with --overwrite"):
        prepare_folder(config, resume=False, overwrite=False)
    with pytest.raises(ConfigError, match=r"--overwrite: .*/r holds other things than a run"):
        prepare_folder(config, resume=False, overwrite=True)
    saved(folder, config)
    with pytest.raises(ConfigError, match="give one of them"):
        prepare_folder(config, resume=True, overwrite=True)
    assert (folder / "deep").exists()
    assert prepare_folder(config, resume=False, overwrite=True) is None
    assert not any(folder.iterdir()) and (tmp_path / "elsewhere").exists()


def test_batches_of_steps_that_are_taken_again_do_not_stay(tmp_path: Path) -> None:
    keep_batches(tmp_path / "rollouts", 0)  # of a run that stores none
    for version in (1, 509, 510, 511, 1_000_000):
        (tmp_path / f"step-{version:06d}.parquet").touch()
    keep_batches(tmp_path, 510)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        f"step-{version:06d}.parquet" for version in (1, 509, 510)
    ]
