"""Linux calls that Python 3.11 lacks: namespaces, mounts, capabilities and a seccomp filter, by ctypes.

Only the worker process imports this module, never the parent, and only on Linux. Nothing here needs a package.
Flags and numbers: <linux/sched.h>, <linux/mount.h>, <linux/seccomp.h> and the system call tables of x86_64 and arm64.
"""

import contextlib
import ctypes
import functools
import os
import platform
import struct

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x02000000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
_NAMESPACES = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
NOSUID, NODEV, NOEXEC, BIND, RECURSIVE, PRIVATE = 0x2, 0x4, 0x8, 0x1000, 0x4000, 0x40000
_ATTR_READONLY, _ATTR_NOSUID, _ATTR_NODEV, _ATTR_NOEXEC = 0x1, 0x2, 0x4, 0x8
_AT_FDCWD, _AT_RECURSIVE, DETACH = -100, 0x8000, 2
_MOUNT_SETATTR = 442
_PDEATHSIG, _SET_DUMPABLE, _SET_SECCOMP, _CHILD_SUBREAPER, _NO_NEW_PRIVS = 1, 4, 22, 36, 38
_NOBODY = 65534
PROGRAM_UID = 1000
"""The user a program sees itself as; outside it is the suite's own user, or nobody where that is root."""

# name: (x86_64, arm64). Refused: what reaches into other processes or slows them, changes mounts or namespaces, loads code
# into the kernel, or holds memory that neither the folder's size nor the processes' resident memory shows.
_DENIED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}
# Allowed for the calling process alone (number 0): the worker is of the same user, so the kernel would let a program do
# these to the worker, and to all later programs through it.
_OWN_ONLY = {
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
}
_ARCHITECTURES = {
    "x86_64": (0xC000003E, 0, 56, 41),
    "aarch64": (0xC00000B7, 1, 220, 198),
}  # audit number, column, clone, socket
_CLONE3 = 435
_FAMILIES = (1, 2, 10)  # Unix, IPv4, IPv6; not vsock, which no network namespace holds back
_KILL, _REFUSE, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> int:
    """A function of the C library; OSError with its name where it returns a negative number."""
    result = int(getattr(_libc, name)(*arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _prctl(option: int, value: object, third: object = 0) -> None:
    zero = ctypes.c_ulong(0)
    call("prctl", option, ctypes.c_ulong(value) if isinstance(value, int) else value, third or zero, zero, zero)


def unshare(flags: int) -> None:
    """New namespaces for this process (a pid namespace: for its next children)."""
    call("unshare", flags)


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2)."""
    texts = [text.encode() if text is not None else None for text in (source, target, kind)]
    call("mount", *texts, ctypes.c_ulong(flags), options.encode() or None)


def restrict_mount(target: str, *, readonly: bool = True, devices: bool = False, recursive: bool = True) -> None:
    """Make a mount read-only, without set-user-id programs and device files (Linux 5.12)."""
    flags = (_ATTR_READONLY if readonly else 0) | _ATTR_NOSUID | (_ATTR_NOEXEC if devices else _ATTR_NODEV)
    attributes = struct.pack("QQQQ", flags, 0, 0, 0)
    where = _AT_RECURSIVE if recursive else 0
    call("syscall", _MOUNT_SETATTR, _AT_FDCWD, target.encode(), where, attributes, ctypes.c_size_t(len(attributes)))


def change_root(target: str) -> None:
    """`target`, a mount point, becomes the root of the file system; what was there before is gone from view."""
    os.chdir(target)
    call("syscall", _DENIED["pivot_root"][_ARCHITECTURES[platform.machine()][1]], b".", b".")
    call("umount2", b".", DETACH)
    os.chdir("/")


def map_user(inside: int, uid: int, gid: int) -> None:
    """In a new user namespace: this process's user and group `uid`, `gid` of the outer one are called `inside`."""
    with contextlib.suppress(FileNotFoundError), open("/proc/self/setgroups", "w", encoding="ascii") as file:
        file.write("deny")
    for name, outer in (("uid_map", uid), ("gid_map", gid)):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(f"{inside} {outer} 1")


def become_nobody() -> None:
    """Root gives up its user: a limit on processes does not hold for root, and files of root's are none of ours."""
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    set_dumpable(True)  # without it /proc/self belongs to root and the namespace's user map cannot be written


def die_with_parent() -> None:
    """SIGKILL for this process when the thread that started it ends, however it ends."""
    _prctl(_PDEATHSIG, 9)


def adopt_orphans() -> None:
    """Processes below this one whose parent ends become its children."""
    _prctl(_CHILD_SUBREAPER, 1)


def set_dumpable(value: bool) -> None:
    """Whether another process of the same user may look into this one (ptrace, /proc/<pid>/mem and fd)."""
    _prctl(_SET_DUMPABLE, int(value))


def drop_privileges() -> None:
    """No capabilities, none to be had by executing a file either, and the seccomp filter for all that comes after."""
    call("capset", struct.pack("II", 0x20080522, 0), bytes(24))
    _prctl(_NO_NEW_PRIVS, 1)
    program = seccomp_filter(platform.machine())
    buffer = ctypes.create_string_buffer(program, len(program))
    _prctl(_SET_SECCOMP, 2, struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer)))


@functools.cache
def seccomp_filter(machine: str) -> bytes:
    """The filter in classic BPF: a wrong architecture dies, refused calls fail with EPERM, the rest is allowed.

    OSError where the system call numbers of this machine are not known here.
    """
    if machine not in _ARCHITECTURES:
        raise OSError(_ENOSYS, f"no seccomp filter for {machine}; there are {', '.join(_ARCHITECTURES)}")
    audit, column, clone, socket = _ARCHITECTURES[machine]
    load, equal, greater, bits, jump, answer = 0x20, 0x15, 0x35, 0x45, 0x05, 0x06
    allow, refuse, argument = (answer, 0, 0, _ALLOW), (answer, 0, 0, _REFUSE | _EPERM), (load, 0, 0, 16)
    code = [(load, 0, 0, 4), (equal, 1, 0, audit), (answer, 0, 0, _KILL), (load, 0, 0, 0)]
    code += [(greater, 0, 1, 0x40000000), (answer, 0, 0, _REFUSE | _ENOSYS)]  # x32: other numbers for the same calls
    code += [(equal, 0, 1, _CLONE3), (answer, 0, 0, _REFUSE | _ENOSYS)]  # its flags lie in memory; libc falls back to clone
    denied = [numbers[column] for numbers in _DENIED.values()]
    code += [(equal, len(denied) - index, 0, number) for index, number in enumerate(denied)]
    code += [(jump, 0, 0, 1), refuse]
    for numbers in _OWN_ONLY.values():
        code += [(equal, 0, 4, numbers[column]), argument, (equal, 0, 1, 0), allow, refuse]
    code += [(equal, 0, 4, clone), argument, (bits, 1, 0, _NAMESPACES), allow, refuse]
    count = len(_FAMILIES)
    code += [(equal, 0, count + 3, socket), argument]
    code += [(equal, count - index, 0, family) for index, family in enumerate(_FAMILIES)]
    code += [(answer, 0, 0, _REFUSE | _EAFNOSUPPORT), allow, allow]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)
