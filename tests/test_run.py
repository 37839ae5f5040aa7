"""Whole runs through the command line: real engines, real learner, real Ray."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM

from headway.actors.generation import GenerationActor, GroupRequest
from headway.actors.verifier import VerifierWorker
from headway.cluster.cli import main
from headway.cluster.ledger import trained_groups
from headway.cluster.preflight import prompts_of
from headway.core import rollouts
from headway.core.config import Config, load_config
from headway.core.prompts import PromptStream
from headway.core.sections import Verifiers
from headway.learner.model import PolicyModel
from headway.learner.publish import export, layout_of

pytestmark = pytest.mark.timeout(1200)

SMALL = [
    "learner.groups_per_step=4",
    "sampling.group_size=4",
    "sampling.max_new_tokens=40",
    "data.num_prompts=300",
    "metrics.port=0",
    "run.checkpoint_every=0",
    "algorithm.dynamic_sampling=false",
]


def headway(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-P", "-m", "headway.cluster.cli", *map(str, arguments)]


def train(root: Path, folder: Path, *overrides: str) -> list[str]:
    return headway("train", "configs/tiny.yaml", *SMALL, f"run.folder={folder}", *overrides)


def run(command: list[str], root: Path, timeout_s: float = 500) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=timeout_s)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def wait_for(
    condition: Callable[[], Any], process: subprocess.Popen[str], what: str, timeout_s: float = 300
) -> Any:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if process.poll() is not None:
            pytest.fail(f"the run ended with {process.returncode} before {what}")
        if value := condition():
            return value
        time.sleep(0.2)
    process.kill()
    pytest.fail(f"waited {timeout_s} s for {what}")


def test_version_lag_0_is_a_plain_synchronous_loop(root: Path, tmp_path: Path, tiny_adder: Path) -> None:
    """Same prompts, same sampled tokens, same losses and weights as a loop of a few lines."""
    overrides = ["lag.max_version_lag=0", "generation.replicas=1", "run.steps=3", "run.seed=11"]
    overrides += ["algorithm.correction=tis_token", "algorithm.ess_lr=false"]
    done = run(train(root, tmp_path, *overrides), root)
    assert done.returncode == 0, done.stderr
    config = load_config(tmp_path / "tiny" / "config.json")
    expected_losses, expected_tables = asyncio.run(plain_loop(config, tiny_adder))
    steps = steps_of(tmp_path / "tiny")
    assert [step["lag"] for step in steps] == [[0, 0, 0, 0]] * 3
    for number, table in enumerate(expected_tables):
        actual = rollouts.read_parquet(tmp_path / "tiny" / "rollouts" / f"step-{number + 1:06d}.parquet")
        for column in ("group_id", "prompt_ids", "response_ids", "version_spans", "reward"):
            assert actual[column].to_pylist() == table[column].to_pylist(), (number, column)
    assert [step["loss"] for step in steps] == pytest.approx(expected_losses, abs=1e-5)
    assert any(abs(loss) > 1e-3 for loss in expected_losses)


async def plain_loop(config: Config, folder: Path) -> tuple[list[float], list[pa.Table]]:
    """Generate, score, one padded forward pass of the plain model, AdamW, reload. Of the learner only the export."""
    stream = PromptStream(prompts_of(config, config.data.source, config.run.seed), config.run.seed)
    engine, verifier = (
        GenerationActor(config, str(folder), 0),
        VerifierWorker(Verifiers(processes=1, timeout_s=5.0, memory_mib=1024)),
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learner.learning_rate, weight_decay=0.0)
    exporter = PolicyModel(folder, dtype="float32")
    layout = layout_of(exporter, "float32", 64 << 20)
    losses, tables = [], []
    try:
        await engine.start()
        for step in range(3):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    exporter.masters[name].copy_(parameter)
            manifest, buckets = export(exporter, layout, step)
            await engine.update_weights(manifest, *buckets)
            groups = []
            for index in range(step * 4, step * 4 + 4):
                prompt = stream.at(index)
                request = GroupRequest(
                    group_id=index,
                    prompt=prompt,
                    group_size=4,
                    temperature=config.sampling.temperature,
                    top_p=1.0,
                    max_new_tokens=config.sampling.max_new_tokens,
                    deadline_s=60,
                )
                groups.append((engine.generate(request), prompt))
            made = await asyncio.gather(*(coroutine for coroutine, _ in groups))
            scored = [verifier.score(table, prompt) for table, (_, prompt) in zip(made, groups, strict=True)]
            tables.append(pa.concat_tables(scored))
            losses.append(plain_step(model, optimizer, scored))
    finally:
        verifier.close()
        await engine.shutdown()
    return losses, tables


def plain_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, groups: list[pa.Table]) -> float:
    rows, advantages = [], []
    for table in groups:
        rewards = torch.tensor(table["reward"].to_pylist(), dtype=torch.float64)
        std = rewards.std()
        advantages += (
            [0.0] * len(rewards) if std == 0 else ((rewards - rewards.mean()) / (std + 1e-6)).tolist()
        )
        rows += table.to_pylist()
    width = max(len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    attention, trained = torch.zeros(len(rows), width), torch.zeros(len(rows), width)
    behavior = torch.zeros(len(rows), width)
    for i, row in enumerate(rows):
        start, end = len(row["prompt_ids"]), len(row["prompt_ids"]) + len(row["response_ids"])
        ids[i, :end] = torch.tensor(row["prompt_ids"] + row["response_ids"])
        attention[i, :end] = 1
        trained[i, start:end] = 1
        behavior[i, start:end] = torch.tensor(row["behavior_logprobs"])
    logits = model(input_ids=ids, attention_mask=attention).logits.float()
    logprobs = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]
    trained, behavior = trained[:, 1:], behavior[:, 1:]
    weight = (logprobs.detach() - behavior).exp().clamp(max=2.0)
    ratio = (logprobs - logprobs.detach()).exp()
    loss = -(weight * ratio * torch.tensor(advantages)[:, None] * trained).sum() / trained.sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def test_metrics_of_a_running_job_then_interrupt_and_resume(
    root: Path, tmp_path: Path, tiny_adder: Path
) -> None:
    """PPO with its five roles and two learner ranks. Lag shows on the endpoint while it runs; Ctrl-C leaves a
    checkpoint; the resumed run, with one engine, trains each prompt once."""
    folder = tmp_path / "tiny"
    ppo = [
        "algorithm.preset=ppo",
        "algorithm.reference_refresh_steps=2",
        "learner.replicas=2",
        "reference.threads=1",
        "critic.threads=1",
    ]
    process = subprocess.Popen(
        train(root, tmp_path, *ppo, "run.steps=5000"),
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        text = wait_for(lambda: lagging(folder), process, "a trained group at lag 1")
        promtool = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=30
        )
        assert (promtool.returncode, promtool.stdout + promtool.stderr) == (0, "")
        for role, number in {
            "generation": 2,
            "learner": 2,
            "reference": 1,
            "critic": 1,
            "verifiers": 1,
        }.items():
            assert sample(text, f'headway_live_replicas{{role="{role}"}}') == number
        assert sample(text, "headway_max_version_lag_steps") == 2
        assert sample(text, 'headway_version_lag_steps_bucket{le="2",phase="total"}') == sample(
            text, 'headway_version_lag_steps_count{phase="total"}'
        )
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130, output
    stopped_at = int(re.findall(r"stopped at version (\d+)", output)[0])
    checkpoint = folder / "checkpoints" / f"version-{stopped_at:08d}"
    assert (checkpoint / "COMPLETE").exists() and (checkpoint / "critic" / "critic.pt").exists()
    refreshed = torch.load(checkpoint / "reference" / "reference.pt", weights_only=True)["version"]
    assert refreshed == stopped_at - stopped_at % 2
    before = steps_of(folder)
    assert before[-1]["version"] == stopped_at

    fewer = ["generation.replicas=1", f"run.steps={stopped_at + 4}"]
    done = run([*train(root, tmp_path, *ppo, *fewer), "--resume"], root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"resumed at version {stopped_at}" in done.stdout
    steps = steps_of(folder)
    assert [step["version"] for step in steps] == list(range(1, stopped_at + 5))
    assert all(0 <= lag <= 2 for step in steps for lag in step["lag"])
    trained = trained_groups(folder / "ledger.jsonl")
    assert sorted(trained) == list(range(4 * (stopped_at + 4)))  # none lost, none twice
    assert sorted(set(trained.values())) == list(range(1, stopped_at + 5))
    assert (folder / "report.html").stat().st_size > 10_000
    assert all(step["kl_reference"] >= 0 and step["kl_coef"] == 0.01 for step in steps)
    assert all(step["value_loss"] > 0 and step["critic_grad_norm"] > 0 for step in steps)
    table = rollouts.read_parquet(folder / "rollouts" / f"step-{stopped_at + 4:06d}.parquet")
    for column in ("reference_logprobs", "values", "proximal_logprobs", "advantages"):
        assert rollouts.lengths(table, column) == rollouts.lengths(table, "response_ids"), column

    done = run(headway("eval", folder, "--limit=8", "--samples=2", "--temperature=1", "--json"), root)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["num_prompts"], sum(result["reasons"].values()), result["num_unscored"]) == (8, 16, 0)
    assert result["mean_score"] == result["reasons"].get("correct", 0) / 16


def lagging(folder: Path) -> str | None:
    """The endpoint's text once a group was trained at lag 1 or more."""
    port = folder / "metrics_port"
    if not port.exists() or not port.read_text():
        return None
    text = scrape(folder)
    count = sample(text, 'headway_version_lag_steps_count{phase="total"}')
    return (
        text if count - sample(text, 'headway_version_lag_steps_bucket{le="0",phase="total"}') > 0 else None
    )


def sample(text: str, series: str) -> float:
    return next(
        float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.rsplit(" ", 1)[0] == series
    )


def processes_of(log: Path) -> list[int]:
    """Processes that write to this log: an actor and its children."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "fd" / "1") == str(log):
                found.append(int(entry.name))
        except OSError:
            continue
    return sorted(found)


def kill(log: Path, title: str) -> None:
    pids = [p for p in processes_of(log) if title in Path(f"/proc/{p}/cmdline").read_text()]
    assert pids, f"no {title} writes to {log}"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_everything_is_killed_once_and_every_prompt_is_trained_once(
    root: Path, tmp_path: Path, tiny_random: Path
) -> None:
    """One after another: an engine and a verifier, the queue, the metrics endpoint, the learner, the driver. In between
    the run grows to three engines and shrinks to one, with which it is resumed."""
    folder = tmp_path / "tiny"
    overrides = ["model.path=tiny-random", "run.checkpoint_every=4", "data.num_prompts=2000"]
    command = train(root, tmp_path, *overrides, "generation.drain_s=0.2", "run.steps=100000")
    log = tmp_path / "output.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=root, stdout=output, stderr=subprocess.STDOUT, text=True)

    def says(text: str) -> bool:
        return text in log.read_text()

    def more_steps(number: int) -> None:
        goal = len(steps_of(folder)) + number
        wait_for(lambda: len(steps_of(folder)) >= goal, process, f"{number} more steps")

    def serving(number: int) -> Callable[[], bool]:
        return lambda: len(at := steps_of(folder)[-1]["engine_versions"]) == number and None not in at

    try:
        wait_for(
            lambda: (folder / "metrics.jsonl").exists() and len(steps_of(folder)) >= 3, process, "step 3"
        )
        kill(folder / "logs" / "generation-0.log", "GenerationActor")
        kill(folder / "logs" / "verifiers-0.log", "VerifierWorker")
        wait_for(
            lambda: says("engine 0 is replaced") and says("verifiers 0 is replaced"), process, "the news"
        )
        more_steps(2)
        wait_for(serving(2), process, "engine 0 to come back")

        before = scrape(folder)
        kill(folder / "logs" / "queue.log", "RolloutQueue")
        kill(folder / "logs" / "metrics.log", "Exporter")
        wait_for(lambda: says("queue 0 is replaced") and says("metrics 0 is replaced"), process, "the news")
        more_steps(2)
        restarts = [
            f'headway_actor_restarts_total{{role="{role}"}}'
            for role in ("generation", "verifiers", "queue", "metrics")
        ]
        wait_for(  # a heartbeat or two
            lambda: all(sample(scrape(folder), each) == 1 for each in restarts), process, "the restarts"
        )
        after = scrape(folder)
        for counter in ("headway_generation_tokens_total", 'headway_groups_total{state="trained"}'):
            assert sample(after, counter) >= sample(before, counter) > 0

        answer = run(headway("scale", "generation=3", "--run", folder, "--json"), root, 90)
        assert json.loads(answer.stdout or "{}").get("target") == 3, answer.stdout + answer.stderr
        wait_for(serving(3), process, "three engines")
        more_steps(2)
        refused = run(headway("scale", "generation=0", "--run", folder), root, 90)
        assert refused.returncode == 2 and "needs at least" in refused.stderr
        answer = run(headway("scale", "generation=1", "--run", folder), root, 90)
        assert "generation: 3 -> 1 (" in answer.stdout, answer.stdout + answer.stderr
        wait_for(serving(1), process, "one engine")
        answer = run(headway("scale", "verifiers=2", "--run", folder), root, 90)
        assert "verifiers: 1 -> 2 (" in answer.stdout, answer.stdout + answer.stderr
        wait_for(lambda: says("verifiers: 1 -> 2"), process, "a second verifier")

        kill(folder / "logs" / "learner-0.log", "PolicyActor")
        wait_for(lambda: says("(restart 1 of 3)"), process, "a restart from the checkpoint")
        more_steps(3)
        process.kill()
        process.wait(30)
    finally:
        process.kill()
    assert re.search(r"learner 0 died.*: going on from version-\d+ \(restart 1 of 3\)", log.read_text())
    assert "Unhandled error" not in log.read_text()
    stopped = steps_of(folder)[-1]["version"]

    fewer = ["generation.replicas=1", f"run.steps={stopped + 4}"]
    done = run([*train(root, tmp_path, *overrides, *fewer), "--resume"], root)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = steps_of(folder)
    assert [step["version"] for step in steps] == list(range(1, stopped + 5))
    assert steps[-1]["dropped"] == {}
    assert all(0 <= lag <= 2 for step in steps for lag in step["lag"])
    trained = trained_groups(folder / "ledger.jsonl")  # raises if a group was trained twice
    assert sorted(trained) == list(range(4 * (stopped + 4)))
    stored = {path.name for path in (folder / "rollouts").iterdir()}
    # The queue may die with a batch that was trained, before it is written.
    lost = set(re.findall(r"(step-\d+\.parquet) is not kept: queue 0 died", log.read_text()))
    assert stored | lost == {f"step-{step:06d}.parquet" for step in range(1, stopped + 5)} and len(lost) <= 1
    end = time.monotonic() + 30
    while left := [p for entry in (folder / "logs").iterdir() for p in processes_of(entry)]:
        assert time.monotonic() < end, left
        time.sleep(0.2)
    run_hash = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=4).hexdigest()
    assert not list(Path("/dev/shm").glob(f"headway-tiny-{run_hash}-*"))


def scrape(folder: Path) -> str:
    port = (folder / "metrics_port").read_text()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def test_dynamic_sampling_trains_groups_with_signal_only(root: Path, tmp_path: Path) -> None:
    """With an adapter, whose every version the engine serves: at lag 0 engine and learner agree."""
    folder = tmp_path / "tiny"
    done = run(
        train(
            root,
            tmp_path,
            "algorithm.preset=dapo",
            "algorithm.dynamic_sampling=true",
            "learner.lora_rank=4",
            "learner.learning_rate=2e-3",
            "lag.max_version_lag=0",
            "generation.replicas=1",
            "run.steps=6",
        ),
        root,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = steps_of(folder)
    assert all(step["no_signal_groups_fraction"] == 0 for step in steps)
    assert all(step["engine_learner_kl"] < 1e-6 and step["grad_norm"] > 0 for step in steps)
    dropped = steps[-1]["dropped"]["no_signal"]
    trained = trained_groups(folder / "ledger.jsonl")
    events = [json.loads(line)["event"] for line in (folder / "ledger.jsonl").read_text().splitlines()]
    assert len(trained) == 24 and dropped > 0
    assert events.count("issued") == 24 + events.count("dropped")
    assert 0 < steps[-1]["audit"]["length_ks"] < 0.5
    rewards = [
        rollouts.read_parquet(path).column("reward").to_pylist()
        for path in sorted((folder / "rollouts").iterdir())
    ]
    assert all(len(set(batch[at : at + 4])) > 1 for batch in rewards for at in range(0, 16, 4))


def test_prompts_without_any_signal_end_the_run_with_a_checkpoint(root: Path, tmp_path: Path) -> None:
    done = run(
        train(
            root,
            tmp_path,
            "model.path=tiny-random",
            "algorithm.dynamic_sampling=true",
            "algorithm.dynamic_sampling_tries=3",
            "generation.replicas=1",
        ),
        root,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "12 groups in a row had equal rewards (12 at 0): nothing to learn at version 0" in done.stderr
    assert (tmp_path / "tiny" / "checkpoints" / "version-00000000" / "COMPLETE").exists()


def test_an_existing_run_is_not_overwritten_by_accident(root: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "ledger.jsonl").write_text("")
    done = run(train(root, tmp_path), root)
    assert done.returncode == 2
    assert "exists; go on with --resume, replace it with --overwrite, or set run.name" in done.stderr
    done = run([*train(root, tmp_path), "--resume"], root)
    assert (done.returncode, "holds no run" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.path=nowhere/at/all"], "model folder nowhere/at/all does not exist (model.path)"),
        (
            ["model.path=BARE", "model.chat_template=true"],
            "has no chat template; set model.chat_template=false",
        ),
        (["data.source=EMPTY.jsonl"], "holds no rows"),
        (["data.source=WRONG.jsonl", "data.verifier=numeric"], "gold answers in"),
        (["data.source=missing.jsonl"], "dataset missing.jsonl does not exist (data.source)"),
        (["data.source=reasoning_gym:chain_sums"], "nearest: chain_sum"),
        (["generation.max_model_len=50"], "generation.max_model_len=50 cannot hold the longest prompt"),
        (["cluster.address=127.0.0.1:1"], "no Ray cluster at '127.0.0.1:1'"),
    ],
)
def test_a_users_mistake_is_one_clear_line_and_exit_code_2(
    root: Path,
    tmp_path: Path,
    tiny_random: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    message: str,
) -> None:
    """The command line in this process, as most of its time is the start of another one."""
    (tmp_path / "EMPTY.jsonl").write_text("\n")
    (tmp_path / "WRONG.jsonl").write_text('{"prompt": "1+1?", "answer": "two"}\n')
    bare = shutil.copytree(tiny_random, tmp_path / "BARE")
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    filled = [re.sub("(EMPTY|WRONG|BARE)", rf"{tmp_path}/\1", override) for override in overrides]
    arguments = ["configs/tiny.yaml", *SMALL, f"run.folder={tmp_path / 'runs'}", "model.path=tiny-random"]
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "argv", ["headway", "train", *arguments, *filled])
    began = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr()
    assert ended.value.code == 2, output
    assert message in output.err
    assert "Traceback" not in output.err
    assert time.monotonic() - began < 60


def test_what_no_node_has_ends_the_process_with_one_clear_line_and_exit_code_2(
    root: Path, tmp_path: Path, tiny_random: Path
) -> None:
    began = time.monotonic()
    done = run(train(root, tmp_path, "model.path=tiny-random", "generation.gpus=1"), root)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "group 'generation' needs 2 x (0.5 CPU + 1 GPU), only 0 fit: the cluster has 0 GPU" in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - began < 60
