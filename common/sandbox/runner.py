"""The worker process of the sandbox: shuts itself in once, then forks a process for each program.

    python -sSBP runner.py CONFIG_JSON CONTROL_DESCRIPTOR

It is started by `pool.Worker`, imports nothing of the suite and never reads a program, its input or its output: those
pass it by as descriptors, so that a forked program finds no trace of another one in its memory. It does four things:
fork, watch the limits, kill, report.

On Linux with namespaces the tree is launcher > worker, process 1 of its own pid namespace > the program. Nothing but the
call's processes lives there beside the worker: it ends them all with one signal, and they cannot end, stop or trace it. In
the weak mode the program is a child in a session of its own.
"""

import contextlib
import gc
import json
import math
import os
import platform
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import program
from usage import own_children, usage_of_all

if sys.platform == "linux":
    import linux
sys.path.pop(0)

WARM = "bisect collections copy dataclasses datetime decimal enum fractions functools heapq itertools math operator random"
WARM += " re statistics string subprocess textwrap traceback typing"
HOME = "/sandbox"
MIB = 2**20
CHECK_S, CHECK_SHARE = 0.02, 5  # limits are looked at this often, or so that looking takes at most a fifth of the time
REAP_AT_ONCE = 256  # ended processes between two looks at the clock: a program may end them faster than they are reaped
SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh")


def main() -> None:
    config, control = json.loads(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    Watched.wake, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # process 1 of a namespace is deaf to signals that it has no handler for
    for name in WARM.split():
        __import__(name)
    import site

    site.setquit()  # exit() and quit(), which -S leaves out
    try:
        if config["namespaces"]:
            shut_in(config, control)
        elif sys.platform == "linux":
            linux.adopt_orphans()
    except OSError as error:
        send(control, {"failed": f"{traceback.extract_tb(error.__traceback__)[-1].name}: {error}"})
        return
    gc.collect()
    gc.disable()
    gc.freeze()
    send(control, {"ready": True})
    serve(config, control)


def send(control: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the parent is gone: the next receive ends this process
        control.sendall(json.dumps(message).encode() + b"\n")


def serve(config: dict[str, Any], control: socket.socket) -> None:
    """One request after another until the parent closes the connection."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 65536, 8)
        while data and not data.endswith(b"\n"):
            data += control.recv(65536)
        if not data:
            return
        for line in data.splitlines():
            request = json.loads(line)
            try:
                if request["do"] == "run":
                    send(control, run_call(config, request, control, descriptors))
                elif request["do"] in ("open", "close"):
                    send(control, episode_folder(config, request))
            except OSError as error:
                send(control, {"failed": str(error)})
        for descriptor in descriptors:
            os.close(descriptor)


def episode_folder(config: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Make or remove the folder of an episode, which outlives its commands."""
    path, opening = folder_of(config, request["episode"]), request["do"] == "open"
    if opening:
        os.mkdir(path, 0o700)
    if config["namespaces"]:
        if opening:
            linux.mount("tmpfs", path, "tmpfs", linux.NOSUID | linux.NODEV, folder_size(config["limits"]))
            return {"done": True}
        linux.call("umount2", path.encode(), linux.DETACH)
    if not opening:
        remove(path)
    return {"done": True}


def folder_of(config: dict[str, Any], episode: str) -> str:
    return os.path.join(HOME if config["namespaces"] else config["folder"], episode)


def remove(folder: str) -> None:
    """Delete a folder however deep it is and whatever rights a program left on it."""
    subprocess.run(["sh", "-c", 'chmod -R u+rwx "$1"; rm -rf "$1"', "sh", folder], stderr=subprocess.DEVNULL, check=False)


def folder_size(limits: dict[str, Any]) -> str:
    return f"mode=755,size={limits['folder_mb']}m,nr_inodes={limits['files']}"


# --- isolation -----------------------------------------------------------------------------------------------------------


def shut_in(config: dict[str, Any], control: socket.socket) -> None:
    """New user, pid, mount, network, ipc, uts and cgroup namespaces with a root of their own; returns in their process 1."""
    built = False
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):  # root without the right to mount goes the way of an ordinary user
            linux.unshare(linux.NEWNS)
            built = True
        if built:  # as root, because an interpreter under /root is out of reach for nobody
            build_root(config["readable"])
        try:
            linux.become_nobody()
        except OSError:  # root of a container that knows no other user; the kernel's limit on processes spares root
            Watched.counts = True
    linux.die_with_parent()
    if os.getppid() != config["parent"]:
        os._exit(0)
    uid, gid = os.geteuid(), os.getegid()
    others = linux.NEWNET | linux.NEWIPC | linux.NEWUTS | linux.NEWCGROUP | linux.NEWPID
    linux.unshare(linux.NEWUSER | linux.NEWNS | others)
    linux.map_user(0, uid, gid)
    if not built:
        build_root(config["readable"])
    child = os.fork()
    if child:
        control.close()
        os.waitpid(child, 0)
        os._exit(0)
    linux.die_with_parent()
    linux.call("sethostname", b"sandbox", 7)
    linux.mount("proc", "/proc", "proc", linux.NOSUID | linux.NODEV | linux.NOEXEC, "subset=pid,hidepid=2")
    linux.mount("tmpfs", HOME, "tmpfs", linux.NOSUID | linux.NODEV, "mode=700,size=1m")
    linux.seccomp_filter(platform.machine())  # made here once, found ready by each program
    linux.set_dumpable(False)  # programs are processes of this namespace too and must not look into this one


def build_root(readable: list[str]) -> None:
    """A root that holds the readable paths (bound, read-only), four devices, and links from /tmp and /dev/shm to HOME."""
    base = "/tmp"
    linux.mount(None, "/", None, linux.RECURSIVE | linux.PRIVATE)
    paths = [*readable, *(f"/dev/{name}" for name in ("null", "zero", "random", "urandom"))]
    sources = [(path, os.open(path, os.O_PATH)) for path in paths if not os.path.islink(path)]
    proc = os.open("/proc", os.O_PATH)
    links = [(path, os.readlink(path)) for path in paths if os.path.islink(path)]
    linux.mount("tmpfs", base, "tmpfs", linux.NOSUID | linux.NODEV, "mode=755,size=1m")
    for path, source in sources:
        target, folder = base + path, os.path.isdir(f"/proc/self/fd/{source}")
        os.makedirs(target if folder else os.path.dirname(target), exist_ok=True)
        if not folder:
            os.close(os.open(target, os.O_CREAT, 0o644))
        linux.mount(f"/proc/self/fd/{source}", target, None, linux.BIND | linux.RECURSIVE)
        linux.restrict_mount(target, devices=path.startswith("/dev/"))
        os.close(source)
    os.mkdir(base + "/proc")
    linux.mount(f"/proc/self/fd/{proc}", base + "/proc", None, linux.BIND | linux.RECURSIVE)
    os.close(proc)
    for path, goal in [*links, ("/tmp", HOME + "/tmp"), ("/dev/shm", HOME + "/shm"), ("/dev/fd", "/proc/self/fd")]:
        os.makedirs(os.path.dirname(base + path), exist_ok=True)
        os.symlink(goal, base + path)
    os.makedirs(base + "/etc", exist_ok=True)
    with open(base + "/etc/passwd", "w", encoding="ascii") as file:
        file.write(f"sandbox:x:{linux.PROGRAM_UID}:{linux.PROGRAM_UID}::{HOME}/work:/bin/sh\n")
    os.mkdir(base + HOME)
    linux.change_root(base)
    linux.restrict_mount("/", recursive=False)


def shut_in_call(limits: dict[str, Any], episode: str | None) -> None:
    """For one call: an empty working folder or the episode's, its own /tmp and /dev/shm, /proc, no rights over mounts."""
    linux.unshare(linux.NEWNS)  # what a shared ipc namespace could keep from call to call, the seccomp filter refuses
    kept = os.open(f"{HOME}/{episode}", os.O_PATH) if episode else None
    linux.mount("tmpfs", HOME, "tmpfs", linux.NOSUID | linux.NODEV, folder_size(limits))
    for name in ("work", "tmp", "shm"):
        os.mkdir(f"{HOME}/{name}")
    if kept is not None:
        linux.mount(f"/proc/self/fd/{kept}", f"{HOME}/work", None, linux.BIND)
        os.close(kept)
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # where memory runs out all the same, the kernel takes this process first
    linux.unshare(linux.NEWUSER)
    linux.map_user(linux.PROGRAM_UID, 0, 0)


def set_limits(limits: dict[str, Any], cpu_s: float, namespaces: bool) -> None:
    """The kernel's own limits of this process and its children. CPU seconds count whole here; the watch is finer."""
    cpu = math.ceil(cpu_s) + (1 if namespaces else 0)
    wanted = {
        "CORE": 0,
        "CPU": cpu,
        "FSIZE": limits["file_size_mb"] * MIB,
        "NOFILE": limits["open_files"],
        "AS": limits["memory_mb"] * MIB,
    }
    if namespaces:  # counted per user namespace there, and per user of the whole machine elsewhere
        wanted |= {"NPROC": limits["processes"], "MEMLOCK": 0, "MSGQUEUE": 0}
    for name, value in wanted.items():
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
        except (AttributeError, OSError, ValueError):
            if namespaces:
                raise  # macOS refuses some; `isolation` says so there


# --- one call ------------------------------------------------------------------------------------------------------------


def run_call(config: dict[str, Any], request: dict[str, Any], control: socket.socket, descriptors: list[int]) -> dict[str, Any]:
    """Fork the program of this request, watch it to its end, end all that it started, report how it ended."""
    limits, folder = config["limits"], None
    if not config["namespaces"]:
        folder = folder_of(config, request["episode"]) if request["episode"] else tempfile.mkdtemp(dir=config["folder"])
    ready_read, ready_write = os.pipe()
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            control.close()
            program_main(config, request, descriptors, folder)
        except BaseException as error:
            os.write(ready_write, f"{type(error).__name__}: {error}".encode()[:1000])
        finally:
            os._exit(1)  # whatever goes wrong, this process never goes on as the worker that it was forked from
    os.close(ready_write)
    try:
        watched = Watched(child, config["namespaces"])
        cause = watched.wait(request, limits, control, start)
        wall = time.monotonic() - start
        watched.end_all()
        failure = os.read(ready_read, 1000).decode()  # nothing: the program closed it when it was about to begin
    finally:
        os.close(ready_read)
        if folder is not None and not request["episode"]:
            remove(folder)
    report = {"cause": cause, "code": None if cause else watched.code, "wall": wall, "cpu": watched.cpu_s}
    return {"failed": failure} if failure and not cause else report


def program_main(config: dict[str, Any], request: dict[str, Any], descriptors: list[int], folder: str | None) -> None:
    """In the forked process: shut it in, give up all that is left to give up, then become the program."""
    os.setsid()
    if config["namespaces"]:
        linux.set_dumpable(True)
        shut_in_call(config["limits"], request["episode"])
    folder = folder or f"{HOME}/work"
    os.chdir(folder)
    payload, stdin, stdout, stderr, *answers = descriptors
    for number, descriptor in enumerate((stdin, stdout, stderr)):
        os.dup2(descriptor, number)
    set_limits(config["limits"], request["cpu_s"], config["namespaces"])
    if config["namespaces"]:
        linux.drop_privileges()
        linux.set_dumpable(True)
    else:
        os.environ.update(HOME=folder, TMPDIR=folder)
    with open(payload, "rb", closefd=False) as file:
        content = json.load(file)
    if answers:
        os.dup2(answers[0], program.ANSWERS)
    for name in ("runner", "linux", "program", "usage"):
        sys.modules.pop(name, None)
    sys.argv = [""]
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.modules["random"].seed(0)  # the same program prints the same
    gc.enable()
    os.closerange(program.ANSWERS + len(answers), 65536)
    program.run(content, next(path for path in SHELLS if os.path.exists(path)))


class Watched:
    """A program and all that it starts."""

    wake = -1  # a descriptor that can be read once a child has ended
    counts = False  # whether the number of processes is held here, roughly: some come and go while they are counted

    def __init__(self, child: int, namespaces: bool) -> None:
        self.child, self.namespaces = child, namespaces
        self.code: int | None = None
        self.cpu_s = 0.0

    def reap(self, flags: int) -> bool:
        """Wait for one ended process; False where none has ended (WNOHANG) or there is none at all."""
        try:
            pid, status, usage = os.wait4(-1, flags)
        except ChildProcessError:
            return False
        if pid:
            self.cpu_s += usage.ru_utime + usage.ru_stime
        if pid == self.child:
            self.code = os.waitstatus_to_exitcode(status)
        return pid != 0

    def wait(self, request: dict[str, Any], limits: dict[str, Any], control: socket.socket, start: float) -> str:
        """Wait for the program's end ("") or for a reason to end it: "wall", "cpu", "memory", "processes", "output"..."""
        poll = select.poll()
        poll.register(control, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        check = start + CHECK_S
        while True:
            left = start + request["wall_s"] - time.monotonic()
            events = dict(poll.poll(max(0.0, min(check - time.monotonic(), left)) * 1000))
            if self.wake in events:
                os.read(self.wake, 4096)
            for _ in range(REAP_AT_ONCE):
                if self.code is not None or not self.reap(os.WNOHANG):
                    break
            if self.code is not None:
                return ""
            if control.fileno() in events:
                return "output" if control.recv(65536) else "closed"
            if left <= 0:
                return "wall"
            before = time.monotonic()
            if before >= check and not self.namespaces:
                check = before + CHECK_S
            elif before >= check:
                count, cpu_s, memory = usage_of_all(limits["memory_mb"] * MIB)
                if memory > limits["memory_mb"] * MIB:
                    return "memory"
                if self.cpu_s + cpu_s > request["cpu_s"]:
                    return "cpu"
                if self.counts and count > limits["processes"]:
                    return "processes"
                now = time.monotonic()
                check = now + max(CHECK_S, CHECK_SHARE * (now - before))

    def end_all(self) -> None:
        """Kill and reap every process of the call. As process 1 of its namespace the worker can name them all at once, and
        none can slip away by forking; in the weak mode it can name the program's session and, on Linux, adopted orphans."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.namespaces:
                os.kill(-1, signal.SIGKILL)
            else:
                os.killpg(self.child, signal.SIGKILL)
        while True:
            for pid in [] if self.namespaces else own_children():
                os.kill(pid, signal.SIGKILL)  # also the program itself, if it had no session of its own yet
            if not self.reap(0):
                return


if __name__ == "__main__":
    main()
