"""Verifiers in killable processes, and the worker that scores rollout tables with them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headway.actors.verifier import VerifierWorker
from headway.core.errors import Closed, DataError, HeadwayError
from headway.core.prompts import Prompt, load_prompts
from headway.core.rollouts import SCHEMA, build, validate
from headway.core.sections import Verifiers
from headway.verifiers.pool import VerifierPool
from headway.verifiers.registry import VERIFIERS, Family, verify
from headway.verifiers.verdict import Item

HOSTILE = '''
"""Verifiers that misbehave, by the response. Every worker process imports this at start."""
import ctypes, os, resource, subprocess, sys, time
from headway.verifiers import registry
from headway.verifiers.verdict import Verdict

def hostile(prompt, gold, response, context):
    match response.split(" ", 1):
        case ["sleep", seconds]:
            time.sleep(float(seconds))
        case ["spin"]:
            while True:
                pass
        case ["eat"]:
            held = [bytearray(2**26) for _ in range(64)]
        case ["segfault"]:
            ctypes.string_at(0)
        case ["exit"]:
            sys.exit(0)
        case ["die-once", path]:
            if not os.path.exists(path):
                open(path, "w").close()
                os._exit(3)
        case ["print"]:
            print("[1.0, \\"correct\\", null, [], 0.1]" * 1000)
            os.write(1, b"\\0\\0\\0\\4true" * 1000)
            os.write(2, b"x" * 100000)
        case ["child", path]:
            child = subprocess.Popen(["sleep", "100"])
            with open(path, "w") as file:
                file.write(str(child.pid))
            time.sleep(100)
        case ["limits"]:
            extracted = f"{resource.getrlimit(resource.RLIMIT_AS)[0]} {resource.getrlimit(resource.RLIMIT_CPU)[0]}"
            return Verdict(score=0.5, reason="wrong", extracted=extracted, parts=(("half", 0.5),))
        case ["modules"]:
            heavy = [name for name in ("torch", "ray", "transformers", "vllm") if name in sys.modules]
            return Verdict(score=1.0, reason="correct", extracted=" ".join(heavy))
    return Verdict(score=1.0, reason="correct", extracted=response[:50])

registry.VERIFIERS["hostile"] = registry.Family(hostile)
'''


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verifier "hostile" in the worker processes of pools that the test starts."""
    (tmp_path / "sitecustomize.py").write_text(HOSTILE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(VERIFIERS, "hostile", Family(lambda *_: pytest.fail("scored in this process")))


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    before = children(os.getpid())
    yield
    eventually(lambda: children(os.getpid()) <= before)


def children(pid: int) -> set[int]:
    """Process ids of the living and unreaped children of a process."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        if int(text.rpartition(")")[2].split()[1]) == pid:
            found.add(int(stat.parent.name))
    return found


def nursery_and_workers(num_workers: int) -> tuple[int, set[int]]:
    """The process that forks, and its workers, once there are so many."""
    found: list[int] = []

    def complete() -> bool:
        found[:] = [pid for pid in children(os.getpid()) if b"headway.verifiers.worker" in command_line(pid)]
        return len(found) == 1 and len(children(found[0])) == num_workers

    eventually(complete)
    return found[0], children(found[0])


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def eventually(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def sums(count: int) -> list[Item]:
    """Every third one wrong."""
    return [Item("numeric", str(2 * n), f"{n} + {n} = {2 * n + (n % 3 == 0)}") for n in range(count)]


def test_one_verdict_per_item_in_order() -> None:
    items = sums(500)
    for n in range(0, 500, 7):
        items[n] = Item("math", r"\frac{1}{2}", r"\boxed{0.5}" if n % 2 else "\\boxed{")
    with VerifierPool(2, 10.0, 512) as pool:
        assert pool.score(items) == [verify(*item) for item in items]
        assert pool.score([]) == []


def test_callers_in_many_threads_get_their_own_verdicts() -> None:
    with VerifierPool(2, 10.0, 512) as pool, ThreadPoolExecutor(8) as threads:
        for size, verdicts in zip(
            range(40), threads.map(lambda n: pool.score(sums(n)), range(40)), strict=True
        ):
            assert [verdict.score for verdict in verdicts] == [float(n % 3 != 0) for n in range(size)]


def test_scores_are_the_same_from_a_task() -> None:
    async def score(pool: VerifierPool) -> list[float | None]:
        verdicts = await asyncio.gather(*(asyncio.to_thread(pool.score, sums(3)) for _ in range(5)))
        return [verdict.score for batch in verdicts for verdict in batch]

    with VerifierPool(1, 10.0, 512) as pool:
        assert asyncio.run(score(pool)) == [0.0, 1.0, 1.0] * 5


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize("response", ["sleep 60", "spin"])
def test_a_hanging_item_is_0_and_the_others_unaffected(response: str) -> None:
    items = sums(40)
    items[11] = Item("hostile", None, response)
    with VerifierPool(2, 1.0, 512) as pool:
        pool.score(items[:2])
        started = time.perf_counter()
        results = pool.score_timed(items)
        assert time.perf_counter() - started < 30.0
        verdicts = [verdict for verdict, _ in results]
        assert (verdicts[11].score, verdicts[11].reason) == (0.0, "timeout")
        assert results[11][1] >= 1.0
        assert verdicts[:11] + verdicts[12:] == [verify(*item) for item in items[:11] + items[12:]]


@pytest.mark.usefixtures("hostile")
def test_memory_is_bounded_and_reaching_the_bound_is_0() -> None:
    items = sums(10)
    items[4] = Item("hostile", None, "eat")  # 4 GiB
    with VerifierPool(1, 20.0, 256) as pool:
        verdicts = pool.score(items)
        assert (verdicts[4].score, verdicts[4].reason) == (0.0, "memory")
        assert [verdict.score for verdict in verdicts[5:]] == [1.0, 0.0, 1.0, 1.0, 0.0]
        limits = pool.score([Item("hostile", None, "limits")])[0]
        assert (limits.score, limits.parts) == (0.5, (("half", 0.5),))
        address_space, cpu_seconds = map(int, (limits.extracted or "").split())
        assert 256 * 2**20 < address_space < 1280 * 2**20
        assert 20 <= cpu_seconds <= 25


def test_huge_computations_of_a_generated_task_end_in_time() -> None:
    import reasoning_gym

    context = {"task": "countdown", "size": 2, "seed": 0, "params": {}, "index": 0}
    gold = reasoning_gym.create_dataset("countdown", size=2, seed=0)[0]["answer"]
    with VerifierPool(1, 5.0, 256) as pool:
        huge, right = pool.score(
            [
                Item("reasoning_gym", gold, "<answer>9**9**9**9</answer>", context),
                Item("reasoning_gym", gold, f"<answer>{gold}</answer>", context),
            ]
        )
        assert huge.score == 0
        assert huge.reason in ("timeout", "memory")
        assert right.score == 1


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize("response", ["segfault", "exit"])
def test_an_item_that_ends_its_process_twice_is_unscored(response: str) -> None:
    items = sums(6)
    items[3] = Item("hostile", None, response)
    with VerifierPool(1, 5.0, 512) as pool:
        verdicts = pool.score(items)
        assert (verdicts[3].score, verdicts[3].reason) == (None, "crash")
        assert [verdict.score for verdict in verdicts] == [0.0, 1.0, 1.0, None, 1.0, 1.0]


@pytest.mark.usefixtures("hostile")
def test_an_item_that_ends_its_process_once_is_scored(tmp_path: Path) -> None:
    with VerifierPool(1, 5.0, 512) as pool:
        (verdict,) = pool.score([Item("hostile", None, f"die-once {tmp_path / 'died'}")])
        assert verdict.score == 1.0
    assert (tmp_path / "died").exists()


@pytest.mark.usefixtures("hostile")
def test_prints_do_not_reach_the_protocol(capfd: pytest.CaptureFixture[str]) -> None:
    with VerifierPool(1, 5.0, 512) as pool:
        verdicts = pool.score([Item("hostile", None, "print")] * 3 + sums(3))
    assert [verdict.score for verdict in verdicts] == [1.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("hostile")
def test_children_of_a_verifier_end_with_it(tmp_path: Path) -> None:
    with VerifierPool(1, 2.0, 512) as pool:
        (verdict,) = pool.score([Item("hostile", None, f"child {tmp_path / 'pid'}")])
        assert verdict.reason == "timeout"
        child = int((tmp_path / "pid").read_text())
        eventually(lambda: not is_alive(child))


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize("victim", ["worker", "nursery"])
def test_killed_processes_are_replaced(victim: str) -> None:
    with VerifierPool(1, 10.0, 512) as pool, ThreadPoolExecutor(1) as threads:
        pool.score([Item("hostile", None, "")])
        nursery, workers = nursery_and_workers(1)
        scored = threads.submit(pool.score, [Item("hostile", None, "sleep 0.4"), *sums(3)])
        time.sleep(0.1)
        os.kill(nursery if victim == "nursery" else workers.pop(), signal.SIGKILL)
        assert [verdict.score for verdict in scored.result(30)] == [1.0, 0.0, 1.0, 1.0]
        os.kill(nursery_and_workers(1)[1].pop(), signal.SIGKILL)  # idle
        assert [verdict.score for verdict in pool.score(sums(3))] == [0.0, 1.0, 1.0]


@pytest.mark.usefixtures("hostile")
def test_close_releases_waiting_callers_and_ends_all_processes() -> None:
    pool = VerifierPool(2, 60.0, 512)
    raised: list[type[BaseException]] = []

    def score() -> None:
        try:
            pool.score([Item("hostile", None, "sleep 50")] * 3)
        except Closed as error:
            raised.append(type(error))

    threads = [threading.Thread(target=score) for _ in range(3)]
    for thread in threads:
        thread.start()
    nursery, workers = nursery_and_workers(2)
    started = time.perf_counter()
    pool.close()
    for thread in threads:
        thread.join(30)
    assert time.perf_counter() - started < 30.0
    assert raised == [Closed] * 3
    assert not any(map(is_alive, {nursery, *workers}))
    with pytest.raises(Closed):
        pool.score(sums(1))
    pool.close()


@pytest.mark.usefixtures("hostile")
def test_no_process_survives_a_killed_parent() -> None:
    code = (
        "from headway.verifiers.pool import VerifierPool\n"
        "pool = VerifierPool(1, 60.0, 512)\n"
        "pool.score([('hostile', None, '', {})])\n"
        "print('ready', flush=True)\n"
        "pool.score([('hostile', None, 'sleep 50', {})])\n"
    )
    with subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        (nursery,) = children(parent.pid)
        (worker,) = children(nursery)
        parent.kill()
        parent.wait(30)
        eventually(lambda: not is_alive(nursery) and not is_alive(worker))


@pytest.mark.usefixtures("hostile")
def test_workers_are_light_and_forked_from_one_thread() -> None:
    with VerifierPool(1, 20.0, 512) as pool:
        context = {"task": "chain_sum", "size": 1, "seed": 0, "params": {}, "index": 0}
        scored = pool.score(
            [
                Item("math", "5", r"\boxed{5}"),
                Item("reasoning_gym", "?", "5", context),
                Item("hostile", None, "modules"),
            ]
        )
        assert (scored[0].score, scored[1].reason) == (1.0, "bad_gold")
        assert (scored[2].score, scored[2].extracted) == (1.0, "")
        nursery, _ = nursery_and_workers(1)
        assert len(list(Path(f"/proc/{nursery}/task").iterdir())) == 1


def test_the_working_directory_shadows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(1)")
    (tmp_path / "headway").mkdir()
    monkeypatch.chdir(tmp_path)
    with VerifierPool(1, 5.0, 512) as pool:
        assert [verdict.score for verdict in pool.score(sums(3))] == [0.0, 1.0, 1.0]


def test_a_bad_gold_is_unscored_and_an_unknown_verifier_an_error() -> None:
    with VerifierPool(1, 5.0, 512) as pool:
        bad, good = pool.score([Item("numeric", "five", "5"), Item("numeric", "5", "5")])
        assert (bad.score, bad.reason, good.score) == (None, "bad_gold", 1.0)
        with pytest.raises(DataError, match="no verifier 'maths'"):
            pool.score([Item("maths", "5", "5")])


def test_a_large_response_passes() -> None:
    with VerifierPool(1, 20.0, 512) as pool:
        (verdict,) = pool.score([Item("numeric", "5", "x" * 20_000_000 + " 5")])
        assert verdict.score == 1.0
        (verdict,) = pool.score([Item("exact", "5", "\u2200" * 1_000_000)])
        assert (verdict.score, len(verdict.extracted or "")) == (0.0, 100_000)


def rollout(index: int, text: str) -> dict[str, Any]:
    return {
        "rollout_id": f"r{index}",
        "group_id": 1,
        "prompt_id": "p",
        "sample_index": index,
        "prompt_ids": [1],
        "response_ids": [2],
        "loss_mask": [1],
        "behavior_logprobs": [-0.5],
        "version_spans": [{"start": 0, "end": 1, "version": 3}],
        "finish_reason": "stop",
        "truncated": False,
        "text": text,
        "timing": {"started": 1.0, "finished": 2.0, "scored": None},
    }


def prompt(verifier: str, gold: Any, context: dict[str, Any] | None = None, prompt_id: str = "p") -> Prompt:
    return Prompt(prompt_id=prompt_id, content="?", gold=gold, verifier=verifier, context=context or {})


def test_worker_refuses_to_start_when_verdicts_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "from headway.verifiers import registry, verdict\n"
        "registry.VERIFIERS['numeric'] = registry.Family(lambda *_: verdict.wrong(None))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(HeadwayError, match="a right answer got"):
        VerifierWorker(Verifiers(processes=1, timeout_s=5.0, memory_mib=512))


@pytest.fixture
def worker() -> Iterator[VerifierWorker]:
    worker = VerifierWorker(Verifiers(processes=1, timeout_s=10.0, memory_mib=512))
    yield worker
    worker.close()


def test_worker_fills_the_reward_columns(worker: VerifierWorker) -> None:
    before = time.time()
    table = worker.score(
        build([rollout(0, "7 + 5 = 12."), rollout(1, "13"), rollout(2, "?")]), prompt("numeric", "12")
    )
    validate(table)
    assert table.schema.equals(SCHEMA, check_metadata=True)
    assert table.column("reward").to_pylist() == [1.0, 0.0, 0.0]
    assert table.column("verdict_reason").to_pylist() == ["correct", "wrong", "no_answer"]
    assert table.column("reward_parts").to_pylist() == [[], [], []]
    for timing in table.column("timing").to_pylist():
        assert (timing["started"], timing["finished"]) == (1.0, 2.0)
        assert before <= timing["scored"] <= time.time()
    ((name, label, (counts, total)),) = worker.drain_updates()  # type: ignore[misc]
    assert (name, label, sum(counts)) == ("headway_verifier_seconds", "", 3)
    assert 0 < total < 5
    assert worker.drain_updates() == []


@pytest.mark.usefixtures("hostile")
def test_an_unscored_response_stays_null() -> None:
    worker = VerifierWorker(Verifiers(processes=1, timeout_s=1.0, memory_mib=512))
    texts = ["fine", "exit", "sleep 9", "limits"]
    table = worker.score(build([rollout(n, text) for n, text in enumerate(texts)]), prompt("hostile", None))
    worker.close()
    assert table.column("reward").to_pylist() == [1.0, None, 0.0, 0.5]
    assert table.column("reward").null_count == 1
    assert table.column("verdict_reason").to_pylist() == ["correct", "crash", "timeout", "wrong"]
    assert table.column("reward_parts").to_pylist()[3] == [{"name": "half", "value": 0.5}]
    errors = {
        label: n for name, label, n in worker.drain_updates() if name == "headway_verifier_errors_total"
    }
    assert errors == {"crash": 1.0, "timeout": 1.0}


def test_golds_are_checked(worker: VerifierWorker) -> None:
    right = [
        prompt("math", r"so x is \boxed{\frac{1}{2}}"),
        prompt("math", r"(-\infty, 4]"),
        prompt("numeric", -5),
        prompt("exact", "(C)"),
        *load_prompts("reasoning_gym:chain_sum", verifier="math", num_prompts=20),
        *load_prompts("reasoning_gym:graph_color", verifier="math", num_prompts=2),  # no single gold
    ]
    assert worker.check_golds(right, limit=100) == []
    wrong = [
        prompt("numeric", "five", prompt_id="a"),
        prompt("math", r"\boxed{", prompt_id="b"),
        *load_prompts(
            "reasoning_gym:game_of_life_halting", verifier="math", num_prompts=1
        ),  # pays any answer
    ]
    failures = worker.check_golds([*right, *wrong], limit=100)
    assert len(failures) == 3
    assert failures[0] == "prompt a: gold 'five': bad_gold, gold answer 'five' is not a number"
    assert failures[1].startswith(r"prompt b: gold '\\boxed{'")
    assert "prompt game_of_life_halting-0-0" in failures[2] and "meaningless" in failures[2]
    assert worker.check_golds(wrong, limit=0) == []
    with pytest.raises(DataError, match="no verifier"):
        worker.check_golds([prompt("maths", "5")], limit=1)
