"""Runs Python programs that nobody vouches for.

With bubblewrap a program has its own user, process, network, IPC and mount namespaces: it sees the interpreter and
the system's libraries, read-only, a small folder in memory, and nothing else. Without it the program runs beside
everything else, and what keeps it in is what needs no privilege: seccomp, Landlock where the kernel has it, resource
limits, and the death of the whole when its parent dies. In both ways it gets the standard library only, an empty
environment and no capabilities; it can start threads but no processes (which is what stops fork bombs and what tries
to outlive the run), open no sockets, send no signals and make no folders. So a program does the same in both.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headway.core.errors import HeadwayError
from headway.verifiers import harness

Ended = Literal["exit", "signal", "wall", "cpu", "memory", "output", "processes"]

FOLDER_BYTES = 2**26
"""What a program may have in files altogether, and in one file."""
FOLDER_FILES = 1000
_TICK_S = 0.05
"""Time between looks at what is not limited by the kernel."""
_GRACE_S = 0.25
"""Time beyond the wall-clock limit for what is inside to end and report by itself."""
_INSTALL = "install it (Debian, Ubuntu: apt-get install bubblewrap)"
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")


class SandboxError(HeadwayError):
    """No program could be run; no fault of the program's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    wall_s: float = 4.0
    """For everything together, the start included (about 20 ms; seconds)."""
    cpu_s: int = 4
    """For each job."""
    memory_mib: int = 512
    """Address space of a process, the interpreter's 20 included."""
    processes: int = 64
    """Threads at a time; there is only one process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How a program ended."""

    ended: Ended
    """`exit` and `signal` are of its own making; `memory` is an uncaught MemoryError; the others name the limit that
    was reached."""
    status: int
    """Exit status, negative for a signal; 0 when it was stopped at a limit of this side."""
    stdout: bytes
    stderr: bytes
    """Cut at the limit, like `stdout`, which ends the program there."""
    channel: bytes
    """What was written to descriptor 3."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Job:
    """One process of a program. Make it with `script` or `call`."""

    data: dict[str, Any]


def script(stdin: bytes = b"", output_bytes: int = 2**20) -> Job:
    """`python program.py < stdin`. `output_bytes` limits each of stdout, stderr and the channel."""
    return _job("script", output_bytes, stdin=stdin.decode("latin-1"))


def call(name: str, arguments: Sequence[Any], output_bytes: int = 2**20) -> Job:
    """Calls a function of the program, or of its class `Solution`, with plain data. The channel then holds JSON:
    `{"value": …}` as of `harness.encode`, or `{"not_plain": type}`. Raises `harness.NotPlain`."""
    return _job("call", output_bytes, name=name, arguments=harness.encode(list(arguments)))


def run(
    program: str,
    *,
    stdin: bytes = b"",
    files: Mapping[str, bytes] | None = None,
    wall_s: float = 4.0,
    cpu_s: int = 4,
    memory_mib: int = 512,
    processes: int = 64,
    output_bytes: int = 2**20,
) -> Result:
    """Runs one program as a script, with these files in its folder. Raises `SandboxError`."""
    limits = Limits(wall_s=wall_s, cpu_s=cpu_s, memory_mib=memory_mib, processes=processes)
    return run_jobs(program, [script(stdin, output_bytes)], limits, files=files)[0]


def run_jobs(
    program: str, jobs: Sequence[Job], limits: Limits, *, files: Mapping[str, bytes] | None = None
) -> list[Result]:
    """Runs the jobs one after the other, each in a fresh process, all in one sandbox. There are fewer results than
    jobs when the last of them is one that stopped everything: `wall`, `processes`. Raises `SandboxError`."""
    deadline = time.monotonic() + limits.wall_s
    with _Sandbox(program, jobs, limits, deadline, files=files or {}) as sandbox:
        _watch([sandbox], limits, deadline)
        return sandbox.results()


def run_tests(
    program: str,
    prelude: str,
    names: Mapping[str, str],
    statements: Sequence[tuple[str, bool]],
    limits: Limits,
) -> tuple[Result, Result]:
    """Runs tests against a program, each in a sandbox of its own. In the tests' namespace, after `prelude`, each of
    `names` stands for an expression in the program's. `statements` are run in order; those marked are the cases.
    Returns how the tests ended (lines of JSON on the channel, `{"case": outcome}` each or `{"bad": message}` at the
    end) and how the program did. Raises `SandboxError`."""
    deadline = time.monotonic() + limits.wall_s
    test = _job("test", 2**20, names=dict(names), statements=list(statements))
    serve = _job("serve", 2**20)
    with contextlib.ExitStack() as stack:
        ends = _link()
        try:
            tests, tested = (
                stack.enter_context(_Sandbox(source, [job], limits, deadline, link=end))
                for source, job, end in ((prelude, test, ends[0]), (program, serve, ends[1]))
            )
        finally:
            for end in ends:
                os.close(end)
        _watch([tests, tested], limits, deadline)
        return tests.results()[-1], tested.results()[-1]


@functools.cache
def bubblewrap() -> str | None:
    """The path of a bubblewrap that works here. User namespaces may be forbidden in a container."""
    if (path := shutil.which("bwrap")) is None:
        return None
    command = [path, *_namespaces(), _interpreter(), "-I", "-S", "-c", "print(6 * 7)"]
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=3.0
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return path if ended.stdout == b"42\n" else None


@functools.cache
def landlock() -> bool:
    """Whether the kernel can restrict which files a process reaches."""
    return harness.landlock_version() > 0


def unprotected() -> str | None:
    """What a program could do here that it could not with bubblewrap, and what to do about it; None with it. Raises
    `SandboxError` where no program must be run."""
    if bubblewrap() is not None:
        return None
    if sys.platform != "linux":
        raise SandboxError(f"programs are run on Linux only, not on {sys.platform}")
    missing = "cannot make namespaces here" if shutil.which("bwrap") else f"is not there: {_INSTALL}"
    try:
        harness.seccomp_filter(os.uname().machine)
    except OSError as error:
        raise SandboxError(f"bubblewrap {missing}; seccomp cannot stand in for it: {error}") from error
    if landlock():
        return (
            f"bubblewrap {missing}. Programs run without namespaces, under seccomp and Landlock: network, processes "
            f"and the content of files are out of their reach, names and sizes of files are not"
        )
    if os.geteuid() == 0:
        raise SandboxError(
            f"bubblewrap {missing}; without it and without Landlock nothing keeps a program from root's files. "
            f"An ordinary user may run programs here"
        )
    return (
        f"bubblewrap {missing}. Programs run without namespaces, under seccomp: network and processes are out of "
        f"their reach, but they can read and write what user {os.geteuid()} can: data sets, and the memory of processes"
    )


@functools.cache
def _warn() -> None:
    if (message := unprotected()) is not None:
        warnings.warn(message, RuntimeWarning, stacklevel=5)


class _Sandbox:
    """The processes of one sandbox, from start to end; leaving it ends them and removes their folder."""

    def __init__(
        self,
        program: str,
        jobs: Sequence[Job],
        limits: Limits,
        deadline: float,
        *,
        files: Mapping[str, bytes] | None = None,
        link: int | None = None,
    ) -> None:
        _warn()
        if any("/" in name or name in ("", ".", "..") for name in files or {}):
            raise ValueError(f"files go into one folder, their names are not paths: {sorted(files or {})}")
        self.received = bytearray()
        self.stopped: Ended | None = None
        """The limit at which this side stopped it."""
        self.folder: str | None = None
        self._jobs = jobs
        self._started = time.monotonic()
        path = bubblewrap()
        if path is None:
            self.folder = tempfile.mkdtemp(prefix="headway-sandbox-")
        request = {
            "program": program,
            "jobs": [job.data for job in jobs],
            "files": {name: content.decode("latin-1") for name, content in (files or {}).items()},
            "deadline": deadline,
            "cpu_s": limits.cpu_s,
            "memory_bytes": limits.memory_mib * 2**20,
            "file_bytes": FOLDER_BYTES,
            "landlock": path is None and landlock(),
            "readable": _readable(),
            "folder": self.folder,
            "parent": os.getpid() if path is None else None,
        }
        self._errors = os.memfd_create("errors")
        given = os.memfd_create("request")
        self.reader, channel = os.pipe()
        try:
            with open(given, "wb", closefd=False) as file:
                file.write(json.dumps(request).encode())
            os.lseek(given, 0, os.SEEK_SET)
            inherited = [channel] if link is None else [channel, link]
            self.process = subprocess.Popen(
                _command(path, inherited),
                stdin=given,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=inherited,
                env={"MALLOC_ARENA_MAX": "1"},  # an arena for each thread would use up the address space
                cwd=self.folder or "/",
                start_new_session=path is None,  # then it sees to its end by itself
            )
        except OSError as error:
            os.close(self.reader)
            self._clean()
            raise SandboxError(f"the sandbox does not start: {error}") from error
        finally:
            os.close(given)
            os.close(channel)

    def __enter__(self) -> _Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2.0)
        self.process.kill()
        self.process.wait()
        os.close(self.reader)
        self._clean()

    def stop(self) -> None:
        """Ends everything inside."""
        if self.folder is None:
            self.process.kill()
        else:
            self.process.terminate()  # ends the program, waits for it, and removes the folder

    def read(self) -> bool:
        """Takes what has come; whether more can come."""
        data = os.read(self.reader, 2**20)
        self.received += data
        return bool(data)

    def over(self, limits: Limits) -> Ended | None:
        """A limit that is passed and that the kernel does not hold."""
        if _threads(self.process.pid) > limits.processes + 3:  # our own: two of bubblewrap, and the harness
            return "processes"
        if self.folder is not None:
            try:
                with os.scandir(self.folder) as entries:
                    sizes = [entry.stat(follow_symlinks=False).st_size for entry in entries]
            except FileNotFoundError:  # a file that was there is gone
                return None
            if len(sizes) > FOLDER_FILES or sum(sizes) > FOLDER_BYTES:
                return "output"
        return None

    def results(self) -> list[Result]:
        """Of the jobs that ended, and of the one that was stopped. Raises `SandboxError` when nothing was run."""
        first, _, rest = bytes(self.received).partition(b"\n")
        if first != b"ready":
            raise SandboxError(f"the sandbox does not start: {self._complaint() or 'no answer in time'}")
        found: list[Result] = []
        while rest:
            line, _, rest = rest.partition(b"\n")
            header = json.loads(line)
            outputs = []
            for length in header["lengths"]:
                outputs.append(rest[:length])
                rest = rest[length:]
            if header["ended"] == "failed":
                raise SandboxError(
                    f"the sandbox cannot confine a program: {outputs[0].decode(errors='replace')}"
                )
            stdout, stderr, channel = outputs
            found.append(
                Result(
                    ended=header["ended"],
                    status=header["status"],
                    stdout=stdout,
                    stderr=stderr,
                    channel=channel,
                    seconds=header["seconds"],
                )
            )
        if len(found) < len(self._jobs) and (not found or found[-1].ended != "wall"):
            if self.stopped is None:
                raise SandboxError(f"the sandbox ended early: {self._complaint()}")
            seconds = time.monotonic() - self._started
            found.append(
                Result(ended=self.stopped, status=0, stdout=b"", stderr=b"", channel=b"", seconds=seconds)
            )
        return found

    def _complaint(self) -> str:
        return os.pread(self._errors, 1000, 0).decode(errors="replace").strip()

    def _clean(self) -> None:
        os.close(self._errors)
        if self.folder is not None:
            with contextlib.suppress(FileNotFoundError):
                harness.remove_folder(self.folder)


def _watch(sandboxes: list[_Sandbox], limits: Limits, deadline: float) -> None:
    """Waits until the first sandbox has said all, stopping what passes a limit; the others get a moment more."""
    waiting = select.poll()
    by_reader = {sandbox.reader: sandbox for sandbox in sandboxes}
    for reader in by_reader:
        waiting.register(reader, select.POLLIN)
    end = deadline + _GRACE_S
    while by_reader:
        if (left := end - time.monotonic()) <= 0:
            for sandbox in by_reader.values():
                sandbox.stopped = sandbox.stopped or "wall"
            return
        ready = waiting.poll(min(left, _TICK_S) * 1000)
        for reader, _ in ready:
            if not by_reader[reader].read():
                waiting.unregister(reader)
                if by_reader.pop(reader) is sandboxes[0]:
                    end = min(end, time.monotonic() + _GRACE_S)
        if not ready:
            for sandbox in by_reader.values():
                if sandbox.stopped is None and (limit := sandbox.over(limits)) is not None:
                    sandbox.stopped = limit
                    sandbox.stop()


def _threads(pid: int) -> int:
    """Threads of a process and of those below it; 0 where the kernel does not list children."""
    try:
        threads = os.stat(f"/proc/{pid}/task").st_nlink - 2
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    return threads + sum(_threads(int(child)) for child in children)


def _job(kind: str, output_bytes: int, *, stdin: str = "", **data: Any) -> Job:
    return Job({"kind": kind, "stdin": stdin, "limits": [output_bytes] * 3, **data})


def _link() -> tuple[int, int]:
    one, other = socket.socketpair()
    return one.detach(), other.detach()


def _command(bubblewrap: str | None, descriptors: list[int]) -> list[str]:
    run = [_interpreter(), "-I", "-S", "-B"]
    arguments = [str(descriptor) for descriptor in descriptors]
    if bubblewrap is None:
        return [*run, harness.__file__, *arguments]
    return [
        bubblewrap,
        *_namespaces("--ro-bind", harness.__file__, "/harness.py"),
        *run,
        "/harness.py",
        *arguments,
    ]


def _namespaces(*more: str) -> list[str]:
    """bubblewrap's options. No /proc: a container may not mount one, and there is nothing in it for a program."""
    devices = [
        option for name in ("null", "zero", "urandom") for option in ("--dev-bind", *2 * [f"/dev/{name}"])
    ]
    read_only = [option for path in _readable() for option in ("--ro-bind-try", path, path)]
    return [
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        *("--unshare-cgroup-try", "--die-with-parent", "--new-session", "--uid", "1000", "--gid", "1000"),
        *read_only,
        *devices,
        *more,
        *("--size", str(FOLDER_BYTES), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp", "--"),
    ]  # fmt: skip


def _interpreter() -> str:
    """Of the environment that this one is made from: a virtual environment's packages are out of reach anyway."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def _readable() -> tuple[str, ...]:
    """The interpreter with its library, and the system's libraries."""
    return tuple(dict.fromkeys([sys.base_prefix, sys.base_exec_prefix, _interpreter(), *_LIBRARIES]))
