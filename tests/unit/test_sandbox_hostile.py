"""Programs that mean harm, eight at once; after each the pool still answers, and nothing of them is left.

Cases S01-S04 and S10 of the bug log; each attack runs in all eight workers at the same time.
"""

import os
import resource
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from common.sandbox import Limits, Program, Result, Sandbox, isolation

EIGHT = 8
LIMITS = Limits(wall_s=30.0, cpu_s=1.0, memory_mb=128, processes=24, file_size_mb=4, folder_mb=8, files=512, output_bytes=8192)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def others() -> set[int]:
    """Processes that earlier tests left to this one."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.fixture(scope="module")
def box(others: set[int]) -> Iterator[Sandbox]:
    if not isolation().strong:
        pytest.skip(f"this machine has no namespaces for programs: {isolation().why}")
    with Sandbox(LIMITS, workers=EIGHT) as found:
        yield found


@pytest.fixture(autouse=True)
def still_answers(box: Sandbox, others: set[int]) -> Iterator[None]:
    """After each attack: all workers answer, and no process is there but theirs."""
    names = set(os.listdir("/tmp"))
    yield
    results = box.run(
        [Program("import os, sys\nprint(6 * 7, os.listdir(), os.listdir('/tmp'), os.listdir('/dev/shm'))")] * EIGHT
    )
    assert [(result.status, result.stdout) for result in results] == [("ok", "42 [] [] []\n")] * EIGHT
    children = [child for child in psutil.Process().children(recursive=True) if child.pid not in others]
    assert len(children) == 2 * EIGHT and all(child.status() != psutil.STATUS_ZOMBIE for child in children)
    assert {name for name in set(os.listdir("/tmp")) - names if "sandbox" in name} == set()


def eight(box: Sandbox, source: str, **more: float) -> list[Result]:
    """Results of the same program in all workers at once."""
    return box.run([Program(textwrap.dedent(source), **more) for _ in range(EIGHT)])  # type: ignore[arg-type]


def lines(box: Sandbox, source: str) -> list[str]:
    """What a program printed, the same in all eight; it must have come to its end."""
    results = eight(box, source)
    assert [(result.status, result.stderr) for result in results] == [("ok", "")] * EIGHT
    assert len({result.stdout for result in results}) == 1
    return results[0].stdout.splitlines()


def test_fork_bomb(box: Sandbox) -> None:
    """S02: never more processes than allowed, whatever they do to each other; the limit is named."""
    count = """
        import os, time
        made = 0
        while True:
            try:
                if os.fork() == 0:
                    time.sleep(60)
            except OSError:
                print(made)
                raise
            made += 1
    """
    results = eight(box, count)
    assert {(result.status, result.stdout, result.reason) for result in results} == {
        ("processes", f"{LIMITS.processes - 1}\n", f"limit of {LIMITS.processes} processes")
    }
    for source in ("import os\nwhile True: os.fork()", "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"):
        assert {result.status for result in eight(box, source, cpu_s=0.3)} <= {"processes", "timeout", "memory"}
    with box.episode() as episode:
        assert not episode.shell(":(){ :|:& };: ; sleep 1; kill $$", wall_s=2.0).ok
    threads = (
        "import threading, time\nfor _ in range(500): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )
    assert {result.status for result in eight(box, threads)} <= {"processes", "memory"}


def test_memory_bomb(box: Sandbox) -> None:
    """S03: told apart from a timeout; one process or many together; the suite's own memory stays flat."""
    before = psutil.Process().memory_info().rss
    for source in (
        "x = 'a' * 4 * 10**9",
        "held = []\nwhile True: held.append(bytearray(10**6))",
        "import mmap\nheld = []\nfor _ in range(100):\n    held.append(mmap.mmap(-1, 2**22)); held[-1].write(b'x' * 2**22)",
    ):
        results = eight(box, source)
        assert {result.status for result in results} <= {"memory", "error"}, results
        assert {result.reason for result in results if result.status == "memory"} <= {"memory limit of 128 MiB"}
    assert "memory" in {result.status for result in eight(box, "x = 'a' * 4 * 10**9")}
    together = "import os, time\nfor _ in range(7):\n    if os.fork() == 0: break\n"
    together += "held = bytearray(b'x' * (40 * 2**20))\ntime.sleep(60)"
    assert {result.status for result in eight(box, together)} == {"memory"}
    assert psutil.Process().memory_info().rss - before < 50 * 2**20


def test_endless_output(box: Sandbox) -> None:
    """S04: head and tail are kept, the program is ended, on both streams; memory stays flat."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for stream in ("stdout", "stderr"):
        for result in eight(box, f"import sys\nwhile True: sys.{stream}.write('x' * 1000 + chr(10))"):
            text = getattr(result, stream)
            assert result.status == "output" and getattr(result, f"{stream}_cut") and "bytes dropped" in text
            assert len(text) < LIMITS.output_bytes + 100
    both = "import os\nwhile True:\n    os.write(1, b'x' * 10**5)\n    os.write(2, b'y' * 10**5)"
    assert {result.status for result in eight(box, both)} == {"output"}
    ends = eight(box, "print('first')\nfor _ in range(2000): print('x' * 10)\nprint('last')")
    assert {(r.status, r.stdout_cut, r.stdout[:6], r.stdout[-5:]) for r in ends} == {("ok", True, "first\n", "last\n")}
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 50 * 2**20


def test_sleeping_grandchildren(box: Sandbox) -> None:
    """S01: double fork, own session, deaf to SIGTERM, holding the streams open: gone when the program ends or is ended."""
    source = """
        import os, signal, sys, time
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            if os.fork() == 0:
                os.setsid()
            time.sleep(300)
        print("parent", flush=True)
    """
    for result in eight(box, source):
        assert (result.status, result.stdout) == ("ok", "parent\n") and result.wall_s < 15
    for result in eight(box, textwrap.dedent(source) + "time.sleep(300)", wall_s=0.5):
        assert (result.status, result.stdout) == ("timeout", "parent\n") and result.wall_s < 15
    with box.episode() as episode:
        for _ in range(20):
            started = time.monotonic()
            assert episode.shell("sleep 60 & (setsid sleep 60 &) ; nohup sleep 60 & echo done").stdout == "done\n"
            assert time.monotonic() - started < 10


def test_files_and_processes_of_the_suite(box: Sandbox, tmp_path: Path) -> None:
    """S10: no file of the suite, the home folder or the system's own, no process but the program's own."""
    secret = tmp_path / "secret"
    secret.write_text("canary")
    secret.chmod(0o644)
    targets = [secret, ROOT / "README.md", Path(__file__), Path.home() / ".bashrc", "/etc/shadow", "/etc/hostname"]
    targets += [f"/proc/{os.getpid()}/environ", f"/proc/{os.getpid()}/cwd", "/proc/1/environ", "/proc/1/cmdline", "/proc/1/mem"]
    targets += [
        "/proc/1/root",
        "/proc/kcore",
        "/proc/cmdline",
        "/proc/sys/kernel/hostname",
        "/sys",
        "/dev/vda",
        "/dev/kmsg",
        "/dev/tty",
    ]
    targets += ["/sandbox/../.." + str(secret), f"/proc/self/root{secret}", "/var", "/home", "/boot", "/run"]
    source = f"""
        import os
        for path in {[str(path) for path in targets]!r}:
            try:
                print("READ", path, os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(100))
            except OSError:
                pass
        print(sorted(name for name in os.listdir("/proc") if name.isdigit()) == [str(os.getpid())], os.getppid())
        top = set(os.listdir("/"))
        print(sorted(top - {{"bin", "dev", "etc", "lib", "lib32", "lib64", "proc", "sandbox", "tmp", "usr"}}))
        print(sorted(os.listdir("/dev")), os.listdir("/etc/skel") if os.path.exists("/etc/skel") else [])
        for folder in ("/", "/usr/bin", "/etc", "/dev", os.path.dirname(os.__file__)):
            try: open(folder + "/new", "w")
            except OSError as error: print(type(error).__name__)
    """
    shown = lines(box, source)
    prefix = Path(sys.base_prefix).parts[1]
    assert shown[0] == "True 1" and shown[1] in ("[]", f"['{prefix}']"), shown
    assert shown[2] == "['fd', 'null', 'random', 'shm', 'urandom', 'zero'] []"
    assert len(shown) == 8, shown


def test_environment(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """S10: an allow-list; nothing of the suite's environment, in child processes either."""
    monkeypatch.setenv("FOO_TOKEN", "canary")
    names = "import os, subprocess\nprint(*sorted(os.environ))\n"
    names += "print(b'canary' in subprocess.run(['env'], capture_output=True).stdout)"
    allowed = ["HOME", "LANG", "OMP_NUM_THREADS", "PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "TERM", "TMPDIR"]
    with Sandbox(LIMITS, workers=1) as fresh:
        shown = fresh.run([Program(names)])[0].stdout.splitlines()
    assert [name for name in shown[0].split() if name not in (*allowed, "LC_CTYPE")] == [] and shown[1] == "False"


def test_sockets(box: Sandbox) -> None:
    """S10: TCP, UDP and abstract Unix sockets of the machine are out of reach, at once; vsock and netlink cannot be made."""
    with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp, socket.socket(socket.AF_UNIX) as unix:
        for listener in (tcp, udp):
            listener.bind(("127.0.0.1", 0))
        name = f"\0sandbox-test-{os.getpid()}"
        unix.bind(name)
        for listener in (tcp, unix):
            listener.listen()
            listener.settimeout(0.05)
        udp.settimeout(0.05)
        source = f"""
            import socket, subprocess
            def attempt(family, kind, address):
                try:
                    with socket.socket(family, kind) as tried:
                        tried.settimeout(5)
                        tried.connect(address)
                        tried.send(b"hello")
                        print("SENT", address)
                except OSError as error:
                    print(type(error).__name__)
            for port in ({tcp.getsockname()[1]}, 80):
                attempt(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1" if port != 80 else "1.1.1.1", port))
            attempt(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", {udp.getsockname()[1]}))
            attempt(socket.AF_UNIX, socket.SOCK_STREAM, {name!r})
            for family in (16, 17, 38, 40):  # netlink, packet, kernel crypto, vsock
                attempt(family, socket.SOCK_DGRAM, (2, 1234))
            code = "import socket; socket.create_connection(('127.0.0.1', {tcp.getsockname()[1]}), 5)"
            print(subprocess.run(["python3", "-c", code], capture_output=True).returncode)
        """
        started = time.monotonic()
        shown = lines(box, source)
        assert time.monotonic() - started < 20
        assert len(shown) == 9 and not any("SENT" in line for line in shown) and shown[-1] == "1"
        for listener in (tcp, unix):
            with pytest.raises(TimeoutError):
                listener.accept()
        with pytest.raises(TimeoutError):
            udp.recv(10)


def test_signals(box: Sandbox) -> None:
    """The suite cannot be named; the worker, process 1, is deaf, also to a storm of them."""
    source = f"""
        import os, signal
        assert os.getppid() == 1
        for number in range(1, 65):
            if number != signal.SIGCHLD:
                os.kill(1, number)
        for pid in ({os.getpid()}, {os.getppid()}):
            try: os.kill(pid, 9)
            except ProcessLookupError: print("no such process")
        try: os.killpg(1, 9)
        except OSError as error: print("no such group")
        if os.fork() == 0:
            while True: os.kill(1, signal.SIGCHLD)
        print("here")
    """
    assert lines(box, source) == ["no such process", "no such process", "no such group", "here"]
    stopped = eight(box, "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", wall_s=0.3)
    assert {result.status for result in stopped} == {"timeout"}
    for source in ("os.kill(os.getpid(), 9)", "os.kill(-1, 15); os.kill(os.getpid(), 15)", "os.abort()"):
        assert {result.status for result in eight(box, f"import os\n{source}")} <= {"killed", "error"}
    storm = "import os, signal\nwhile True: os.kill(1, signal.SIGCHLD)"
    assert {result.status for result in eight(box, storm, cpu_s=0.3)} == {"timeout"}


def test_reaching_into_the_worker(box: Sandbox) -> None:
    """ptrace, memory, descriptors, limits, priority and namespaces of process 1, and new rights for oneself."""
    source = """
        import ctypes, os, platform, resource
        libc = ctypes.CDLL(None, use_errno=True)
        def refused(name, *values):
            if getattr(libc, name)(*values) >= 0: print("ALLOWED", name, values)
        refused("ptrace", 16, 1, 0, 0)
        refused("process_vm_readv", 1, 0, 0, 0, 0, 0)
        refused("unshare", 0x10000000)
        refused("unshare", 0x20000)
        refused("setns", 0, 0)
        refused("mount", b"none", b"/sandbox", b"tmpfs", 0, 0)
        refused("umount2", b"/proc", 2)
        refused("umount2", b"/sandbox", 2)
        refused("chroot", b".")
        refused("setuid", 0)
        refused("setpriority", 0, 1, 19)
        refused("setpriority", 2, 0, 19)
        refused("shmget", 0, 4096, 0o1600)
        refused("memfd_create", b"x", 0)
        refused("sethostname", b"x", 1)
        refused("keyctl", 0, 0) if hasattr(libc, "keyctl") else None
        for number in (438, 425, 435, 428, 442):  # pidfd_getfd, io_uring_setup, clone3, open_tree, mount_setattr
            refused("syscall", number, 0, 0, 0, 0, 0)
        if platform.machine() == "x86_64":
            refused("syscall", 0x40000000 + 39)
            refused("syscall", 56, 0x10000000 | 17, 0, 0, 0, 0)  # clone with a new user namespace
        for name, call in {
            "prlimit": lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0)),
            "affinity": lambda: os.sched_setaffinity(1, {0}),
            "scheduler": lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
            "more memory": lambda: resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40)),
            "more processes": lambda: resource.setrlimit(resource.RLIMIT_NPROC, (999, 999)),
            "descriptors": lambda: os.listdir("/proc/1/fd"),
            "memory": lambda: open("/proc/1/mem", "rb"),
            "score": lambda: os.write(os.open("/proc/self/oom_score_adj", os.O_WRONLY), b"-1000"),
            "own map": lambda: os.write(os.open("/proc/self/uid_map", os.O_WRONLY), b"0 0 1"),
        }.items():
            try:
                call()
            except (OSError, ValueError):
                continue
            print("ALLOWED", name)
        status = open("/proc/self/status").read()
        print([line.split()[1] for line in status.splitlines() if line.startswith(("CapEff", "CapPrm", "NoNew", "Seccomp:"))])
        print(os.getuid())
    """
    assert lines(box, source) == [f"['{'0' * 16}', '{'0' * 16}', '1', '2']", "1000"]


def test_nothing_of_earlier_programs_in_memory(box: Sandbox) -> None:
    """A program that searches its own memory finds neither source, input, output nor files of those before it."""
    parts = [f"{kind}-canary-{os.getpid()}" for kind in ("source", "stdin", "stdout", "file")]
    halves = [(part[: len(part) // 2], part[len(part) // 2 :]) for part in parts]
    first = f"x = {parts[0]!r}\nimport sys\nsys.stdin.read()\nprint({halves[2][0]!r} + {halves[2][1]!r})"
    results = box.run([Program(first, stdin=parts[1], files={"f": parts[3]}) for _ in range(4 * EIGHT)])
    assert {result.stdout for result in results} == {parts[2] + "\n"}
    search = textwrap.dedent(f"""
        pairs = {[(a.encode(), b.encode()) for a, b in halves]!r}
        found, size = [], 0
        with open("/proc/self/mem", "rb", 0) as memory:
            for line in open("/proc/self/maps"):
                span, rights = line.split()[:2]
                low, high = (int(part, 16) for part in span.split("-"))
                if "rw" not in rights or high - low > 2**26:
                    continue
                memory.seek(low)
                data = memory.read(high - low)
                size += len(data)
                for a, b in pairs:
                    at = -1
                    while (at := data.find(a, at + 1)) >= 0:
                        if data[at + len(a) : at + len(a) + len(b)] == b:
                            found.append(a)
        print(size > 10**6, sorted(set(found)))
    """)
    assert lines(box, search) == ["True []"]
    assert lines(box, f"kept = [{parts[0]!r}]\n{search}") == [f"True [{halves[0][0].encode()!r}]"]  # it finds what is there


def test_recursion_and_crashes(box: Sandbox) -> None:
    """Deep recursion ends in an error or a crash of the program's own process."""
    assert {result.status for result in eight(box, "def f(): return f()\nf()")} == {"error"}
    deep = (
        "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n    def __getattr__(self, name): return getattr(self, name)\nA().x"
    )
    assert {result.status for result in eight(box, deep)} <= {"killed", "memory", "timeout", "error"}
    assert {result.reason for result in eight(box, "import ctypes\nctypes.string_at(0)")} == {"signal 11"}
    nested = "x = " + "[" * 50_000 + "]" * 50_000
    assert {result.status for result in eight(box, nested)} <= {"error", "memory", "killed"}


def test_own_streams_and_other_descriptors(box: Sandbox) -> None:
    """Closing stdout and stderr, and writing to every other descriptor, changes no result."""
    write = 'import os\nfor d in range(3, 256):\n    try: os.write(d, b\'{"cause": "", "code": 0}\' + bytes([10]))\n'
    write += "    except OSError: pass"
    assert {result.status for result in eight(box, write + "\nraise SystemExit(3)")} == {"error"}
    closed = eight(box, "import os, sys, time\nsys.stdout.close()\nsys.stderr.close()\nos.closerange(0, 256)\ntime.sleep(0.1)")
    assert {(result.status, result.stdout) for result in closed} == {("ok", "")}
    assert {result.status for result in eight(box, "import os\nos.closerange(0, 256)\n1 / 0")} == {"error"}
    listing = (
        "import os\nprint([d for d in map(int, os.listdir('/proc/self/fd')) if d > 2 and os.path.exists(f'/proc/self/fd/{d}')])"
    )
    assert lines(box, listing) == ["[]"]


def test_filling_the_disk(box: Sandbox) -> None:
    """A huge file, many files, and the other two folders that can be written to."""
    huge = eight(box, "with open('x', 'wb') as file:\n    while True: file.write(b'x' * 2**16)")
    assert {(result.status, "4 MiB a file" in result.reason) for result in huge} == {("disk", True)}
    for folder in (".", "/tmp", "/dev/shm"):
        many = f"for number in range(10**5):\n    open('{folder}/' + str(number), 'w').close()"
        large = f"for number in range(10):\n    open('{folder}/' + str(number), 'wb').write(b'x' * 2**20)"
        assert {result.status for source in (many, large) for result in eight(box, source)} == {"disk"}
    sparse = "import os\nos.truncate(os.open('x', os.O_CREAT | os.O_RDWR), 2**40)"
    assert {result.status for result in eight(box, sparse)} == {"disk"}
    open_files = eight(box, "held = [open('/dev/null') for _ in range(1000)]")
    assert {(result.status, "Too many open files" in result.stderr) for result in open_files} == {("error", True)}
    folders = "import os\nwhile True:\n    os.mkdir('d'); os.chdir('d')"
    assert {result.status for result in eight(box, folders)} == {"disk"}


def test_loops_in_c(box: Sandbox) -> None:
    """No signal handler of Python's runs in these; the limit does not need one."""
    loops = ["while True: pass", "10**10**8", "import re; re.match('(a+)+b', 'a' * 60)", "sum(iter(int, 1))"]
    results = box.run([Program(source, cpu_s=0.25) for source in loops * 2])
    assert {result.status for result in results} == {"timeout"}
    assert max(result.cpu_s for result in results) < 2.0
    asleep = "import signal, time\nfor number in range(1, 65):\n    try: signal.signal(number, signal.SIG_IGN)\n"
    asleep += "    except (OSError, ValueError): pass\ntime.sleep(60)"
    results = eight(box, asleep, wall_s=0.3)
    assert {result.status for result in results} == {"timeout"} and max(result.wall_s for result in results) < 15


def test_a_changed_folder_and_links(box: Sandbox) -> None:
    """What a program leaves where it can write is gone, wherever it went and whatever it linked."""
    source = """
        import os
        os.chdir("/dev/shm")
        for name in ("/sandbox/work/a", "/sandbox/new", "/tmp/b", "c"): open(name, "w").write("x")
        os.symlink("/", "/sandbox/work/root")
        os.rename("/sandbox/work", "/sandbox/moved")
        os.chmod("/sandbox/moved", 0)
        os.rmdir("/sandbox/tmp") if not os.listdir("/sandbox/tmp") else None
        print("done")
    """
    assert lines(box, source) == ["done"]


def test_a_storm_of_orphans(box: Sandbox) -> None:
    """Ended processes that come faster than they can be reaped do not hold up the limit of time."""
    storm = """
        import os
        for step in range(10**9):
            try:
                if step < 4:
                    os.fork()
                if os.fork() == 0:
                    os.fork()
                    os._exit(0)
                os.waitpid(-1, os.WNOHANG)
            except OSError:
                pass
    """
    started = time.monotonic()
    assert {result.status for result in eight(box, storm, wall_s=1.0, cpu_s=0.5)} == {"timeout"}
    assert time.monotonic() - started < 25


def test_many_callers_at_once(box: Sandbox) -> None:
    """Good programs beside bad ones, from many threads: each gets its own answer."""
    bad = ["while True: pass", "import os\nos.kill(os.getpid(), 9)", "x = 'a' * 10**10", "import os\nwhile True: os.fork()"]
    found: dict[int, list[str]] = {}

    def one(index: int) -> None:
        programs = [Program(f"print({index} + {step})") for step in range(3)]
        results = box.run([*programs, Program(bad[index % len(bad)], cpu_s=0.2)])
        found[index] = [result.stdout.strip() for result in results[:3]] + [str(results[3].ok)]

    threads = [threading.Thread(target=one, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {index: [str(index), str(index + 1), str(index + 2), "False"] for index in range(16)}
