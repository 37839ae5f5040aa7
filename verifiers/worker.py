"""The processes behind the pool. `python -m headway.verifiers.worker FD PARENT` is the nursery: one thread that
imports what the verifiers need, and forks a worker on request, in milliseconds and with all imports done. It runs
no verifier itself. A worker scores what comes through its own socket and ends with the nursery, which ends with
its parent."""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any

from headway.core.errors import DataError
from headway.verifiers.registry import preload, verify

MAX_EXTRACTED = 100_000
"""Characters of an extracted answer that are reported."""
EXIT_MEMORY = 77
"""Exit status of a worker that reached its memory limit."""
_LENGTH = struct.Struct("!I")
_PR_SET_PDEATHSIG = 1


def frame(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


class Frames:
    """Length-prefixed messages from a stream socket."""

    def __init__(self, connection: socket.socket, longest: int = 2**32) -> None:
        self._connection = connection
        self._longest = longest
        self._buffer = bytearray()

    def read(self) -> bytes:
        """The next message. Raises `EOFError` at the end of the stream and for a message longer than
        `longest` bytes, `TimeoutError` by the socket's timeout."""
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        if length > self._longest:
            raise EOFError
        return self._take(length)

    def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            received = self._connection.recv(max(65536, size - len(self._buffer)))
            if not received:
                raise EOFError
            self._buffer += received
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    parent = int(sys.argv[2])
    loaded: set[str] = set()
    workers: set[int] = set()
    for request, fds in _requests(control, parent):
        if request["do"] == "fork":
            missing = set(request["names"]) - loaded
            preload(missing)
            loaded |= missing
            gc.collect()
            gc.freeze()
            pid = os.fork()
            if pid == 0:
                control.close()
                _become_worker(socket.socket(fileno=fds[0]), request["timeout_s"], request["memory_mib"])
            os.close(fds[0])
            workers.add(pid)
            reply = {"pid": pid, "names": sorted(loaded)}
        else:
            workers.remove(request["pid"])
            reply = {"status": _end(request["pid"])}
        control.sendall(json.dumps(reply).encode() + b"\n")
    for pid in workers:
        _end(pid)


def _requests(control: socket.socket, parent: int) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Requests, one JSON line each, with the descriptors that came along; ends when the parent does."""
    while os.getppid() == parent:
        if not select.select([control], [], [], 1.0)[0]:
            continue
        line, fds, _, _ = socket.recv_fds(control, 65536, 1)
        if not line:
            return
        while not line.endswith(b"\n"):
            line += control.recv(65536)
        yield json.loads(line), fds


def _end(pid: int) -> int:
    """Ends a worker with all its children and returns its exit status, negative for a signal. Nobody else waits
    for it, so the process id cannot have passed to another process."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)  # not yet the leader of its group, or already a zombie
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _become_worker(connection: socket.socket, timeout_s: float, memory_mib: int) -> None:
    nursery = os.getppid()
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != nursery:
        os._exit(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = _address_space() + memory_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        _work(connection, timeout_s)
    except MemoryError:
        os._exit(EXIT_MEMORY)
    except (EOFError, OSError):
        os._exit(0)
    finally:
        os._exit(1)


def _address_space() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def _work(connection: socket.socket, timeout_s: float) -> None:
    frames = Frames(connection)
    while True:
        for item in pickle.loads(frames.read()):
            seconds = math.ceil(time.process_time() + timeout_s) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
            started = time.perf_counter()
            try:
                verdict = verify(*pickle.loads(item))
                extracted = verdict.extracted and verdict.extracted[:MAX_EXTRACTED]
                result = [verdict.score, verdict.reason, extracted, verdict.parts]
            except DataError as error:
                result = [None, "bad_gold", str(error), ()]
            if result[1] == "memory":
                os._exit(EXIT_MEMORY)
            elapsed = time.perf_counter() - started
            connection.sendall(frame(json.dumps([*result, elapsed]).encode()))


if __name__ == "__main__":
    main()
