"""The program inside the sandbox: `python -I -S harness.py CHANNEL [LINK]` runs untrusted programs.

A request comes on standard input; each of its jobs runs in a forked process that has given up what it can give up,
and its outcome goes to descriptor CHANNEL. Nothing that a program must not know is in this process or in its
request, and nobody outside trusts what it sends further than as a claim about the program's values. The only job
whose own word counts is `test`: it runs the tests, and reaches the program through the socket LINK, behind which is
a `serve` job in another sandbox; only plain data passes.

Needs the standard library alone, and nothing of this package: inside the sandbox there is no such package.
"""

from __future__ import annotations

import _sitebuiltins
import builtins
import contextlib
import ctypes
import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
import types
from collections.abc import Callable
from typing import IO, Any

EXIT_MEMORY = 77
"""Exit status of a program that ended with `MemoryError`."""
PROGRAM_CHANNEL = 3
"""The descriptor on which a program's job reports."""
_CONFIRM = 4
"""Where the process of a job says that it is confined, before anything of the program runs."""
_LINK = 5
_MAX_FRAME = 2**22
"""Longest message between tests and program (bytes)."""
_LENGTH = struct.Struct("!I")


# --- plain data -------------------------------------------------------------------------------------------------


class NotPlain(Exception):
    """A value that is not plain data; the argument is the name of its type."""


_SEQUENCES: dict[str, type] = {"l": list, "t": tuple, "s": set, "f": frozenset}


def encode(value: Any) -> Any:
    """JSON for None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset and dict, nested. An object
    of a subclass goes as what it is at base, so no method of its own arrives. Raises `NotPlain` for anything else,
    and `RecursionError` for what is nested too deeply."""
    match value:
        case None | bool():
            return value
        case int():
            number = int.__int__(value)
            return number if number.bit_length() < 64 else ["i", hex(number)]
        case float():
            return float.__float__(value)
        case str():
            return str.__str__(value)
        case bytes():
            return ["b", bytes.hex(value)]
        case complex():
            return ["c", value.real, value.imag]
        case dict():
            return ["d", [[encode(key), encode(item)] for key, item in dict.items(value)]]
    for tag, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return [tag, [encode(item) for item in kind.__iter__(value)]]
    raise NotPlain(type(value).__name__)


def decode(data: Any) -> Any:
    """The inverse of `encode`. Raises `ValueError` for anything that `encode` does not give."""
    if not isinstance(data, list):
        if isinstance(data, dict):
            raise ValueError("an object is not an encoded value")
        return data
    try:
        match data:
            case ["i", text]:
                return int(text, 16)
            case ["b", text]:
                return bytes.fromhex(text)
            case ["c", real, imaginary]:
                return complex(real, imaginary)
            case ["d", pairs]:
                return {decode(key): decode(item) for key, item in pairs}
            case [tag, items]:
                return _SEQUENCES[tag](decode(item) for item in items)
    except (TypeError, KeyError) as error:
        raise ValueError("no encoded value") from error
    raise ValueError("no encoded value")


# --- confinement ------------------------------------------------------------------------------------------------

# name: (x86_64, aarch64). What a program has no use for and what reaches beyond its own process.
_FORBIDDEN = {
    "fork": (57, None), "vfork": (58, None), "setns": (308, 268), "unshare": (272, 97),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "process_madvise": (440, 440), "kcmp": (312, 272),
    "sched_setaffinity": (203, 122), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
    "socket": (41, 198), "io_uring_setup": (425, 425), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "mkdir": (83, None), "mkdirat": (258, 34), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428), "mount_setattr": (442, 442),
    "bpf": (321, 280), "perf_event_open": (298, 241), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "userfaultfd": (323, 282),
    # Landlock leaves these alone
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "utimensat": (280, 88), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None),
}  # fmt: skip
_CLONE, _CLONE3, _PRCTL, _PRLIMIT, _FCNTL, _IOCTL = (
    (56, 220),
    (435, 435),
    (157, 167),
    (302, 261),
    (72, 25),
    (16, 29),
)
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE_THREAD = 0x10000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SIGNAL_FCNTLS = (8, 10, 15)
"""F_SETOWN, F_SETSIG, F_SETOWN_EX: they send signals to any process."""
_SIGNAL_IOCTLS = (0x8901, 0x8902, 0x5412)
"""FIOSETOWN, SIOCSPGRP, and TIOCSTI, which types on the terminal."""


def seccomp_filter(machine: str) -> bytes:
    """The BPF program for this machine: threads but no processes, no sockets to anywhere, no signals, no reaching
    into other processes. Raises `OSError` for a machine whose system calls are not listed."""
    if machine not in _AUDIT_ARCH:
        raise OSError(f"no list of system calls for {machine}")
    column = list(_AUDIT_ARCH).index(machine)
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, refuse, unknown = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026  # EPERM, ENOSYS
    number, architecture, first, second = 0, 4, 16, 24

    def instruction(code: int, k: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", code, yes, no, k)

    def rule(call: tuple[int, int | None], *then: bytes) -> bytes:
        if (value := call[column]) is None:
            return b""
        return instruction(equal, value, 0, len(then)) + b"".join(then)

    def among(offset: int, values: tuple[int, ...]) -> list[bytes]:
        """Refuse when the argument is one of these."""
        checks = [instruction(equal, value, len(values) - n) for n, value in enumerate(values)]
        return [instruction(load, offset), *checks, instruction(give, allow), instruction(give, refuse)]

    return b"".join([
        instruction(load, architecture),
        instruction(equal, _AUDIT_ARCH[machine], 1),
        instruction(give, kill),
        instruction(load, number),
        instruction(at_least, 0x40000000, 0, 1),  # the other calling convention of x86_64
        instruction(give, kill),
        *(rule(call, instruction(give, refuse)) for call in _FORBIDDEN.values()),
        rule(_CLONE3, instruction(give, unknown)),  # its flags are out of reach; libc then uses clone
        rule(
            _CLONE, instruction(load, first), instruction(any_bit, _CLONE_THREAD, 0, 1),
            instruction(give, allow), instruction(give, refuse),
        ),
        rule(_PRLIMIT, instruction(load, first), instruction(equal, 0, 0, 1),
             instruction(give, allow), instruction(give, refuse)),
        rule(_PRCTL, *among(first, (_PR_SET_PDEATHSIG,))),
        rule(_FCNTL, *among(second, _SIGNAL_FCNTLS)),
        rule(_IOCTL, *among(second, _SIGNAL_IOCTLS)),
        instruction(give, allow),
    ])  # fmt: skip


def landlock_version() -> int:
    """Of the kernel's Landlock; 0 where it has none."""
    return max(0, ctypes.CDLL(None, use_errno=True).syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint(1)))


def _restrict_files(readable: list[str], folder: str) -> None:
    """From now on only `readable` can be read, and files made in `folder`. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    handled = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF}.get(landlock_version(), 0xFFFF)
    execute, write_file, read_file, read_folder = 1, 2, 4, 8
    remove_file, make_file, truncate = 1 << 5, 1 << 8, 1 << 14
    attribute = struct.pack("Q", handled)
    ruleset = _checked(libc.syscall(444, attribute, ctypes.c_size_t(len(attribute)), ctypes.c_uint(0)))
    rights = dict.fromkeys(readable, execute | read_file | read_folder)
    rights[folder] = write_file | read_file | read_folder | remove_file | make_file | truncate
    rights["/dev/null"] = read_file | write_file
    for path, allowed in rights.items():
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if not os.path.isdir(path):
            allowed &= execute | write_file | read_file
        beneath = struct.pack("=Qi", allowed & handled, opened)
        _checked(libc.syscall(445, ctypes.c_int(ruleset), ctypes.c_int(1), beneath, ctypes.c_uint(0)))
        os.close(opened)
    _checked(libc.syscall(446, ctypes.c_int(ruleset), ctypes.c_uint(0)))
    os.close(ruleset)


def _confine(request: dict[str, Any], parent: int) -> None:
    """Gives up for good, in this process, what a program does not need. Raises `OSError`."""
    for name, amount in (
        ("AS", request["memory_bytes"]),
        ("CPU", request["cpu_s"]),
        ("FSIZE", request["file_bytes"]),
        ("NOFILE", 64),
        ("CORE", 0),
    ):
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
        # one second later than the signal for CPU time comes the one that cannot be ignored
        resource.setrlimit(kind, (amount, amount + 1 if name == "CPU" and amount != hard else amount))
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked(libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)))
    if request["landlock"]:
        _restrict_files(request["readable"], request["folder"])
    _checked(libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))
    _checked(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != parent:
        os._exit(1)
    code = seccomp_filter(os.uname().machine)
    program = struct.pack("HP", len(code) // 8, ctypes.addressof(held := ctypes.create_string_buffer(code)))
    _checked(libc.prctl(_PR_SET_SECCOMP, 2, program, 0, 0))
    del held


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


# --- jobs, each in its own process --------------------------------------------------------------------------------


def _module(name: str) -> dict[str, Any]:
    """The namespace of a fresh module under this name."""
    module = sys.modules[name] = types.ModuleType(name)
    module.__dict__["__builtins__"] = builtins
    return module.__dict__


def _execute(program: str, name: str) -> dict[str, Any]:
    namespace = _module(name)
    exec(compile(program, "program.py", "exec"), namespace)
    return namespace


def _script(request: dict[str, Any], job: dict[str, Any]) -> None:
    """Runs the program as `python program.py` would."""
    _execute(request["program"], "__main__")


def _call(request: dict[str, Any], job: dict[str, Any]) -> None:
    """Calls one function, of the module or of its class `Solution`, and reports what it gives."""
    namespace = _execute(request["program"], "program")
    if (function := namespace.get(job["name"])) is None:
        function = getattr(namespace["Solution"](), job["name"])
    value = function(*decode(job["arguments"]))
    try:
        report = {"value": encode(value)}
    except (NotPlain, RecursionError) as error:
        report = {"not_plain": str(error)}
    _write(PROGRAM_CHANNEL, json.dumps(report).encode())


def _serve(request: dict[str, Any], job: dict[str, Any]) -> None:
    """Answers what the tests ask about the program, until they end."""
    link = socket.socket(fileno=_LINK)
    namespace = _execute(request["program"], "program")
    while (question := _receive(link)) is not None:
        _send(link, _answer(namespace, *question))


def _answer(namespace: dict[str, Any], expression: str, arguments: Any) -> list[Any]:
    """`expression` is of the dataset's making. Without arguments: what it stands for."""
    try:
        value = eval(expression, namespace)
        if arguments is None and callable(value):
            return ["callable"]
        if arguments is not None:
            positional, named = decode(arguments)
            value = value(*positional, **named)
    except Exception as error:
        return ["raised", [type_.__name__ for type_ in type(error).__mro__], str(error)]
    try:
        return ["value", encode(value)]
    except (NotPlain, RecursionError) as error:
        return ["not_plain", str(error)]


class _Fault(BaseException):
    """The program's side cannot go on with this case; tests do not catch it by accident."""


class _Program:
    """The tests' view of a program that runs elsewhere."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self.fault: str | None = None
        """Why the case cannot pass whatever the tests make of it."""
        self.raised: BaseException | None = None
        """The exception that came last from the program."""
        self.bad: str | None = None
        """What the tests asked for that cannot be done."""

    def ask(self, expression: str, arguments: Any) -> tuple[str, Any]:
        if self.fault == "gone":
            raise _Fault
        try:
            _send(self._link, [expression, arguments])
            reply = _receive(self._link)
        except OSError:
            reply = None
        match reply:
            case ["callable"]:
                return "callable", None
            case ["value", data]:
                try:
                    return "value", decode(data)
                except (ValueError, RecursionError):
                    pass
            case ["raised", [*names], message]:
                self.raised = _exception(names, str(message))
                raise self.raised
            case ["not_plain", _]:
                self.fault = "not_plain"
                raise _Fault
        self.fault = "gone"
        raise _Fault

    def function(self, expression: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            try:
                data = encode((arguments, named))
            except NotPlain as error:
                self.bad = f"the tests pass the program a {error}, which is not plain data"
                raise _Fault from None
            return self.ask(expression, data)[1]

        call.__name__ = call.__qualname__ = expression
        return call


def _exception(names: list[Any], message: str) -> Exception:
    """A builtin exception of the first of these types that is one."""
    for name in names:
        kind = vars(builtins).get(name) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(message)
            except TypeError:  # UnicodeError and its kind take more
                continue
    return Exception(message)


def _test(request: dict[str, Any], job: dict[str, Any]) -> None:
    """Runs the tests one statement after the other, and reports a line for each that is a case: its outcome, or
    what is wrong with the tests, which ends them."""
    link = socket.socket(fileno=_LINK)
    os.set_inheritable(_LINK, False)
    program = _Program(link)
    namespace = _module("tests")
    with contextlib.suppress(Exception):  # what the tests need of it and do not find is reported as missing
        exec(compile(request["program"], "prompt.py", "exec"), namespace)
    for name, expression in job["names"].items():
        namespace[name] = program.function(expression)
        try:
            kind, value = program.ask(expression, None)
        except (Exception, _Fault):
            continue  # again when it is called, where it counts
        if kind == "value":
            namespace[name] = value
    for source, is_case in job["statements"]:
        outcome = _outcome(program, compile(source, "tests.py", "exec"), namespace)
        if program.bad is not None:
            _report({"bad": program.bad})
            return
        if is_case or outcome != "correct":
            _report({"case": outcome})
        if not is_case and outcome != "correct":
            return


def _outcome(program: _Program, code: types.CodeType, namespace: dict[str, Any]) -> str:
    program.raised = None
    if program.fault != "gone":
        program.fault = None
    failure: str | None = None
    try:
        exec(code, namespace)
    except AssertionError as error:
        failure = "exception" if error is program.raised else "wrong"
    except (NameError, ImportError) as error:
        if program.raised is None and program.fault is None:
            program.bad = f"the tests raise {type(error).__name__}: {error}"
        failure = "exception"
    except Exception as error:
        failure = "exception" if error is program.raised else "wrong"
    except _Fault:
        failure = "exception"
    return program.fault or failure or "correct"


def _report(line: dict[str, Any]) -> None:
    _write(PROGRAM_CHANNEL, json.dumps(line).encode() + b"\n")


def _send(link: socket.socket, message: Any) -> None:
    payload = json.dumps(message).encode()
    link.sendall(_LENGTH.pack(len(payload)) + payload)


def _receive(link: socket.socket) -> Any:
    """The next message; None at the end, and for a message that is too long or none."""
    try:
        if (length := _LENGTH.unpack(_take(link, _LENGTH.size))[0]) > _MAX_FRAME:
            return None
        return json.loads(_take(link, length))
    except (EOFError, ValueError, RecursionError):
        return None


def _take(link: socket.socket, size: int) -> bytes:
    taken = bytearray()
    while len(taken) < size:
        if not (received := link.recv(min(size - len(taken), 2**16))):
            raise EOFError
        taken += received
    return bytes(taken)


_JOBS = {"script": _script, "call": _call, "serve": _serve, "test": _test}


# --- the process that forks them ------------------------------------------------------------------------------------


def main() -> Callable[[], None] | None:
    """Runs all jobs of the request. Returns in the process of a job too, there with what it has to do."""
    channel = int(sys.argv[1])
    link = int(sys.argv[2]) if len(sys.argv) > 2 else None
    request = json.loads(sys.stdin.buffer.read())
    if request["parent"] is not None:
        _end_with(request["parent"])
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    os.environ.clear()
    sys.argv[:] = ["program.py"]
    builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D")
    builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D")
    for name, content in request["files"].items():
        with open(name, "wb") as file:
            file.write(content.encode("latin-1"))
    if time.monotonic() >= request["deadline"]:
        return None  # it is not for the programs that there was no time
    _write(channel, b"ready\n")
    gc.freeze()  # what is here already is then not gone through at the end of every job: 3 ms each
    for job in request["jobs"]:
        outcome = _run(request, job, link)
        if not isinstance(outcome, tuple):
            return outcome
        header, payload = outcome
        _write(channel, json.dumps(header).encode() + b"\n" + payload)
        if header["ended"] in ("wall", "failed"):
            break
    return None


def _run(
    request: dict[str, Any], job: dict[str, Any], link: int | None
) -> Callable[[], None] | tuple[dict[str, Any], bytes]:
    """In the new process: what it has to do. In this one: how it ended, and what it wrote."""
    started = time.monotonic()
    given = os.memfd_create("stdin")
    _write(given, job["stdin"].encode("latin-1"))
    os.lseek(given, 0, os.SEEK_SET)
    pipes = [os.pipe() for _ in range(4)]
    theirs = [given, *(write for _, write in pipes)]
    if link is not None:
        theirs.append(link)  # theirs alone, so that its other end sees when it closes
    driver = os.getpid()
    pid = os.fork()
    if pid == 0:
        _arrange(theirs)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            _confine(request, driver)
        except BaseException as error:
            _write(_CONFIRM, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        _write(_CONFIRM, b".")
        os.close(_CONFIRM)
        return lambda: _JOBS[job["kind"]](request, job)
    _Driver.child = pid
    for descriptor in theirs:
        os.close(descriptor)
    *readers, confirm = [read for read, _ in pipes]
    if (confirmed := os.read(confirm, 1000)) != b".":
        return {"ended": "failed", "status": 0, "seconds": 0.0, "lengths": [len(confirmed)]}, confirmed
    os.close(confirm)
    outputs, ended = _collect(readers, job["limits"], request["deadline"])
    if ended is not None:
        os.kill(pid, signal.SIGKILL)
    status, used = _reap(pid, request["deadline"])
    _Driver.child = None
    if ended is None:
        ended = (
            "wall" if status is None else _ending(status, used.ru_utime + used.ru_stime >= request["cpu_s"])
        )
    header = {
        "ended": ended,
        "status": 0 if status is None else os.waitstatus_to_exitcode(status),
        "seconds": time.monotonic() - started,
        "lengths": [len(output) for output in outputs],
    }
    return header, b"".join(outputs)


def _ending(status: int, cpu_spent: bool) -> str:
    if os.WIFEXITED(status):
        return "memory" if os.WEXITSTATUS(status) == EXIT_MEMORY else "exit"
    if os.WTERMSIG(status) == signal.SIGXCPU or cpu_spent:
        return "cpu"
    return "signal"


def _collect(readers: list[int], limits: list[int], deadline: float) -> tuple[list[bytearray], str | None]:
    """What the job writes to stdout, stderr and its channel, until it closes them. What passes the limit of stderr
    is dropped, and that of another ends the job."""
    outputs = [bytearray() for _ in readers]
    waiting = select.poll()
    for reader in readers:
        waiting.register(reader, select.POLLIN)
    still = set(readers)
    ended: str | None = None
    while still and ended is None:
        if (left := deadline - time.monotonic()) <= 0:
            ended = "wall"
            break
        for reader, _ in waiting.poll(left * 1000):
            which = readers.index(reader)
            if not (data := os.read(reader, 2**16)):
                waiting.unregister(reader)
                still.discard(reader)
                continue
            room = limits[which] - len(outputs[which])
            outputs[which] += data[:room]
            if len(data) > room and which != 1:
                ended = "output"
    for reader in readers:
        os.close(reader)
    return outputs, ended


def _reap(pid: int, deadline: float) -> tuple[int | None, resource.struct_rusage]:
    """The exit status, None when the job had to be killed for the time."""
    while True:
        done, status, used = os.wait4(pid, os.WNOHANG)
        if done:
            return status, used
        if time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
            return None, os.wait4(pid, 0)[2]
        time.sleep(0.001)


def _arrange(descriptors: list[int]) -> None:
    """Makes these the descriptors 0, 1, … and closes all others."""
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 100) for descriptor in descriptors]
    for number, descriptor in enumerate(above):
        os.dup2(descriptor, number)
    os.closerange(len(above), max(above) + 1)
    sys.stdin = sys.__stdin__ = _text(0, "r")
    sys.stdout = sys.__stdout__ = _text(1, "w")
    sys.stderr = sys.__stderr__ = _text(2, "w")


def _text(descriptor: int, mode: str) -> IO[str]:
    return os.fdopen(descriptor, mode, encoding="utf-8", errors="surrogateescape", closefd=False)


class _Driver:
    """What the handler of the parent's death has to know."""

    child: int | None = None


def _end_with(parent: int) -> None:
    """Without namespaces: when the parent dies, end the job, remove the folder, and end."""
    folder = os.getcwd()

    def end(*_: object) -> None:
        if _Driver.child is not None:
            os.kill(_Driver.child, signal.SIGKILL)
            os.waitpid(_Driver.child, 0)
        remove_folder(folder)
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        end()


def remove_folder(folder: str) -> None:
    """Removes a program's folder; it cannot have made folders in it."""
    for name in os.listdir(folder):
        os.unlink(os.path.join(folder, name))
    os.rmdir(folder)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _show(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """The traceback of a program's exception without this file's frames."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    if (_todo := main()) is not None:
        sys.excepthook = _show
        try:
            _todo()
        except MemoryError:
            os._exit(EXIT_MEMORY)
