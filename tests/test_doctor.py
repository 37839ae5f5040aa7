"""What a person can get wrong in a configuration, its data, its cluster or on the command line: one clear line, exit
code 2, and the same from `headway doctor` beforehand."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway.cluster.cli import main
from headway.cluster.doctor import CHECKS, examine
from headway.cluster.doctor_facts import Facts, Row, Unknown
from headway.core.config import load_config
from headway.core.errors import HeadwayError

COMMAND = (sys.executable, "-P", "-m", "headway.cluster.cli")
NOBODY = "127.0.0.1:9"
"""Where no cluster listens."""

Headway = Callable[..., tuple[int, str]]


@pytest.fixture
def headway(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Headway:
    """The command line in this process: exit code, and what it printed."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["headway", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out = capsys.readouterr()
        return int(ended.value.code or 0), out.out + out.err

    return run


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_random: Path) -> Path:
    """A working directory with `good.yaml`, which trains a copy of a tiny model on three sums, and some files that are not
    as they should be."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", NOBODY)
    shutil.copytree(tiny_random, "model")
    files = {
        "good.yaml": f"""
run: {{name: r, folder: runs, steps: 4}}
model: {{path: model, chat_template: false, dtype: float32}}
data: {{source: good.jsonl, verifier: numeric}}
sampling: {{group_size: 4, max_new_tokens: 8}}
learner: {{groups_per_step: 2}}
metrics: {{port: 0}}
cluster: {{address: '{NOBODY}'}}
""",
        "misplaced.yaml": "run:\n  steps: 4\nlearner:\n  max_version_lag: 2\n",
        "twice.yaml": "run:\n  steps: 4\n  steps: 5\n",
        "dotted.yaml": "lag.max_version_lag: 2\n",
        "list.yaml": "- run\n",
        "broken.yaml": "run: {steps: 4\n",
        "good.jsonl": "".join(f'{{"prompt": "{n} + 1 =", "answer": "{n + 1}"}}\n' for n in range(3)),
        "wrong_golds.jsonl": '{"prompt": "1 + 1 =", "answer": "two apples"}\n',
        "no_answer.jsonl": '{"prompt": "1 + 1 ="}\n',
        "not_json.jsonl": '{"prompt": "1 + 1 =", "answer": "2"}\n{"prompt"\n',
        "empty.jsonl": "",
        "twice.jsonl": '{"prompt": "a", "answer": "1", "prompt_id": "x"}\n' * 2,
        "judged.jsonl": '{"prompt": "a", "answer": "1", "verifier": "judge"}\n',
        "own.py": "answer = 4\n",
    }
    for name, text in files.items():
        Path(name).write_text(text)
    return tmp_path


# ---- command line and configuration: before anything is loaded ----------------------------------------------

COMMAND_LINES = [
    ("train missing.yaml", "cannot read missing.yaml: No such file or directory"),
    ("train list.yaml", "list.yaml must hold sections"),
    ("train broken.yaml", "broken.yaml is not YAML: line 2: expected ',' or '}'"),
    ("train good.yaml run.steps", "override 'run.steps': expected section.key=value"),
    ("train good.yaml run.steps.more=4", "'steps' is a value, not a section"),
    ("train good.yaml lag.max_stalness=2", "unknown key 'lag.max_stalness' .*did you mean 'lag.max_version_lag'"),
    ("train misplaced.yaml", r"'learner.max_version_lag' \(misplaced.yaml:4\); did you mean 'lag.max_version_lag'"),
    ("train good.yaml run.steps=many", r"run.steps='many' \(argument 'run.steps=many'\)"),
    ("train good.yaml learner.groups_per_step=0", "learner.groups_per_step=0 .*greater than or equal to 1"),
    ("train good.yaml learner.steps_per_batch=3", "run.steps=4 is not divisible by learner.steps_per_batch=3"),
    ("train good.yaml run.name=a/b", "run.name='a/b'"),
    ("train good.yaml sampling.group_size=1", "compares the responses of one prompt and needs at least 2"),
    ("train good.yaml sampling.top_p=0.9", "sampling.top_p=0.9 with algorithm.correction="),
    ("train good.yaml generation.gpus=1.5", "generation.gpus=1.5: a replica has whole GPUs or a part of one"),
    ("train twice.yaml", r"key 'run.steps' is there twice \(twice.yaml:2 and 3\)"),
    ("train dotted.yaml", r"'lag.max_version_lag' \(dotted.yaml:1\) is in one piece; write 'max_version_lag' below 'lag:'"),
    ("train good.yaml data.template=Solve", "data.template='Solve' has no {prompt}"),
    ("eval model --config good.yaml --samples 4", "--samples=4 with --temperature=0: greedy answers are all the same"),
    ("train good.yaml algorithm.preset=grppo", "algorithm.preset='grppo' is unknown; nearest: grpo"),
    ("train good.yaml queue.max_groups=1", "queue.max_groups=1 cannot hold one batch of 2 groups"),
    ("train good.yaml lag.policy=drop lag.max_version_lag=0", "lag.policy=drop with lag.max_version_lag=0"),
    ("train good.yaml --resume", "--resume: runs/r holds no run; start without --resume"),
    ("doctor missing.yaml", "cannot read missing.yaml"),
    ("doctor misplaced.yaml", "did you mean 'lag.max_version_lag'"),
    ("submit misplaced.yaml", "did you mean 'lag.max_version_lag'"),
    ("scale generation", "'generation': say GROUP=N, for example generation=3"),
    ("scale generation=none", "'generation=none': say GROUP=N"),
    ("scale generation=0", "generation=0: a run needs at least one"),
    ("scale generation=2", f"no Ray cluster at '{NOBODY}'"),
    ("scale generation=2 --address http://head:8265", "is the address of a dashboard"),
    ("status", f"no Ray cluster at '{NOBODY}'"),
    ("status nowhere", f"no Ray cluster at '{NOBODY}'"),
    ("top --address http://head:8265", "is the address of a dashboard"),
    ("stop model", "the run in model is not running"),
    ("stop --address nonsense:x", "no Ray cluster at 'nonsense:x'"),
    ("eval nowhere", "nowhere"),
    ("replay nowhere", "nowhere"),
    ("rollouts nowhere", "nowhere"),
    ("verify good.jsonl --kind nummeric", "did you mean 'numeric'"),
    ("verify missing.jsonl", "missing.jsonl: No such file or directory"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "said"), COMMAND_LINES)
def test_a_wrong_command_line_is_one_clear_line(work: Path, headway: Headway, line: str, said: str) -> None:
    code, text = headway(*line.split())
    assert code == 2, text
    assert re.search(said, text), text
    assert (
        len([row for row in text.splitlines() if not row.endswith(" errors")]) == 1
        and "Traceback" not in text
    ), text


@pytest.mark.parametrize("line", ["trian good.yaml", "train", "train good.yaml --fast", "status --jsn"])
def test_what_the_command_line_does_not_know(work: Path, headway: Headway, line: str) -> None:
    code, text = headway(*line.split())
    assert code == 2 and "Traceback" not in text, text


def test_every_fault_of_a_configuration_is_a_line(work: Path, headway: Headway) -> None:
    code, text = headway("train", "good.yaml", "run.stepz=4", "learner.learning_rate=-1", "queue.max_mib=0")
    assert code == 2 and len(text.strip().splitlines()) == 3, text
    code, text = headway("doctor", "good.yaml", "run.stepz=4", "queue.max_mib=0", "--json")
    rows = [json.loads(line) for line in text.splitlines()]
    assert code == 2 and [(row["check"], row["state"]) for row in rows] == [("configuration", "error")] * 2


def test_a_wrong_configuration_is_refused_before_anything_heavy_is_loaded(work: Path) -> None:
    script = (
        "import sys\nfrom headway.cluster.cli import main\ntry:\n    main()\nexcept SystemExit as end:\n"
        "    heavy = {'ray', 'torch', 'transformers', 'vllm'} & sys.modules.keys()\n    sys.exit(end.code + 10 * len(heavy))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, "train", "good.yaml", "learner.groups_per_step=0"]
    )
    assert done.returncode == 2


def test_a_run_folder_that_is_there_is_kept(work: Path, headway: Headway) -> None:
    Path("runs/r").mkdir(parents=True)
    Path("runs/r/config.json").write_text("{}")
    code, text = headway("train", "good.yaml")
    assert code == 2 and "run folder runs/r exists; go on with --resume, replace it with --overwrite" in text
    (row,) = rows_of("run folder", "good.yaml")
    assert row.state == "warning" and "runs/r exists: it cannot be resumed" in row.value


# ---- files: `headway train` refuses them as the doctor does -------------------------------------------------

FILES = [
    ("prompts", "data.source=missing.jsonl", "missing.jsonl"),
    ("prompts", "data.source=empty.jsonl", "empty.jsonl holds no rows"),
    ("prompts", "data.source=no_answer.jsonl", r"has fields \['prompt'\], but 'prompt' and 'answer' are needed"),
    ("prompts", "data.source=not_json.jsonl", "not_json.jsonl line 2 is not JSON"),
    ("prompts", "data.source=twice.jsonl", "has the prompt_id 'x', which .* has too"),
    ("prompts", "data.source=reasoning_gym:chain_summ", "chain_summ"),
    ("golds", "data.verifier=nummeric", "no verifier 'nummeric', did you mean 'numeric'"),
    ("golds", "data.verifier=missing.py:score", "missing.py"),
    ("golds", "data.verifier=own.py:answer", "verifier 'own.py:answer' is int, not a function"),
    ("golds", "data.source=wrong_golds.jsonl", "1 of the first 1 gold answers .* do not score 1"),
    ("scorers", "data.source=judged.jsonl", "verifier 'judge' scores rows of judged.jsonl, but judge.model is null"),
    ("model", "model.path=nowhere", "model folder nowhere does not exist"),
    ("model", "model.path=runs", "runs holds no config.json"),
    ("lengths", "generation.max_model_len=9", "generation.max_model_len=9 cannot hold the longest prompt"),
    ("queue", "queue.max_mib=1 sampling.max_new_tokens=9000", "queue.max_mib=1 may not hold one batch of 2 groups"),
    ("endpoint", "metrics.host=203.0.113.7", "metrics.host=203.0.113.7, metrics.port=0: nothing can listen there"),
    ("endpoint", "metrics.host=no.such.host.invalid", "metrics.host=no.such.host.invalid, metrics.port=0: nothing can"),
]  # fmt: skip


def rows_of(check: str, config: str, *overrides: str) -> list[Row]:
    """What one check of the doctor says, with no cluster."""
    facts = Facts(load_config(Path(config), overrides))
    try:
        return list(dict(CHECKS)[check](facts))
    except HeadwayError as error:
        return [Row(check=check, state="error", value=str(error))]


@pytest.mark.parametrize(("check", "override", "said"), FILES)
def test_a_wrong_file_is_one_clear_line(
    work: Path, headway: Headway, check: str, override: str, said: str
) -> None:
    (work / "runs").mkdir()
    code, text = headway("train", "good.yaml", *override.split())
    assert code == 2 and re.search(said, text), text
    faults = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(faults) == 1 and "Traceback" not in text, text
    (row,) = rows_of(check, "good.yaml", *override.split())
    assert row.state == "error" and re.search(said, row.value), row


def damage_weights(model: Path) -> None:
    (weights,) = model.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])


def remove_weights(model: Path) -> None:
    for weights in model.glob("*.safetensors"):
        weights.unlink()


def damage_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"model": {"type": "nonsense"}}')


def remove_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    config = Path("good.yaml")
    config.write_text(config.read_text().replace("chat_template: false", "chat_template: true"))


def shorten_positions(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 10}))


@pytest.mark.parametrize(
    ("damage", "check", "said"),
    [
        (damage_weights, "model", "model.safetensors is damaged or cut off"),
        (remove_weights, "model", r"holds no \*.safetensors"),
        (damage_tokenizer, "tokenizer", "the tokenizer in .*model cannot be loaded"),
        (remove_template, "tokenizer", "has no chat template; set model.chat_template=false"),
        (shorten_positions, "lengths", "knows 10 positions"),
    ],
)
def test_a_damaged_model_is_found(work: Path, damage: Callable[[Path], None], check: str, said: str) -> None:
    damage(work / "model")
    row = rows_of(check, "good.yaml")[-1]
    assert row.state == "error" and re.search(said, row.value), row


def test_all_checks_are_made_whatever_fails(work: Path) -> None:
    """What is wrong is said once; what needs it is skipped, everything else is looked at."""
    rows = list(examine(Path("good.yaml"), ["model.path=nowhere", "data.source=missing.jsonl"]))
    states = {row.check: row.state for row in rows}
    wrong = {check for check, state in states.items() if state == "error"}
    assert wrong == {"model", "prompts", "Ray"}
    assert {check for check, state in states.items() if state == "skipped"} == {
        "tokenizer", "golds", "scorers", "sandbox", "lengths", "queue", "disk", "token", "versions", "groups", "GPUs",
        "leftovers", "object store", "memory",
    }  # fmt: skip
    assert {check for check, state in states.items() if state == "ok"} == {
        "configuration",
        "run folder",
        "endpoint",
        "outputs",
    }
    assert [row.value for row in rows if row.check == "lengths"] == ["not looked at: needs model"]


def test_a_port_that_is_taken_is_named_with_its_holder(work: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (row,) = rows_of("endpoint", "good.yaml", f"metrics.port={port}")
    assert row.state == "warning" and f"port {port} is not free here (process {os.getpid()}: " in row.value
    (row,) = rows_of("endpoint", "good.yaml", f"metrics.port={port}")
    assert row.state == "ok"


@pytest.mark.parametrize("folder", ["/dev/null", "good.yaml/runs"])
def test_a_folder_that_cannot_be_is_found(work: Path, folder: str) -> None:
    (row,) = rows_of("run folder", "good.yaml", f"run.folder={folder}")
    assert row.state == "error" and "cannot be written to; set run.folder" in row.value


def test_a_folder_that_cannot_be_made_ends_no_other_check(work: Path) -> None:
    (work / "nowhere").symlink_to(work / "gone")
    for folder in ("nowhere", "good.yaml"):
        (row,) = rows_of("disk", "good.yaml", f"run.folder={folder}")
        assert row.state == "error" and f"run.folder={folder} cannot be made" in row.value


# ---- cluster -----------------------------------------------------------------------------------------------

TOKEN = "6f9619ff8b86d011b42d00c04fc964ff6f9619ff8b86d011b42d00c04fc964ff"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Address of a node with 2 CPUs, 2 GPUs by name, the label role=learner and 200 MB of object store, which asks for a
    token."""
    temp, port = tempfile.mkdtemp(prefix="hw-ray-", dir="/tmp"), free_port()  # short: Ray's sockets lie in it
    env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_ADDRESS": ""}
    env["RAY_raylet_start_wait_time_s"] = "120"
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--temp-dir={temp}",
        f"--port={port}", "--include-dashboard=false", "--num-cpus=2", "--num-gpus=2", "--labels=role=learner",
        "--object-store-memory=200000000", "--disable-usage-stats", "--min-worker-port=0", "--max-worker-port=0",
    ]  # fmt: skip
    said = Path(temp) / "said"
    with said.open("wb") as out:
        head = subprocess.Popen(command, env=env, cwd="/", start_new_session=True, stdout=out)
    try:
        end = time.monotonic() + 150
        while "Ray runtime started" not in said.read_text():
            assert head.poll() is None and time.monotonic() < end, said.read_text()
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        head.send_signal(signal.SIGTERM)
        try:
            head.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
        shutil.rmtree(temp, ignore_errors=True)


def doctor(cluster: str, *overrides: str, token: str = TOKEN) -> tuple[int, dict[str, list[Row]]]:
    """Exit code, and rows by check."""
    done = subprocess.run(
        [*COMMAND, "doctor", "good.yaml", "--json", *overrides, f"cluster.address={cluster}"],
        env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token},
        capture_output=True,
        text=True,
        timeout=500,
    )
    rows: dict[str, list[Row]] = {}
    for line in done.stdout.splitlines():
        row = Row(**json.loads(line))
        rows.setdefault(row.check, []).append(row)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, rows


def test_a_cluster_that_fits(work: Path, cluster: str) -> None:
    code, rows = doctor(
        cluster, "learner.labels.role=learner", "generation.gpus=1", "queue.max_mib=100", "learner.cpus=0.5"
    )
    assert code == 0, rows
    assert {row.state for check in rows.values() for row in check} == {"ok"}, rows
    assert rows["Ray"][0].value == f"joined {cluster}: 1 node(s), 2 CPU, 2 GPU"
    assert rows["token"][0].value == "the cluster asks for a token, and takes this machine's"
    assert [row.value for row in rows["groups"]] == [
        "generation: 1 x (1 CPU + 1 GPU)",
        "learner: 1 x (0.5 CPU) on nodes labelled {'role': 'learner'}",
        "verifiers: 1 x (0.01 CPU)",
    ]


def test_a_cluster_that_does_not_fit(work: Path, cluster: str) -> None:
    code, rows = doctor(cluster, "learner.labels.role=other", "generation.gpus=2", "generation.replicas=2")
    assert code == 2
    generation, learner, verifiers = rows["groups"]
    assert generation.state == learner.state == "error" and verifiers.state == "ok"
    assert "group 'generation' needs 2 x (1 CPU + 2 GPU), only 1 fit" in generation.value
    assert (
        "group 'learner' needs 1 x (1 CPU) on nodes labelled {'role': 'other'}, only 0 fit" in learner.value
    )
    assert rows["GPUs"][0].state == "error" and rows["GPUs"][0].value.startswith("4 asked, 2 there")
    assert rows["golds"][0].state == rows["memory"][0].state == "ok"


def test_a_store_that_is_too_small_and_gpus_that_stand_idle(work: Path, cluster: str) -> None:
    code, rows = doctor(cluster, "queue.max_mib=512", "learner.cpus=0.1")
    assert code == 2
    (store,) = rows["object store"]
    assert store.state == "error" and "holds 190 MiB, but this run needs" in store.value
    (gpus,) = rows["GPUs"]
    assert (gpus.state, gpus.value) == ("warning", "0 asked, 2 there: they would stand idle")


def test_a_wrong_token_is_said_at_once(work: Path, cluster: str) -> None:
    began = time.monotonic()
    code, rows = doctor(cluster, token="0" * 64)
    assert code == 2 and time.monotonic() - began < 30
    (row,) = rows["Ray"]
    assert row.state == "error" and "unauthorised; set RAY_AUTH_TOKEN to the cluster's token" in row.value
    done = subprocess.run(
        [*COMMAND, "status", f"--address={cluster}"],
        env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "unauthorised" in done.stderr and len(done.stderr.splitlines()) == 1, (
        done.stderr
    )


def test_without_a_token_it_says_so_too(work: Path, cluster: str) -> None:
    bare = {key: value for key, value in os.environ.items() if not key.startswith("RAY_AUTH")}
    done = subprocess.run(
        [*COMMAND, "train", "good.yaml", f"cluster.address={cluster}"],
        env={**bare, "HOME": str(work)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "unauthorised; set RAY_AUTH_TOKEN" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1 and not list(work.glob("runs/r/checkpoints"))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RAY_TMPDIR", "/proc/none", "cannot start Ray: .*No such file or directory: '/proc/none'"),
        ("RAY_TMPDIR", "/tmp/" + "l" * 120, "cannot start Ray: .*AF_UNIX path length cannot exceed"),
        ("RAY_OVERRIDE_RESOURCES", "{", "cannot start Ray: "),
    ],
)
def test_a_ray_that_does_not_start_is_one_clear_line(
    work: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setenv(name, value)
    try:
        (row,) = rows_of("Ray", "good.yaml", "cluster.address=local")
    finally:
        shutil.rmtree(value, ignore_errors=True)
    assert row.state == "error" and re.match(said, row.value) and "\n" not in row.value, row


OFFLINE = [
    ("stage=sft", "missing.jsonl", "missing.jsonl"),
    ("stage=sft", "good.jsonl", "3 from good.jsonl"),
    ("stage=preference", "good.jsonl", "chosen"),
    ("stage=preference offline.objective=kto", "good.jsonl", "completion"),
    ("stage=reward_model offline.reward=process", "good.jsonl", "completions"),
    ("stage=preference offline.loop=spin", "good.jsonl", "3 from good.jsonl"),
    ("stage=sft offline.held_out=0", "empty.jsonl", "empty.jsonl holds no rows"),
]


@pytest.mark.parametrize(("stage", "source", "said"), OFFLINE)
def test_rows_of_other_stages_are_read(work: Path, stage: str, source: str, said: str) -> None:
    (row,) = rows_of("rows", "good.yaml", *stage.split(), f"data.source={source}", "offline.held_out=0")
    assert said in row.value and row.state == ("ok" if said.startswith("3 ") else "error"), row


def test_what_is_missing_is_asked_for_once(work: Path) -> None:
    facts = Facts(load_config(Path("good.yaml"), ["model.path=nowhere"]))
    with pytest.raises(HeadwayError):
        _ = facts.model_folder
    with pytest.raises(Unknown, match="model"):
        _ = facts.tokenizer
