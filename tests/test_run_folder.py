"""What a run may be resumed with."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.cluster.run_folder import check_same_run
from headway.core.config import Config, dump_config, parse_config
from headway.core.errors import ConfigError


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
