"""Sandbox: what programs, calls, commands and episodes give, and that nothing is left behind."""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import psutil
import pytest

from common.sandbox import Answer, Call, Isolation, Limits, Program, Sandbox, SandboxError, isolation, passes, pool
from common.sandbox.data import Status
from scripts import sandbox_bench

ROOT = Path(__file__).resolve().parents[2]
LIMITS = Limits(wall_s=20.0, cpu_s=5.0, memory_mb=256, folder_mb=16, file_size_mb=8)


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    if not isolation().strong:
        pytest.skip(f"this machine has no namespaces for programs: {isolation().why}")
    with Sandbox(LIMITS, workers=2) as found:
        yield found


@pytest.fixture(autouse=True)
def own_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What these tests leave, or leave for a moment, is seen by no other test process that looks into /tmp."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def below() -> set[int]:
    """Processes below this one that are no zombies' ghosts: all of them, zombies too."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def sandbox_folders() -> list[str]:
    """Temporary folders of sandboxes."""
    return sorted(name for name in os.listdir(tempfile.gettempdir()) if name.startswith("sandbox"))


def test_a_program_and_its_result(box: Sandbox) -> None:
    done, wrong, code, flag = box.run([
        Program("import sys\nprint(6 * 7)\nprint('warned', file=sys.stderr)\nprint(sys.stdin.read())", stdin="typed"),
        Program("x = 1\nprint(y)"),
        Program("raise SystemExit(3)"),
        Program("import sys; sys.exit('no such thing')"),
    ])  # fmt: skip
    assert (done.status, done.stdout, done.stderr, done.exit_code) == ("ok", "42\ntyped\n", "warned\n", 0)
    assert done.ok and 0 < done.cpu_s < 2 and done.wall_s > 0 and not done.stdout_cut and done.reason == ""
    assert (wrong.status, wrong.exit_code, wrong.reason) == ("error", 1, "exit code 1")
    lines = wrong.stderr.splitlines()
    assert lines[:3] == ["Traceback (most recent call last):", '  File "program.py", line 2, in <module>', "    print(y)"]
    assert lines[-1] == "NameError: name 'y' is not defined" and len(lines) <= 5
    assert (code.status, code.exit_code) == ("error", 3)
    assert (flag.status, flag.exit_code, flag.stderr) == ("error", 1, "no such thing\n")
    with pytest.raises(dataclasses.FrozenInstanceError):
        done.status = "error"  # type: ignore[misc]


def test_python_as_programs_expect_it(box: Sandbox) -> None:
    """Threads are waited for, exit handlers run, __main__ is the program, the standard library is there, files are given."""
    source = """
        import atexit, json, subprocess, sys, threading, time, zoneinfo, sqlite3, multiprocessing
        from lib.helper import twice
        atexit.register(lambda: print("handler"))
        threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
        if __name__ == "__main__":
            print(twice(json.load(open("data.json"))), sys.argv, open("raw", "rb").read())
            print(subprocess.run(["python3", "-c", "print(5)"], capture_output=True, text=True).stdout.strip())
        exit(0)
    """
    files = {"lib/helper.py": "def twice(x): return 2 * x", "data.json": "21", "raw": b"\x00\xff"}
    result = box.run([Program(textwrap.dedent(source), files=files)])[0]
    first, *middle, last = result.stdout.splitlines()
    assert first == "42 ['program.py'] b'\\x00\\xff'" and sorted(middle) == ["5", "thread"] and last == "handler", result.stderr


def test_the_same_program_prints_the_same(box: Sandbox) -> None:
    source = "import random\nprint(random.random(), hash('text'), {'b', 'a', 'c'})"
    assert len({result.stdout for result in box.run([Program(source)] * 4)}) == 1


def test_input_is_at_its_end(box: Sandbox) -> None:
    """S05: also where the suite's own stdin is an open pipe."""
    result = box.run([Program("input()")])[0]
    assert result.status == "error" and "EOFError" in result.stderr
    script = "from common.sandbox import *\nwith Sandbox(workers=1) as b: print(b.run([Program('input()')])[0].stderr[-40:])"
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None and b"EOFError" in run.stdout.read()


def test_text_survives(box: Sandbox) -> None:
    """S06: NUL, any character, lone surrogates as backslash text, bytes that are no UTF-8 as U+FFFD."""
    source = "import os\nprint('é€😀\\x00\\ud800', flush=True)\nos.write(1, b'ok\\xf0')"
    assert box.run([Program(source)])[0].stdout == "é€😀\0\\ud800\nok\ufffd"
    echo = Program(
        "import sys\nprint(ascii(sys.stdin.read()), ascii(open('f').read()))", stdin="a\ud800\0", files={"f": "ü\ud800"}
    )
    assert box.run([echo])[0].stdout == "'a\\\\ud800\\x00' '\\xfc\\\\ud800'\n"
    for broken in ("print('\ud800')", "x = '\0'"):
        assert box.run([Program(broken)])[0].status == "error"


def test_limits_of_time(box: Sandbox) -> None:
    """S13 and the CPU limit, over all processes of a program."""
    forks = "import os\nfor _ in range(3): os.fork()\nwhile True: pass"
    slept, spun, forked = box.run([
        Program("import time\nprint('before', flush=True)\ntime.sleep(60)", wall_s=0.5),
        Program("while True: pass", cpu_s=0.2),
        Program(forks, cpu_s=0.4),
    ])  # fmt: skip
    assert (slept.status, slept.reason, slept.stdout, slept.exit_code) == (
        "timeout",
        "wall time limit of 0.5 s",
        "before\n",
        None,
    )
    assert 0.5 <= slept.wall_s < 5
    assert (spun.status, spun.reason) == ("timeout", "CPU time limit of 0.2 s") and 0.15 < spun.cpu_s < 1.5
    assert forked.status == "timeout" and 0.3 < forked.cpu_s < 2


def test_a_verdict_that_cannot_be_forged(box: Sandbox) -> None:
    """S07: leaving early, writing to the answers or to stdout, or odd objects never count as an answer that is right."""
    cases = ((2,), (3,))
    honest = box.call([Call("def f(x):\n    print('noise')\n    return x * x", "f", cases)])[0]
    assert honest.answers == (Answer(4), Answer(9)) and honest.result.stdout == "noise\nnoise\n"
    attacks = {
        "import sys\ndef f(x): sys.exit(0)": "before it answered",
        "import os\ndef f(x): os._exit(0)": "before it answered",
        "import os\nos._exit(0)": "before it answered",
        "def f(x): raise ValueError('no')": "runtime error: ValueError: no",
        "def f(x): return object()": "runtime error: TypeError",
        "def g(x): return 4": "runtime error",
        "def f(x): raise KeyboardInterrupt": "runtime error",
        "import os\ndef f(x): os.kill(os.getpid(), 9)": "killed",
        "def f(x):\n    while True: pass": "timeout",
        "class E(int):\n    __eq__ = lambda s, o: True\ndef f(x): return E(7)": "",
        "import builtins, json\njson.dumps = lambda *a: '[0, \"passed\", true]'\ndef f(x): return 1": "before it answered",
        "import os\nfor d in range(3, 256):\n    try: os.write(d, b'ok\\n')\n    except OSError: pass\nos._exit(0)": "before",
        "def f(x):\n    a = []\n    a.append(a)\n    return a": "runtime error",
    }
    for (source, why), found in zip(attacks.items(), box.call([Call(text, "f", cases, cpu_s=0.3) for text in attacks])):
        for answer, right in zip(found.answers, (4, 9)):
            assert not passes(answer, right) and not passes(answer, None) and not passes(answer, ""), source
            assert why in answer.failure, (source, answer)


def test_an_episode_lasts_over_commands(box: Sandbox) -> None:
    with box.episode({"src/a.py": "print('hello')", "note": b"\xff"}) as episode:
        assert episode.list() == ["note", "src/"] and episode.read("note") == b"\xff"
        result = episode.shell("cd src && python3 a.py > out; sleep 60 & pwd; echo $HOME; exit 4")
        assert (result.status, result.exit_code, result.stdout) == ("error", 4, "/sandbox/work/src\n/sandbox/work\n")
        assert episode.shell("cat src/out; cat", stdin="typed").stdout == "hello\ntyped"
        assert (
            episode.python(Program("print(open('src/out').read(), open('new').read())", files={"new": "x"})).stdout
            == "hello\n x\n"
        )
        assert episode.shell("sleep 30", wall_s=0.3).status == "timeout"
        assert episode.read("src/out") == b"hello\n"
        with pytest.raises(SandboxError, match="No such file"):
            episode.read("missing")
        assert episode.shell("head -c 9000000 /dev/zero > big").status == "disk"
        with box.episode() as other:
            assert other.list() == [] and "episode" not in other.shell("ls -a /sandbox /sandbox/work").stdout
    assert episode.shell("true").status == "lost"


def test_links_do_not_lead_out_of_an_episode(box: Sandbox) -> None:
    """S09: link, dangling link, linked folder, absolute path and `..`, for write, read and list; a link inside works."""
    with box.episode({"real/file": "in"}) as episode:
        assert episode.shell("ln -s /etc/passwd out; ln -s /tmp/none dangling; ln -s /usr folder; ln -s real inner").ok
        for path in ("out", "dangling", "folder/x", "/etc/x", "real/../../x"):
            with pytest.raises(SandboxError):
                episode.write({path: "no"})
            with pytest.raises(SandboxError):
                episode.read(path)
        for path in ("folder", "/usr", "..", "folder/lib"):
            with pytest.raises(SandboxError):
                episode.list(path)
        episode.write({"inner/file": "changed"})
        assert episode.read("real/file") == b"changed" and episode.list("inner") == ["file"]
    for path in ("../x", "/tmp/x", ""):
        with pytest.raises(SandboxError):
            box.run([Program("", files={path: "x"})])


def test_thirty_two_at_once_keep_apart(box: Sandbox) -> None:
    """S11: each finds its own file only, some time out, nothing is left in the temporary folder."""
    before = sandbox_folders()
    source = "import os, time\nassert not os.listdir()\nopen('out.txt', 'w').write('{0}')\ntime.sleep({1})\n"
    source += "print(open('out.txt').read())"
    found: dict[int, str] = {}

    def one(index: int) -> None:
        result = box.run([Program(source.format(index, 60 if index % 8 == 0 else 0), wall_s=0.5 if index % 8 == 0 else None)])[
            0
        ]
        found[index] = result.status if result.status != "ok" else result.stdout.strip()

    threads = [threading.Thread(target=one, args=(index,)) for index in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {index: "timeout" if index % 8 == 0 else str(index) for index in range(32)}
    assert sandbox_folders() == before


def test_workers_that_die_are_replaced(box: Sandbox) -> None:
    """Killed from outside in the middle of a call: the program is run again, an episode is lost and says so."""
    episode = box.episode({"f": "x"})
    processes = below()

    def kill() -> None:
        time.sleep(0.3)
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    results = box.run([Program("import time\ntime.sleep(0.8)\nprint('done')")] * 2)
    killer.join()
    assert [result.stdout for result in results] == ["done\n"] * 2
    gone = episode.shell("cat f")
    assert gone.status == "lost" and "died" in gone.reason
    with pytest.raises(SandboxError, match="died"):
        episode.read("f")
    with box.episode({"f": "y"}) as again:
        assert again.shell("cat f").stdout == "y"


def test_nothing_is_left_after_use_or_an_exception() -> None:
    """No process, zombie, descriptor or temporary file, also where calls are under way; a closed pool says so."""
    isolation()
    processes, descriptors = below(), len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    with pytest.raises(ZeroDivisionError), Sandbox(LIMITS, workers=2, allow_weak=True) as used:
        threads = [threading.Thread(target=used.run, args=([Program("import time; time.sleep(60)")],)) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        raise ZeroDivisionError
    for thread in threads:
        thread.join(10)
    assert below() == processes
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) == descriptors
    with pytest.raises(SandboxError, match="closed"):
        used.run([Program("print(1)")])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("weak", [False, True])
def test_nothing_is_left_after_sigkill_of_the_parent(weak: bool, tmp_path: Path) -> None:
    """The kernel ends the workers with their parent, and with them every process of the programs."""
    if not weak and not isolation().strong:
        pytest.skip(isolation().why)
    script = f"""
        import threading, time, psutil
        from common.sandbox import Isolation, Program, Sandbox, pool
        if {weak}:
            pool.isolation = lambda: Isolation(False, "asked for")
        box = Sandbox(workers=2, allow_weak={weak})
        text = "import os, time\\nif os.fork() == 0: os.setsid()\\nprint(1, flush=True)\\ntime.sleep(60)"
        threading.Thread(target=box.run, args=([Program(text, wall_s=60)] * 2,)).start()
        while len(list(psutil.Process().children(recursive=True))) < {6 if weak else 8}:
            time.sleep(0.05)
        print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
    """
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) >= 6 and all(psutil.pid_exists(pid) for pid in pids)
        parent.kill()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(psutil.pid_exists(pid) for pid in pids):
        time.sleep(0.05)
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
    assert weak or os.listdir(tmp_path) == []


def test_without_isolation_it_must_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unsafe fall-back is never silent; it still has its limits and leaves no process behind."""
    monkeypatch.setattr(pool, "isolation", lambda: Isolation(False, "no namespaces here"))
    with pytest.raises(SandboxError, match=r"cannot isolate model-written code: no namespaces here.*allow_weak"):
        Sandbox()
    monkeypatch.setenv("FOO_TOKEN", "canary")
    before, folders = below(), sandbox_folders()
    with Sandbox(LIMITS, workers=2, allow_weak=True) as weak:
        assert not weak.strong
        orphan = (
            "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\n    time.sleep(60)\nprint(os.listdir('.'))"
        )
        results = weak.run([
            Program("import os; print(6 * 7, 'FOO_TOKEN' in os.environ)"), Program("while True: pass", wall_s=0.3),
            Program("x = 'a' * 10**10"), Program(orphan), Program("while True: print('x' * 1000)"),
            Program("import os; os.kill(os.getpid(), 9)"),
        ])  # fmt: skip
        assert [result.status for result in results] == ["ok", "timeout", "memory", "ok", "output", "killed"]
        assert results[0].stdout == "42 False\n" and results[3].stdout == "[]\n"
        assert weak.call([Call("def f(x): return -x", "f", ((1,),))])[0].answers == (Answer(-1),)
        with weak.episode({"f": "x"}) as episode:
            assert episode.shell("cat f; echo y > g").stdout == "x" and episode.read("g") == b"y\n"
            assert episode.shell("ln -s / out").ok
            with pytest.raises(SandboxError):
                episode.read("out/etc/passwd")
        if sys.platform == "linux":
            assert len(below()) == len(before) + 2
        deep = "import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')\nos.chmod('.', 0)"
        assert weak.run([Program(deep)])[0].ok and weak.run([Program("print(1)")])[0].ok
    assert below() == before and sandbox_folders() == folders
    assert "NOT ISOLATED: why" in Isolation(False, "why").lines()[0]


def test_a_worker_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes from making the pool, not from the first program, and leaves nothing behind."""
    monkeypatch.setattr(pool, "isolation", lambda: Isolation(False, "asked for"))
    before, folders = below(), sandbox_folders()
    for name, value, message in (("RUNNER", Path("/none.py"), "died"), ("_base", "/no/python", "could be started")):
        with monkeypatch.context() as patch:
            if name == "RUNNER":
                patch.setattr("common.sandbox.worker.RUNNER", value)
            else:
                patch.setattr(sys, "_base_executable", value)
            with pytest.raises(SandboxError, match=message):
                Sandbox(LIMITS, allow_weak=True)
    assert below() == before and sandbox_folders() == folders


def test_the_page_says_what_is_so(box: Sandbox) -> None:
    """docs/sandbox.md: its example runs and prints what its comments say; every limit, default and status stands there."""
    page = (ROOT / "docs/sandbox.md").read_text(encoding="utf-8")
    example = page.split("```python\n")[1].split("```")[0]
    shown = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown == "ok 42\n\n[True, True]\nhello\n ['src/'] b\"print('hello')\"\n"
    for status in get_args(Status):
        assert f"`{status}`" in page
    for row in [line for line in page.split("## Limits")[1].splitlines() if line.startswith("| `") and "default" not in line]:
        names, defaults = (cell.replace("`", "").split(", ") for cell in row.split("|")[1:3])
        assert [float(getattr(Limits(), name.strip())) for name in names] == [float(value) for value in defaults]


def test_throughput_is_printed(box: Sandbox, capsys: pytest.CaptureFixture[str]) -> None:
    assert sandbox_bench.main(["seconds=1"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"\d+ programs in [\d.]+ s: \d+ a second, goal 200 on two cores", shown), shown
    with capsys.disabled():
        print(f"\n{shown.strip()}")
