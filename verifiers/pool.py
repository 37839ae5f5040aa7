"""Verifiers in killable processes: one verdict per item, in order, whatever an item does to its process."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.core.errors import Closed, Starved
from headway.verifiers.registry import lookup, needed
from headway.verifiers.verdict import Item, Verdict
from headway.verifiers.worker import EXIT_MEMORY, Frames, frame

MAX_ATTEMPTS = 2
"""An item whose worker dies this often, other than by a limit, stays unscored."""
START_TIMEOUT_S = 60.0
"""Longest time that a worker may take to start, imports included."""
CHUNK_SECONDS = 0.02
"""A worker gets as many items at a time as it lately scored in this time."""
MAX_CHUNK = 64
MAX_REPLY_BYTES = 2**20
"""A worker that sends a longer message is broken."""
CLOSE_TIMEOUT_S = 5.0
"""Time for processes to end in order before they are killed."""


_LIMIT_REASONS: dict[int | None, str] = {EXIT_MEMORY: "memory", -signal.SIGXCPU: "timeout"}


@dataclass(slots=True, eq=False)
class _Batch:
    """One call of `score`."""

    size: int
    scored: dict[int, tuple[Verdict, float]] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class _Job:
    batch: _Batch
    position: int
    names: frozenset[str]
    """Of the verifiers that it needs."""
    item: bytes
    """The pickled item."""
    attempts: int = 0


class _Worker:
    """A worker process and our end of its socket."""

    def __init__(self, pid: int, names: frozenset[str], nursery: object, connection: socket.socket) -> None:
        self.pid = pid
        self.names = names
        self.nursery = nursery
        self.connection = connection
        self._frames = Frames(connection, MAX_REPLY_BYTES)

    def send(self, items: list[bytes]) -> None:
        self.connection.settimeout(START_TIMEOUT_S)
        try:
            self.connection.sendall(frame(pickle.dumps(items)))
        except TimeoutError as error:
            raise EOFError("the worker reads no more") from error

    def receive(self, timeout_s: float) -> tuple[Verdict, float]:
        """The verdict of the next item. Raises `TimeoutError`, and `OSError` or `EOFError` if the worker ended or
        sent anything else."""
        self.connection.settimeout(timeout_s)
        try:
            score, reason, extracted, parts, seconds = json.loads(self._frames.read())
            parts = tuple((str(name), float(value)) for name, value in parts)
            score = None if score is None else float(score)
        except (ValueError, TypeError) as error:
            raise EOFError("no verdict") from error
        return Verdict(score=score, reason=reason, extracted=extracted, parts=parts), seconds


class VerifierPool:
    """`processes` worker processes, each scoring one item at a time under a wall-clock limit (`timeout_s`, held by
    killing the process and its children), nearly the same limit on CPU time, and `memory_mib` of memory beyond
    what the imported packages take.

    An item that reaches a limit is scored 0 with reason `timeout` or `memory`. An item whose worker dies twice for
    another reason is unscored with reason `crash`; one with a gold that its verifier cannot use is unscored with
    reason `bad_gold`. All methods may be called from any thread at any time.
    """

    def __init__(self, processes: int, timeout_s: float, memory_mib: int) -> None:
        self._timeout_s = timeout_s
        self._nursery = _Nursery(timeout_s, memory_mib)
        self._changed = threading.Condition()  # guards everything below
        self._jobs: deque[_Job] = deque()
        self._batches: set[_Batch] = set()
        self._workers: set[_Worker] = set()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"verifier-{number}", daemon=True)
            for number in range(processes)
        ]
        for thread in self._threads:
            thread.start()

    def score(self, items: Sequence[Item]) -> list[Verdict]:
        """One verdict per item, in order. Waits for the items handed in before; unblocked by the last verdict and by
        `close`. Raises `Closed` when the pool is closed meanwhile, `Starved` after the sum of all limits, and
        `DataError` for an unknown verifier."""
        return [verdict for verdict, _ in self.score_timed(items)]

    def score_timed(self, items: Sequence[Item]) -> list[tuple[Verdict, float]]:
        """As `score`, each with the seconds that it took; for an item that ended its process, until then."""
        for name in {item[0] for item in items}:
            lookup(name)
        if not items:
            return []
        batch = _Batch(len(items))
        jobs = [
            _Job(batch, position, needed(*item), pickle.dumps(item)) for position, item in enumerate(items)
        ]
        with self._changed:
            if self._closed:
                raise Closed("the verifier pool is closed")
            self._batches.add(batch)
            waiting = sum(batch.size - len(batch.scored) for batch in self._batches)
            self._jobs.extend(jobs)
            self._changed.notify_all()
        deadline_s = waiting * MAX_ATTEMPTS * (self._timeout_s + START_TIMEOUT_S)
        if not batch.done.wait(deadline_s):
            raise Starved(f"{len(items)} responses waited {deadline_s:.0f} s for verifier processes")
        if len(batch.scored) != len(items):
            raise Closed("the verifier pool was closed while it scored")
        return [batch.scored[position] for position in range(len(items))]

    def close(self) -> None:
        """Ends every process and releases every waiting caller with `Closed`. May be called again."""
        self._release()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._nursery.close()

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _release(self) -> None:
        with self._changed:
            self._closed = True
            self._jobs.clear()
            for batch in self._batches:
                batch.done.set()
            for worker in self._workers:  # wakes the thread that waits for its verdict
                with contextlib.suppress(OSError):
                    worker.connection.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()

    def _serve(self) -> None:
        """Feeds one worker at a time. Consumes jobs; waits for jobs, unblocked by `score` and `close`."""
        worker: _Worker | None = None
        size = 1
        try:
            while jobs := self._take(size):
                started = time.perf_counter()
                worker = self._run(worker, jobs)
                seconds_per_item = (time.perf_counter() - started) / len(jobs)
                size = max(1, min(MAX_CHUNK, int(CHUNK_SECONDS / seconds_per_item)))
            if worker is not None:
                self._end(worker)
        finally:
            self._release()  # should this thread fail, nobody must wait for it

    def _take(self, size: int) -> list[_Job]:
        with self._changed:
            while not self._jobs and not self._closed:
                self._changed.wait()
            fair = -(-len(self._jobs) // len(self._threads))
            return [self._jobs.popleft() for _ in range(min(size, fair))]

    def _run(self, worker: _Worker | None, jobs: list[_Job]) -> _Worker | None:
        """Scores jobs on the worker, or on a fresh one; returns it, or None if it ended. What the one that ended
        it had not begun goes back to the queue."""
        names = frozenset().union(*(job.names for job in jobs))
        if worker is not None and not names <= worker.names:
            self._end(worker)
            worker = None
        left = deque(jobs)
        reason: str | None = None
        started = time.perf_counter()
        try:
            worker = worker or self._fork(names)
            started = time.perf_counter()
            worker.send([job.item for job in jobs])
            while left:
                result = worker.receive(self._timeout_s)
                started = time.perf_counter()
                self._finish(left.popleft(), result)
            return worker
        except TimeoutError:
            reason = "timeout"
        except (OSError, EOFError):
            pass
        status = self._end(worker) if worker is not None else None
        if reason is None:
            reason = _LIMIT_REASONS.get(status)
        job = left.popleft()
        job.attempts += 1
        if reason is None and job.attempts < MAX_ATTEMPTS:
            left.appendleft(job)
        else:
            score = None if reason is None else 0.0
            verdict = Verdict(score=score, reason=reason or "crash")
            self._finish(job, (verdict, time.perf_counter() - started))
        with self._changed:
            if not self._closed:
                self._jobs.extendleft(reversed(left))
                self._changed.notify_all()
        return None

    def _fork(self, names: frozenset[str]) -> _Worker:
        worker = self._nursery.fork(names)
        with self._changed:
            self._workers.add(worker)
            closed = self._closed
        if closed:
            self._end(worker)
            raise EOFError
        return worker

    def _end(self, worker: _Worker) -> int | None:
        with self._changed:
            self._workers.discard(worker)
        return self._nursery.end(worker)

    def _finish(self, job: _Job, result: tuple[Verdict, float]) -> None:
        with self._changed:
            job.batch.scored[job.position] = result
            if len(job.batch.scored) == job.batch.size:
                self._batches.discard(job.batch)
                job.batch.done.set()


class _Nursery:
    """Our side of the process that forks workers. Started when first needed, and again should it end."""

    def __init__(self, timeout_s: float, memory_mib: int) -> None:
        self._limits = {"timeout_s": timeout_s, "memory_mib": memory_mib}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False

    def fork(self, names: frozenset[str]) -> _Worker:
        """A fresh worker with what these verifiers need imported. Raises `EOFError`, or `OSError` when it cannot be started."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                reply, process = self._ask(
                    {"do": "fork", "names": sorted(names), **self._limits}, theirs.fileno()
                )
        except BaseException:
            ours.close()
            raise
        return _Worker(reply["pid"], frozenset(reply["names"]), process, ours)

    def end(self, worker: _Worker) -> int | None:
        """Kills a worker with its children, if it still lives. Its exit status, negative for a signal; None if it
        went down with the nursery."""
        worker.connection.close()
        if worker.nursery is not self._process:
            return None
        try:
            return self._ask({"do": "end", "pid": worker.pid})[0]["status"]
        except (OSError, EOFError):
            return None

    def close(self) -> None:
        self._closed = True
        if (process := self._process) is not None and not self._lock.acquire(timeout=1.0):
            process.kill()  # whoever holds the lock waits for an answer; now there is none
            self._lock.acquire()
        elif process is None:
            self._lock.acquire()
        try:
            self._stop()
        finally:
            self._lock.release()

    def _ask(self, request: dict[str, Any], *fds: int) -> tuple[dict[str, Any], object]:
        with self._lock:
            if self._closed:
                raise EOFError
            if self._process is None or self._process.poll() is not None:
                self._stop()
                self._start()
            assert self._control is not None
            try:
                socket.send_fds(self._control, [json.dumps(request).encode() + b"\n"], fds)
                answer = b""
                while not answer.endswith(b"\n"):
                    if not (received := self._control.recv(65536)):
                        raise EOFError
                    answer += received
                return json.loads(answer), self._process
            except (OSError, EOFError) as error:
                self._stop()
                raise EOFError("the process that forks workers does not answer") from error

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(START_TIMEOUT_S)
        with theirs:
            self._process = subprocess.Popen(
                # -P: the working directory must not shadow a package
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "headway.verifiers.worker",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                # no compute threads: a process with threads cannot fork safely
                env=os.environ
                | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )

    def _stop(self) -> None:
        """The end of the control stream is the order to end all workers and exit."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
