"""Hostile programs neither harm the system nor pass. Each runs under every set of layers that must suffice alone.

"all" is what users get; "bubblewrap alone" leaves out the system-call filter, so that forks and sockets are actually
created; "user namespace" is what an ordinary user gets, where the tests run as root.
"""

import os
import secrets
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
from waiting import awaited

from sinklens.evaluation import run_program, sandbox
from sinklens.evaluation.sandbox import Limits

TIGHT = Limits(seconds=5, memory_mb=128, processes=8, output_kb=16)
SHORT = Limits(seconds=0.7, memory_mb=96, processes=8)  # for programs that never end
TEST = (
    "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(5) == 6\n    assert not candidate(-1)\n"
)
ALLOW_ALL = struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000)  # a filter that returns SECCOMP_RET_ALLOW
LAYERS = ("all", "bubblewrap alone", "user namespace")
pytestmark = pytest.mark.usefixtures("isolation")


@pytest.fixture(params=LAYERS)
def layers(request, monkeypatch):
    if request.param == "bubblewrap alone":
        monkeypatch.setattr(sandbox, "compiled_filter", lambda: ALLOW_ALL)
    if request.param == "user namespace":
        if not sandbox.is_real_root():
            pytest.skip("'all' is the same for an ordinary user")
        monkeypatch.setattr(sandbox, "is_real_root", lambda: False)
    return request.param


def hostile(source, limits=TIGHT, test=TEST):
    """Outcome of a program; source without a function ``f`` runs inside one that then returns the right value."""
    body = textwrap.dedent(source)
    if "def f(" not in body:
        body = "def f(x):\n" + textwrap.indent(body, "    ") + "\n    return x + 1\n"
    started = time.monotonic()
    outcome = run_program(body, test, "f", limits=limits)
    assert time.monotonic() - started < limits.seconds + 15  # whatever it does, it is over soon
    return outcome


def test_an_honest_program_passes(layers):
    assert hostile("pass").passed


# Using up the machine


@pytest.mark.parametrize(
    "source",
    ["while True: pass", "import time; time.sleep(60)", "import re\nre.match('(a+)+$', 'a' * 40 + 'b')"],
    ids=["busy", "asleep", "in one call"],
)
def test_an_endless_program_times_out(layers, source):
    assert hostile(source, SHORT).status == "timeout"


def test_a_fork_bomb_ends_with_its_sandbox(layers):
    source = """
        import os
        count = 0
        def f(x):
            while True:
                try:
                    os.fork()
                except OSError:
                    pass
    """
    assert hostile(source, SHORT).status == "timeout"


@pytest.mark.parametrize("layers", LAYERS[:2], indirect=True)  # without an id of its own, the kernel exempts root
def test_endless_threads_reach_a_limit(layers):
    source = """
        import threading, time
        try:
            for count in range(1000):
                threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
        except RuntimeError as error:
            print(count, error)
    """
    outcome = hostile(source)
    assert 1 <= int(outcome.printed.split()[0]) < 32
    assert "can't start new thread" in outcome.printed


@pytest.mark.parametrize(
    ("source", "statuses"),
    [
        ("kept = []\nwhile True: kept.append(bytearray(10**6))", {"memory", "timeout"}),
        ("x = 10 ** 10 ** 9", {"memory", "timeout"}),
        ("import mmap\nkept = []\nwhile True: kept.append(mmap.mmap(-1, 10**7))", {"failed"}),
        ("import sys\nsys.setrecursionlimit(10**9)\ndef g(): return g()\ng()", {"memory", "killed", "timeout"}),
    ],
    ids=["list", "number", "map", "stack"],
)
def test_filling_memory_ends_at_the_limit(layers, source, statuses):
    assert hostile(source, SHORT).status in statuses


@pytest.mark.parametrize("layers", ["all", "user namespace"], indirect=True)
def test_uncounted_memory_new_processes_namespaces_and_sockets_are_refused(layers):
    source = """
        import ctypes, errno, os, threading
        libc = ctypes.CDLL(None, use_errno=True)
        for name, arguments in {
            "memfd_create": (b"x", 0), "shmget": (0, 2**20, 0o1600), "msgget": (0, 0o1600), "semget": (0, 1, 0o1600),
            "unshare": (0x10000000,), "setns": (0, 0), "ptrace": (16, 1, 0, 0), "socket": (2, 1, 0), "fork": (),
        }.items():
            print(name, getattr(libc, name)(*arguments), errno.errorcode[ctypes.get_errno()])
        thread = threading.Thread(target=print, args=("in a thread",))
        thread.start()
        thread.join()
    """
    lines = hostile(source).printed.splitlines()[:10]  # of the first call
    assert {line.split()[1] for line in lines[:-1]} == {"-1"}
    assert [line.split()[2] for line in lines[:-1]] == ["EPERM"] * 8 + ["EAGAIN"]
    assert lines[-1] == "in a thread"


def test_the_program_has_no_capabilities(layers):
    source = """
        import ctypes, os
        held = ctypes.create_string_buffer(24)
        assert ctypes.CDLL(None).capget(bytes.fromhex("2205082000000000"), held) == 0
        effective, permitted = (held.raw[start : start + 4] + held.raw[start + 12 : start + 16] for start in (0, 4))
        print(any(effective), any(permitted), 0 in os.getresuid() + os.getresgid())
    """
    assert hostile(source).printed.splitlines() == ["False False False"] * 3


@pytest.mark.parametrize("stream", [1, 2], ids=["output", "error output"])
def test_printing_gigabytes_ends_at_the_limit(layers, stream):
    outcome = hostile(f"import os\nwhile True: os.write({stream}, b'x' * 65536)")
    assert (outcome.status, len(outcome.printed), hostile("print('x' * 2**20)").status) == (
        "output",
        TIGHT.output_kb * 1024,
        "output",
    )


# Reading and reaching


def test_the_systems_files_are_inaccessible(layers, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    paths = [secret, Path.home(), Path(__file__), "/etc/passwd", "/etc/shadow", "/proc/self/environ", "/proc/1/cmdline"]
    source = f"""
        import os
        for path in {[str(path) for path in paths]!r}:
            try:
                print("SEEN", path, os.listdir(path) if os.path.isdir(path) else open(path).read())
            except OSError as error:
                print(type(error).__name__, path)
    """
    out = hostile(source).printed
    assert "the secret" not in out
    seen = [line.split()[1] for line in out.splitlines() if line.startswith("SEEN")]
    # a home that contains Python's library shows the path to it, and no other file
    assert [path for path in seen if path != str(Path.home())] == []
    assert "['.ssh" not in out


def test_no_file_is_written(layers, tmp_path):
    os.chmod(tmp_path, 0o777)
    marker = secrets.token_hex(8)
    places = [tmp_path, Path.home(), "/tmp", "/dev/shm", "/dev", "/var/tmp", Path(os.__file__).parent, "/", "."]
    source = f"""
        import os
        for place in {[str(place) for place in places]!r}:
            try:
                open(os.path.join(place, "{marker}"), "w").write("x")
                print("WRITTEN", place)
            except OSError as error:
                print(type(error).__name__)
    """
    outcome = hostile(source)
    assert (outcome.status, "WRITTEN" in outcome.printed) == ("passed", False)
    assert len(outcome.printed.splitlines()) == 3 * len(places)  # one line a call
    assert not [place for place in places if (Path(place) / marker).exists()]


def test_the_environment_contains_no_secret(layers, monkeypatch):
    monkeypatch.setenv("SINKLENS_TEST_TOKEN", "the secret")
    outcome = hostile("import os\nprint(dict(os.environ), open('/proc/self/environ').read())")
    assert "the secret" not in outcome.printed
    outcome = hostile("import os\nprint(sorted(os.environ))")
    assert "SINKLENS_TEST_TOKEN" not in outcome.printed
    assert "HOME" not in outcome.printed


def test_a_listener_on_this_machine_gets_no_connection(layers, tmp_path):
    path = str(tmp_path / "listener")
    with socket.create_server(("127.0.0.1", 0)) as inet, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(path)
        unix.listen()
        abstract = socket.socket(socket.AF_UNIX)
        name = f"\0sinklens-{secrets.token_hex(8)}"
        abstract.bind(name)
        abstract.listen()
        source = f"""
            import socket
            for kind, place in ((socket.AF_INET, {inet.getsockname()!r}), (socket.AF_UNIX, {path!r}),
                                (socket.AF_UNIX, {name!r})):
                try:
                    socket.socket(kind).connect(place)
                    print("CONNECTED", kind)
                except OSError as error:
                    print(type(error).__name__, error.errno)
        """
        outcome = hostile(source)
        assert len(outcome.printed.splitlines()) >= 3
        assert "CONNECTED" not in outcome.printed
        for listener in (inet, unix, abstract):
            listener.settimeout(0.1)
            with pytest.raises(TimeoutError, match="timed out"):
                listener.accept()
        abstract.close()


def test_parent_and_sibling_processes_cannot_be_killed(layers):
    neighbour = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        source = f"""
            import os, signal
            for target in (os.getppid(), {os.getpid()}, {neighbour.pid}, {os.getppid()}, 1, 0, -1, -os.getpgid(0)):
                for number in (signal.SIGTERM, signal.SIGKILL):
                    try:
                        os.kill(target, number)
                    except OSError:
                        pass
        """
        assert hostile(source).status == "killed"  # it killed its own group
        assert neighbour.poll() is None
    finally:
        neighbour.kill()
        neighbour.wait()


def is_alive(name):
    """Whether a process has this name."""
    return name in {process.info["name"] for process in psutil.process_iter(["name"])}


@pytest.mark.parametrize("layers", ["bubblewrap alone"], indirect=True)  # else it cannot be made in the first place
def test_a_daemon_does_not_survive_its_program(layers):
    name = f"d{secrets.token_hex(5)}"
    source = f"""
        import ctypes, os, signal, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                ctypes.CDLL(None).prctl(15, b"{name}", 0, 0, 0)
                time.sleep(120)
            os._exit(0)
        time.sleep(3)
    """
    outcomes = []
    runner = threading.Thread(target=lambda: outcomes.append(hostile(source, Limits(seconds=20))))
    runner.start()
    awaited(lambda: is_alive(name), lambda: "no daemon")  # it lives while the program runs
    runner.join()
    assert outcomes[0].passed  # its answers were right
    awaited(lambda: not is_alive(name), lambda: "the daemon is alive")


# Cheating the tests


REPLY = """
    import os, struct
    body = {body}
    for number in range(3, 1024):
        try:
            os.write(number, (struct.pack(">I", len(body)) + body) * 5)
        except OSError:
            pass
"""
CODE = b'["value", {"exec": "import __main__; __main__.StandIn.answer = lambda *_: 2"}]'
FORGERIES = {
    "leaves with 0 at once": "import os\nos._exit(0)\ndef f(x): pass",
    "leaves with 0 when called": "import os\nos._exit(0)",
    "raises SystemExit": "import sys\nsys.exit(0)\ndef f(x): pass",
    "raises SystemExit when called": "import sys\nsys.exit(0)",
    "leaves from a thread": """
        import os, threading
        threading.Timer(0.05, os._exit, (0,)).start()
        import time; time.sleep(1)
    """,
    "equals everything": """
        class Same:
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            def __bool__(self): return True
        def f(x): return Same()
    """,
    "a number that equals everything": """
        class Same(int):
            def __eq__(self, other): return True
            __hash__ = int.__hash__
            def __bool__(self): return False
            def __class__(self): return int
        def f(x): return Same(0)
    """,
    "replaces builtins": """
        import builtins, sys
        builtins.AssertionError = type("AssertionError", (Exception,), {})
        builtins.bool = builtins.len = builtins.abs = builtins.isinstance = lambda *_: True
        def f(x): return None
    """,
    "replaces modules": """
        import sys, types
        for name in list(sys.modules):
            sys.modules[name] = types.ModuleType(name)
        sys.modules["tests"] = sys.modules["__main__"] = types.ModuleType("tests")
        def f(x): return 2
    """,
    "replaces the checker in every namespace": """
        import gc, sys
        for thing in gc.get_objects():
            if isinstance(thing, dict) and any(name in thing for name in ("check", "checker", "report")):
                for name in ("check", "checker", "report"):
                    thing[name] = lambda *_, **__: None
        def check(candidate): pass
        def f(x): return None
    """,
    "patches the roles": """
        import sys
        roles = sys.modules["__main__"]
        roles.encode = lambda *_: b"null"
        roles.StandIn.__call__ = lambda *_: 2
        roles.checker = lambda *_: ("passed", "")
        def f(x): return 2
    """,
    "swallows errors by hooks": """
        import atexit, os, sys, threading
        sys.excepthook = threading.excepthook = sys.unraisablehook = lambda *_: os._exit(0)
        atexit.register(lambda: os._exit(0))
        def f(x): raise AssertionError
    """,
    "traces frames": """
        import sys
        def trace(frame, event, argument):
            frame.f_globals["check"] = lambda candidate: None
            return trace
        sys.settrace(trace)
        def f(x):
            frame = sys._getframe()
            while frame:
                frame.f_locals.clear()
                frame = frame.f_back
            return 2
    """,
    "prints the marker": """
        def f(x):
            for line in ("passed", '["passed", ""]', '{"verdict": "passed"}', "OK", "1 passed"):
                print(line, flush=True)
            return 2
    """,
    "writes the marker to every pipe": """
        import os
        for number in range(3, 1024):
            try:
                os.write(number, b'["passed", ""]')
            except OSError:
                pass
    """,
    "answers ahead": REPLY.format(body=b'["value", {"int": "0x2"}]') + "    def f(x): return 2\n",
    "answers no value": """
        import os, struct
        for number in range(3, 1024):
            try:
                os.write(number, struct.pack(">I", 2**32 - 1) + b"x" * 100)
            except OSError:
                pass
        def f(x): return 2
    """,
    "answers with code": REPLY.format(body=CODE) + "    def f(x): return 2\n",
    "answers with a changed class": (
        REPLY.format(body=b'["value", {"set": [], "__eq__": {"set": []}}]') + "    def f(x): return 2\n"
    ),
    "closes every pipe": "import os\nos.closerange(0, 1024)\ndef f(x): return 2",
    "kills itself": "import os\nos.kill(os.getpid(), 9)",
    "crashes": "import ctypes\nctypes.string_at(0)",
    "waits for the tests to give up": "import time\ntime.sleep(30)\ndef f(x): return 2",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "loads what is not there": "import ctypes\nctypes.CDLL('libsinklens.so')",
    "becomes another program": "import os\nos.execv('/bin/true', ['true'])",
    "ptraces": """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        for target in range(1, 5):
            libc.ptrace(16, target, 0, 0)
        libc.ptrace(16, os.getppid(), 0, 0)
        def f(x): return 2
    """,
}


@pytest.mark.parametrize("layers", LAYERS[1:], indirect=True)  # "all" can do less than either
@pytest.mark.parametrize("name", list(FORGERIES))
def test_a_forgery_never_passes(layers, name):
    outcome = hostile(FORGERIES[name], SHORT)
    assert not outcome.passed
    assert outcome.status in ("failed", "exited", "killed", "timeout")


def test_a_test_that_catches_everything_does_not_pass_a_program_that_has_ended(layers):
    test = textwrap.dedent("""
        def check(candidate):
            for value in range(3):
                try:
                    candidate(value)
                except:
                    pass
    """)
    assert hostile("import os\nos._exit(0)", test=test).status == "exited"
    assert hostile("raise ValueError", test=test).passed  # as that test has it


def test_the_programs_process_does_not_contain_the_tests(layers):
    answer = secrets.token_hex(16)
    source = """
        import ctypes, gc, os, sys
        def look():
            for thing in gc.get_objects():
                try:
                    text = repr(thing)
                except BaseException:
                    continue
                if "REVERSED"[::-1] in text:
                    return True
        def f(x): return look()
    """.replace("REVERSED", answer[::-1])
    test = f"def check(candidate):\n    secret = '{answer}'\n    assert candidate(1) is True\n"
    outcome = hostile(source, Limits(seconds=20, memory_mb=256), test=test)
    assert outcome.status == "failed"
    assert "candidate(1) is True" in outcome.detail
