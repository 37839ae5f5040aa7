"""What an engine leaves on its host when it is killed, and how the next engine of its run removes it.

An actor writes down, beside its shared file, which files and processes belong to it. Whoever starts next in the same run
finds that record, sees that its author is gone, and removes what it names. Nothing is guessed from names: a file is an
engine's because one of its processes has it mapped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from glob import escape
from pathlib import Path

from headway.core.config import Config

SHARED = Path("/dev/shm")
ENGINE_FILES = ("psm_", "sem.mp-", "vllm_dist_")
"""How files of vLLM's processes in shared memory begin: message queues, semaphores, collectives on CPUs."""

Process = tuple[int, int]
"""Process id and when the process began (clock ticks since boot): together never used again."""


def places(config: Config) -> str:
    """How the names of all engines of this run begin on a host."""
    run = hashlib.blake2b(str(config.run_folder.resolve()).encode(), digest_size=4).hexdigest()
    return f"headway-{config.run.name}-{run}-"


def prepare(folder: Path, threads: int, replica: int, cores: Sequence[int]) -> None:
    """Sets what vLLM reads when it is imported, and in its processes. `folder` is for their sockets; on CPUs the replica
    computes on its `threads` (0: all) of `cores`."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_RPC_BASE_PATH"] = str(folder)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB only, and it would win over `kv_cache_gib`
    if threads:
        mine = {cores[(replica * threads + number) % len(cores)] for number in range(threads)}
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(mine)))


class Traces:
    """The files and processes of one actor. `place` names what it is the only actor of, at a time."""

    def __init__(self, place: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="headway-"))
        """For sockets and other files of the engine's processes."""
        token = self.folder.name.rpartition("-")[2]
        self.weights = SHARED / f"{place}.{token}"
        """The shared file that weights arrive in."""
        self._record = SHARED / f"{place}.{token}.json"
        self._files = [self.weights]
        self._others = set(_descendants(os.getpid()))
        self.note()
        self.weights.touch(mode=0o600)

    def note(self) -> None:
        """Writes down what there is by now."""
        processes = [each for each in _descendants(os.getpid()) if each not in self._others]
        self._files = [self.weights, *_mapped(processes)]
        record = {
            "author": _process(os.getpid()),
            "processes": processes,
            "files": [str(file) for file in self._files],
            "folder": str(self.folder),
        }
        temporary = self._record.with_suffix(".tmp")
        temporary.write_text(json.dumps(record))
        temporary.replace(self._record)

    def remove(self) -> None:
        """Once the engine has ended: it leaves files even then, and more when it died."""
        for file in self._files:
            file.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._record.unlink(missing_ok=True)


def remove_traces(places: str) -> None:
    """Ends the processes and removes the files of every actor that is gone and was in a place whose name begins so."""
    for path in SHARED.glob(f"{escape(places)}*.json"):
        try:
            if path.stat().st_uid != os.getuid():
                continue
            record = json.loads(path.read_text())
        except FileNotFoundError:
            continue  # another engine that starts has just removed it
        if lives(record["author"]):
            continue
        for process in record["processes"]:
            if lives(process):
                os.kill(process[0], signal.SIGKILL)
        for file in record["files"]:
            Path(file).unlink(missing_ok=True)
        shutil.rmtree(record["folder"], ignore_errors=True)
        path.unlink(missing_ok=True)


def _process(pid: int) -> Process | None:
    """None when it is gone, or ended and only waits to be reaped."""
    try:
        # The name in brackets may hold blanks and brackets itself.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (pid, int(fields[19]))


def lives(process: list[int]) -> bool:
    found = _process(process[0])
    return found is not None and list(found) == process


def _descendants(pid: int) -> list[Process]:
    found: list[Process] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            ids = children.read_text().split()
        except OSError:
            continue  # the thread has just ended
        for child in map(int, ids):
            process = _process(child)
            found += [process] if process else []
            found += _descendants(child)
    return found


def _mapped(processes: list[Process]) -> list[Path]:
    """Files of vLLM's in shared memory that these processes have mapped. They are told by their inode: a semaphore is
    mapped under a name that it no longer has."""
    mapped: set[tuple[int, int]] = set()
    for pid, _ in processes:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            _, _, _, device, inode, *_ = line.split(maxsplit=5)
            major, minor = (int(part, 16) for part in device.split(":"))
            mapped.add((os.makedev(major, minor), int(inode)))
    found = []
    for path in SHARED.iterdir():
        if path.name.startswith(ENGINE_FILES):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # another engine's, which has just ended
            if (status.st_dev, status.st_ino) in mapped:
                found.append(path)
    return found
