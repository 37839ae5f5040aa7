"""The sandbox, with bubblewrap and without: what a program can do, what stops it, and that nothing is left of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.verifiers import harness, sandbox
from headway.verifiers.sandbox import Job, Limits, Result, SandboxError, call, run, run_jobs, script

WAYS = ("bubblewrap", "plain")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test that takes it runs with bubblewrap, which must work here, and without."""
    use(request.param, monkeypatch)
    return request.param


def use(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "plain":
        monkeypatch.setattr(sandbox, "bubblewrap", lambda: None)
        monkeypatch.setattr(sandbox, "_warn", lambda: None)
    else:
        assert sandbox.bubblewrap() is not None, "these tests need bubblewrap: apt-get install bubblewrap"


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process and no folder outlives the test."""
    folders = tmp_path / "folders"
    folders.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folders))
    before = harnesses()
    yield
    eventually(lambda: harnesses() <= before)
    assert list(folders.iterdir()) == []


def harnesses() -> set[int]:
    """Processes of sandboxes: all have the harness in their command line."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"harness.py" in path.read_bytes():
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def eventually(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def ended(result: Result) -> tuple[str, int]:
    return result.ended, result.status


# --- what a program gets ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
def test_a_program_runs_as_a_script() -> None:
    result = run("print(input()[::-1])\nif __name__ == '__main__': exit(3)", stdin=b"abc\n")
    assert (ended(result), result.stdout, result.stderr, result.channel) == (("exit", 3), b"cba\n", b"", b"")
    assert 0 < result.seconds < 4


@pytest.mark.usefixtures("way")
def test_it_sees_its_files_and_nothing_else() -> None:
    program = "import os, sys\nprint(os.listdir('.'), open('a').read(), dict(os.environ), sys.argv)"
    assert run(program, files={"a": b"A"}).stdout == b"['a'] A {} ['program.py']\n"
    assert run("import os\nos.listdir('/proc/self/fd')").status == 1
    with pytest.raises(ValueError, match="not paths"):
        run("", files={"../a": b""})


@pytest.mark.usefixtures("way")
def test_what_it_writes_is_seen_after_an_error_too() -> None:
    result = run("import os\nprint('before')\nos.write(3, b'told')\n1 / 0")
    assert (ended(result), result.stdout, result.channel) == (("exit", 1), b"before\n", b"told")
    assert result.stderr == (
        b'Traceback (most recent call last):\n  File "program.py", line 4, in <module>\n'
        b"ZeroDivisionError: division by zero\n"
    )


@pytest.mark.usefixtures("way")
def test_threads_and_deep_recursion_work() -> None:
    program = """
import sys, threading
sys.setrecursionlimit(10**6)
threading.stack_size(2**27)
depth = lambda n: 0 if n == 0 else 1 + depth(n - 1)
threading.Thread(target=lambda: print(depth(50_000))).start()
"""
    assert run(program).stdout == b"50000\n"


@pytest.mark.usefixtures("way")
def test_jobs_are_processes_of_their_own() -> None:
    program = (
        "import sys\nn = int(input())\nif n == 2: sys.exit(9)\nopen('seen', 'a').write(str(n))\nprint(n * n)"
    )
    results = run_jobs(program, [script(f"{n}\n".encode()) for n in range(4)], Limits())
    assert [(result.stdout, result.status) for result in results] == [
        (b"0\n", 0), (b"1\n", 0), (b"", 9), (b"9\n", 0),
    ]  # fmt: skip


@pytest.mark.usefixtures("way")
def test_a_function_is_called_with_plain_data() -> None:
    program = "def twice(x): return [x, x]\nclass Solution:\n    def length(self, x): return len(x)"
    jobs = [call("twice", [(1, {"a"})]), call("length", ["four"]), call("missing", [])]
    results = run_jobs(program, jobs, Limits())
    assert results[0].channel == b'{"value": ["l", [["t", [1, ["s", ["a"]]]], ["t", [1, ["s", ["a"]]]]]]}'
    assert results[1].channel == b'{"value": 4}'
    assert (results[2].channel, results[2].status) == (b"", 1)


# --- limits ---------------------------------------------------------------------------------------------------------

ALLOCATES = "held = bytearray(2**30)"
GROWS = "held = []\nwhile True: held.append(bytearray(2**20))"
HIDES = "while True:\n    try: held = [bytearray(2**24) for _ in range(99)]\n    except MemoryError: pass"
THREADS = """
import threading, time
threading.stack_size(2**15)
while True: threading.Thread(target=time.sleep, args=(9,)).start()
"""
FILES = "n = 0\nwhile True:\n    open(str(n), 'wb').write(bytes(2**20))\n    n += 1"
ENDS: list[tuple[str, dict[str, float | int], str]] = [
    ("while True: pass", {"wall_s": 0.5}, "wall"),
    ("import time\ntime.sleep(60)", {"wall_s": 0.5}, "wall"),
    ("import os\nos.closerange(0, 99)\nwhile True: pass", {"wall_s": 0.5}, "wall"),
    ("while True: pass", {"cpu_s": 1}, "cpu"),
    (ALLOCATES, {}, "memory"),
    (GROWS, {}, "memory"),
    (HIDES, {"wall_s": 0.5}, "wall"),
    ("while True: print('x' * 1000)", {}, "output"),
    ("import os\nwhile True: os.write(3, bytes(1000))", {}, "output"),
    (THREADS, {}, "processes"),
]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("program", "limits", "end"), ENDS)
def test_limits(program: str, limits: dict[str, float], end: str) -> None:
    started = time.perf_counter()
    result = run(program, **limits, output_bytes=100_000)  # type: ignore[arg-type]
    assert result.ended == end
    assert max(len(result.stdout), len(result.stderr), len(result.channel)) <= 100_000
    assert time.perf_counter() - started < limits.get("wall_s", 4.0) + 10.0


@pytest.mark.usefixtures("way")
def test_what_passes_the_limit_of_stderr_is_dropped() -> None:
    program = "import sys\nfor _ in range(1000): sys.stderr.write('x' * 1000)\nprint('done')"
    result = run(program, output_bytes=2000)
    assert (ended(result), result.stdout, len(result.stderr)) == (("exit", 0), b"done\n", 2000)


def test_files_are_limited(way: str) -> None:
    result = run(FILES)
    if way == "bubblewrap":  # the folder is full
        assert result.stderr.endswith(b"No space left on device\n")
    else:
        assert result.ended == "output"
    assert run("open('a', 'wb').write(bytes(2**27))").stderr.endswith(b"File too large\n")
    assert run("import os\nos.mkdir('a')").stderr.endswith(b"Operation not permitted: 'a'\n")


@pytest.mark.usefixtures("way")
def test_what_ran_before_the_time_was_up_counts() -> None:
    jobs = [script(b"1"), script(b"2"), script(b"0"), script(b"3")]
    results = run_jobs("n = int(input())\nwhile not n: pass\nprint(n)", jobs, Limits(wall_s=1.0))
    assert [(result.ended, result.stdout) for result in results] == [
        ("exit", b"1\n"), ("exit", b"2\n"), ("wall", b""),
    ]  # fmt: skip


# --- what a program cannot do -----------------------------------------------------------------------------------------

FORBIDDEN = {
    "fork": "os.fork()",
    "subprocess": "import subprocess; subprocess.run(['/bin/true'])",
    "socket": "import socket; socket.socket()",
    "unix socket": "import socket; socket.socket(socket.AF_UNIX)",
    "kill the parent": "os.kill(os.getppid(), 9)",
    "kill everyone": "os.kill(-1, 9)",
    "kill the group": "os.killpg(0, 9)",
    "limit another": "import resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))",
    "raise its own limit": "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
    "signal by a file": "import fcntl; fcntl.fcntl(1, 8, os.getppid())",
    "outlive its parent": "checked(libc.prctl(1, 0, 0, 0, 0))",
    "trace": "checked(libc.ptrace(16, os.getppid(), None, None))",
    "make a name space": "checked(libc.unshare(0x10000000))",
    "change a mode": "open('a', 'w'); os.chmod('a', 0o777)",
    "become root": "os.setuid(0) if os.getuid() else os.setuid(1)",
    "memory that is no address space": "os.memfd_create('x')",
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("what", FORBIDDEN)
def test_forbidden(what: str) -> None:
    program = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
def checked(result):
    if result == -1:
        raise OSError(ctypes.get_errno(), "refused")
try:
    {FORBIDDEN[what]}
except (OSError, ValueError):
    print("refused")
"""
    assert run(program).stdout == b"refused\n"


@pytest.mark.usefixtures("way")
def test_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        result = run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1).send(b'out')")
        assert result.status == 1
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.usefixtures("way")
def test_no_files_of_the_host(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the answers")
    for program in (
        f"print(open({str(secret)!r}).read())",
        f"open({str(secret)!r}, 'w').write('x')",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"import os\nos.unlink({str(secret)!r})",
        f"import os\nos.rename({str(secret)!r}, 'mine')",
        f"import os\nos.link({str(secret)!r}, 'mine')",
        f"import os\nos.symlink({str(secret)!r}, 'mine')\nprint(open('mine').read())",
        f"import os\nos.listdir({str(tmp_path)!r})",
        f"import os\nos.execv({str(secret)!r}, ['x'])",
        f"open('/proc/{os.getpid()}/mem', 'rb')",
        f"open('/proc/{os.getpid()}/environ', 'rb').read()",
        f"open({str(Path(sandbox.__file__))!r}).read()",
        "open('/etc/passwd').read()",
        "import os\nopen(os.__file__, 'a')",
        "open('/harness.py', 'a')",
        "open('/left', 'w')",
    ):
        result = run(program)
        assert (ended(result), result.stdout) == (("exit", 1), b""), program
    assert secret.read_text() == "the answers"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folders", "secret"]


def test_the_namespaces_hold_without_the_filter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With bubblewrap, forks, orphans, signals and sockets stay inside even where seccomp lets them pass."""
    use("bubblewrap", monkeypatch)
    source = Path(harness.__file__).read_text()
    install = "_checked(libc.prctl(_PR_SET_SECCOMP, 2, program, 0, 0))"
    assert source.count(install) == 1
    unfiltered = tmp_path / "harness.py"
    unfiltered.write_text(source.replace(install, "pass"))
    monkeypatch.setattr(harness, "__file__", str(unfiltered))
    bomb = run("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", wall_s=1.0)
    assert bomb.ended in ("processes", "wall")
    eventually(lambda: not harnesses())
    run(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(60)",
        wall_s=1.5,
    )
    eventually(lambda: not harnesses())
    with contextlib.suppress(SandboxError):  # it ends its own sandbox, and not this process
        run("import os\nos.kill(-1, 9)")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        refused = run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)")
        assert refused.status == 1
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


# --- whoever runs it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_nothing_survives_a_killed_caller(way: str, tmp_path: Path) -> None:
    caller = f"""
import sys
from headway.verifiers import sandbox
if {way!r} == "plain":
    sandbox.bubblewrap = lambda: None
sandbox.run("import time\\nopen('file', 'w')\\nwhile True: time.sleep(1)", wall_s=60.0)
"""
    before = harnesses()
    with subprocess.Popen(
        [sys.executable, "-P", "-W", "ignore", "-c", caller],
        env={**os.environ, "TMPDIR": str(tmp_path / "folders")},
        start_new_session=True,
    ) as process:
        eventually(lambda: len(harnesses() - before) >= (3 if way == "bubblewrap" else 2))
        time.sleep(0.2)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        eventually(lambda: harnesses() <= before)
        eventually(lambda: list((tmp_path / "folders").iterdir()) == [])


@pytest.mark.usefixtures("way")
def test_several_at_a_time() -> None:
    with ThreadPoolExecutor(6) as threads:
        results = list(threads.map(lambda n: run(f"print({n} ** 2)", wall_s=20.0), range(12)))
    assert [int(result.stdout) for result in results] == [n * n for n in range(12)]
    assert threading.active_count() < 20


@pytest.mark.usefixtures("way")
def test_no_descriptor_is_left_open() -> None:
    run("")
    before = len(os.listdir("/proc/self/fd"))
    for program in ("print(1)", "while True: pass", "import os; os._exit(3)"):
        run(program, wall_s=0.3)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_bubblewrap_that_does_not_work_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    for path, says in (
        (tmp_path, "cannot make namespaces here"),
        (tmp_path / "none", "apt-get install bubblewrap"),
    ):
        monkeypatch.setenv("PATH", str(path))
        sandbox.bubblewrap.cache_clear()
        sandbox._warn.cache_clear()
        try:
            with pytest.warns(RuntimeWarning, match=says):
                assert run("print(1)").stdout == b"1\n"
            assert run("print(2)").stdout == b"2\n"  # warned already
        finally:
            sandbox.bubblewrap.cache_clear()
            sandbox._warn.cache_clear()


def test_what_is_not_protected_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sandbox.bubblewrap() is not None and sandbox.unprotected() is None
    use("plain", monkeypatch)
    assert "content of files are out of their reach" in (sandbox.unprotected() or "")
    monkeypatch.setattr(sandbox, "landlock", lambda: False)
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    assert "can read and write what user 1234 can" in (sandbox.unprotected() or "")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(SandboxError, match="root's files"):
        sandbox.unprotected()


def test_a_sandbox_that_does_not_start_is_an_error_of_its_own(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SandboxError, match="no answer in time"):
        run("print(1)", wall_s=0.0)
    with pytest.raises(SandboxError, match="cannot confine a program"):
        run("print(1)", cpu_s=2**70)
    broken = tmp_path / "harness.py"
    broken.write_text("raise OSError('nothing works')")
    monkeypatch.setattr(harness, "__file__", str(broken))
    with pytest.raises(SandboxError, match="nothing works"):
        run("print(1)")


def test_a_filter_for_each_machine() -> None:
    """8 bytes an instruction; it ends by letting pass."""
    for machine in ("x86_64", "aarch64"):
        code = harness.seccomp_filter(machine)
        assert len(code) % 8 == 0 and code.endswith(bytes.fromhex("060000000000ff7f"))
    with pytest.raises(OSError, match="riscv64"):
        harness.seccomp_filter("riscv64")


# --- plain data -------------------------------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
PLAIN = st.recursive(
    SCALARS | st.frozensets(SCALARS),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(SCALARS, inner) | st.sets(SCALARS)
    ),
    max_leaves=8,
)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(PLAIN)
def test_plain_data_arrives_as_it_was(value: object) -> None:
    data = harness.json.loads(harness.json.dumps(harness.encode(value)))
    assert repr(harness.decode(data)) == repr(value) or harness.decode(data) == value


def test_no_method_of_a_subclass_arrives() -> None:
    class Always(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

        def __int__(self) -> int:
            return 42

    class Liar(list):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[int]:
            return iter([42])

    arrived = harness.decode(harness.encode([Always(5), Liar([7]), True]))
    assert arrived == [5, [7], True] and [type(item) for item in arrived] == [int, list, bool]
    for value in (object(), lambda: 1, iter([]), Always):
        with pytest.raises(harness.NotPlain):
            harness.encode(value)
    for data in ({}, [], ["x", []], ["l"], ["i", 5], ["s", [["l", []]]], ["d", [1]], ["b", "zz"]):
        with pytest.raises(ValueError):
            harness.decode(data)


def test_a_job_that_nobody_knows_fails() -> None:
    (result,) = run_jobs("", [Job({"kind": "none", "stdin": "", "limits": [9, 9, 9]})], Limits())
    assert ended(result) == ("exit", 1)
