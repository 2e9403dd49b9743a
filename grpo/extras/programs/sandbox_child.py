"""The child's side of the sandbox: confines its own process, then runs the program and its tests.

`sandbox` starts it on a bare interpreter (no site-packages, no inherited environment), so it imports only the standard
library, and little of it, since every program pays for every import. In the order of `confine`: an unprivileged user if it
was root, no capabilities, resource limits, Landlock (which files), then seccomp (which system calls).

The process forks before it reads anything but its arguments: itself it becomes the tester, its child the candidate
(see `tester`). The tester alone has the pipe to the parent and the file with the job, and it may kill the candidate, and nothing
else. Standard input is the candidate's.
"""

import _signal  # signal itself imports enum
import ctypes
import os
import resource
import struct
import sys

MARK = b"\n"  # ends the line with the measures in force; the program starts after it
REFUSED = b"refused "
OWN_USERS = 2_000_000_000  # plus the process id: a user of its own, so that its thread limit counts only its threads
NOBODY = 65534  # for containers whose user namespace has no such large ids

with open(os.path.join(os.path.dirname(__file__), "system_calls.txt")) as _table:
    CALLS = [line.split() for line in _table if line[0] != "#"]  # name, number on x86_64 and on aarch64
# Further calls are allowed if 32-bit words of their arguments (word 2i is the low half of argument i), under a mask, have
# one of some values.
THREAD, NEW_NAMESPACES = 0x10000, 0x7E020000
READ, WRITE, READ_WRITE, TRUNCATE = 0, 1, 2, 0o1000
# opening for reading must not empty a file: before Linux 6.2 Landlock treated that as reading
ACCESS = (3 | TRUNCATE, (READ, WRITE, READ_WRITE, WRITE | TRUNCATE, READ_WRITE | TRUNCATE))
ALL = 0xFFFFFFFF


def conditional(pid: int, child: int | None = None) -> dict[tuple, tuple]:
    """Return (numbers on x86_64 and aarch64) -> conditions (word, mask, values), all of which must hold.

    child: a process that it may kill and wait for.
    """
    return {
        (2, None): ((2, *ACCESS),),  # open
        (257, 56): ((4, *ACCESS),),  # openat
        (56, 220): ((0, THREAD | NEW_NAMESPACES, (THREAD,)),),  # clone
        (62, 129): ((0, ALL, (pid, child or pid)),),  # kill
        **({(61, 260): ((0, ALL, (child,)),)} if child else {}),  # wait4
        (234, 131): ((0, ALL, (pid,)),),  # tgkill
        (302, 261): ((0, ALL, (0, pid)),),  # prlimit64
        # fcntl, without F_SETOWN and F_SETSIG, which make the kernel send any signal to any process of the user
        (72, 25): ((2, ALL, (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)),),
        # ioctl: is it a terminal, of which size, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
        (16, 29): ((2, ALL, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),),
        (53, 199): ((0, ALL, (1,)), (2, 0xF, (1,))),  # socketpair of unix streams, with which asyncio wakes itself
        (44, 206): ((8, ALL, (0,)), (9, ALL, (0,))),  # sendto without an address
    }


AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
LOAD, EQUAL, AND, RETURN = 0x20, 0x15, 0x54, 0x06
ALLOW, KILL, ERRNO, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050000, 1, 38


def seccomp_filter(machine: str, pid: int, child: int | None = None) -> list[tuple[int, int, int, int]]:
    """Return BPF instructions (code, jump if true, jump if false, operand) that allow CALLS and the conditional ones."""
    column = list(AUDIT_ARCH).index(machine)
    code = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, AUDIT_ARCH[machine]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    for call in CALLS:
        if (number := call[1 + column]) != "-":
            code += [(EQUAL, 0, 1, int(number)), (RETURN, 0, 0, ALLOW)]
    for numbers, conditions in conditional(pid, child).items():
        if numbers[column] is None:
            continue
        body = []
        for word, mask, values in conditions:
            body += [(LOAD, 0, 0, 16 + 4 * word), (AND, 0, 0, mask)]
            body += [(EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
            body += [(RETURN, 0, 0, ERRNO | EPERM)]
        body += [(RETURN, 0, 0, ALLOW)]
        code += [(EQUAL, 0, len(body), numbers[column]), *body]
    return [*code, (RETURN, 0, 0, ERRNO | ENOSYS)]


libc = ctypes.CDLL(None, use_errno=True)


def checked(what: str, function, *arguments) -> int:
    """Return the result of a function of libc; missing arguments are 0. Raises OSError if it fails."""
    filled = (*arguments, 0, 0, 0, 0)
    result = function(*(ctypes.c_long(value) if isinstance(value, int) else value for value in filled))
    if result < 0:
        raise OSError(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def limit_resources(seconds: float, memory_mb: int, disk_mb: int, threads: int | None) -> None:
    """Set hard limits, which no unprivileged process can raise again. threads: None limits them only by memory."""
    cpu = int(seconds) + 3  # in case the parent dies: the parent's own clock is stricter
    limits = {"CPU": cpu, "AS": memory_mb << 20, "FSIZE": disk_mb << 20, "NOFILE": 64, "CORE": 0, "NPROC": threads}
    for name, value in limits.items():
        which = getattr(resource, f"RLIMIT_{name}", None)
        if value is None or which is None:
            continue
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(which, (value, value))
        except (ValueError, OSError):  # macOS knows RLIMIT_AS by name only
            if sys.platform == "linux":
                raise


def become_unprivileged(folder: str) -> bool:
    """Give up root and every capability. Returns whether the process now has a user of its own.

    If the interpreter is in a folder that only root may enter, such as /root, one capability stays: reading despite
    permissions, so that Landlock alone decides which files.
    """
    own_user = False
    if os.geteuid() == 0:
        libc.prctl(8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS
        for user in (OWN_USERS + os.getpid(), NOBODY):
            try:
                os.chown(folder, user, user)
                os.setgroups([])
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
                own_user = user != NOBODY
                break
            except OSError:  # a container may lack the user or the right
                continue
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
    data = ctypes.create_string_buffer(24)
    checked("capget", libc.capget, header, data)
    permitted = struct.unpack("=6I", data.raw)[1]
    kept = 0
    if os.geteuid() != 0:
        try:
            os.close(os.open(os.__file__, os.O_RDONLY))
            os.stat(folder)
        except PermissionError:
            read_search, override = 1 << 2, 1 << 1  # CAP_DAC_READ_SEARCH, CAP_DAC_OVERRIDE
            kept = permitted & read_search or permitted & override
    data.raw = struct.pack("=6I", kept, kept, 0, 0, 0, 0)
    checked("capset", libc.capset, header, data)
    return own_user


def landlock(folder: str) -> int:
    """Allow reading the interpreter and system libraries, anything in `folder`, and nothing else. Returns Landlock's ABI."""
    abi = checked("Landlock", libc.syscall, 444, None, 0, 1)
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    network = 0b11 if abi >= 4 else 0  # no TCP port may be bound or connected to
    scope = 0b11 if abi >= 6 else 0  # no signals to processes outside, and none of their abstract sockets
    size = 8 * (1 + (abi >= 4) + (abi >= 6))  # each of the three numbers came with an ABI
    attributes = ctypes.create_string_buffer(struct.pack("=QQQ", rights, network, scope))
    ruleset = checked("Landlock", libc.syscall, 444, attributes, size)

    execute, write_file, read_file, read_folder, truncate = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
    special = 0b1001_1110_0100_0000  # making devices, sockets, pipes and links; ioctl on devices

    def permit(path: str, allowed: int) -> None:
        try:
            handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # not on this system
            return
        if not os.path.isdir(path):
            allowed &= write_file | read_file | truncate
        rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed & rights, handle))
        checked(f"Landlock: {path}", libc.syscall, 445, ruleset, 1, rule)
        os.close(handle)

    installation = {*sys.path, *(f"{prefix}/lib" for prefix in (sys.base_prefix, sys.base_exec_prefix) if prefix)}
    system = "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/localtime", "/etc/ld.so.cache"
    for path in (*installation, *system, "/dev/zero", "/dev/random", "/dev/urandom"):
        permit(path, read_file | read_folder)
    permit("/dev/null", read_file | write_file | truncate)
    permit(folder, rights & ~(execute | special))
    quiet = abi >= 7  # denials are not written to the system's log
    checked("Landlock", libc.syscall, 446, ruleset, int(quiet))
    os.close(ruleset)
    return abi


def seccomp(instructions: list[tuple[int, int, int, int]]) -> None:
    """Install the filter of system calls."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *fields) for fields in instructions))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(instructions), ctypes.addressof(code)))
    checked("seccomp", libc.prctl, 22, 2, program)


def die_with(parent: int) -> None:
    """End this process when its parent ends; changing the user would unset it."""
    checked("parent's death", libc.prctl, 1, 9)  # SIGKILL
    if os.getppid() != parent:
        os._exit(1)


def confine(folder: str, parent: int, seconds: float, memory_mb: int, disk_mb: int, threads: int) -> list[str]:
    """Confine this process by all measures but seccomp, and return the names of all. Raises OSError if the platform lacks one of
    them; those before it stay in force."""
    if sys.platform != "linux" or os.uname().machine not in AUDIT_ARCH:
        raise OSError(f"{sys.platform} on {os.uname().machine}")
    checked("no_new_privs", libc.prctl, 38, 1)
    if os.access("/proc/self/oom_score_adj", os.W_OK):
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # if the machine still runs out of memory, this process goes first, not the training
    own_user = become_unprivileged(folder)
    die_with(parent)
    if not own_user:  # the limit counts all threads of the user, of the machine at most: "... running/all pid"
        with open("/proc/loadavg") as file:
            threads += int(file.read().split()[3].partition("/")[2])
    limit_resources(seconds, memory_mb, disk_mb, threads)
    abi = landlock(folder)
    return [f"landlock {abi}", "seccomp", *["own user"] * own_user, "limits"]


def main() -> None:
    """Confine this process, then run the program and the tests of the job."""
    folder, *numbers = sys.argv[1:]
    status, job, unconfined, parent, memory_mb, disk_mb, threads = map(int, numbers[:-1])
    seconds = float(numbers[-1])
    os.set_inheritable(status, False)
    os.set_inheritable(job, False)
    sys.argv = [""]
    try:
        in_force = confine(folder, parent, seconds, memory_mb, disk_mb, threads + 2)
    except OSError as error:
        if not unconfined:
            os.write(status, REFUSED + str(error).encode() + MARK)
            os._exit(1)
        limit_resources(seconds, memory_mb, disk_mb, None)
        in_force = ["limits"]
    run_both(status, job, in_force)


def be_candidate(tester: int, questions: int, reply: int, confined: bool) -> None:
    """Confine this process if the tester is confined, and run the program in it. Never returns."""
    try:
        from tester import run_candidate

        if confined:
            die_with(tester)
            seccomp(seccomp_filter(os.uname().machine, os.getpid()))
        os.write(reply, MARK)
        run_candidate(questions, reply)
    finally:
        os._exit(1)  # no clean-up: exit handlers of the program would come first


def run_both(status: int, job: int, in_force: list[str]) -> None:
    """Fork: this process becomes the tester, the child the candidate. Neither has run or read anything of the row before."""
    from exchange import decode, flush
    from tester import run_tester

    tester = os.getpid()
    questions, ask = os.pipe()
    answers, reply = os.pipe()
    child = os.fork()
    if child == 0:
        for pipe in (job, status, ask, answers):
            os.close(pipe)
        be_candidate(tester, questions, reply, "seccomp" in in_force)
    for pipe in (0, questions, reply):
        os.close(pipe)
    os.open(os.devnull, os.O_RDONLY)  # number 0

    def stop() -> None:
        """Leave no process behind: the parent waits only for this one."""
        try:
            os.kill(child, 9)
            os.waitpid(child, 0)
        except OSError:  # done before
            pass

    def stopped(*_) -> None:
        stop()
        os._exit(1)

    _signal.signal(_signal.SIGTERM, stopped)
    try:
        if "seccomp" in in_force:
            seccomp(seccomp_filter(os.uname().machine, tester, child))
        if os.read(answers, 1) != MARK:
            raise OSError("the candidate's process could not be confined")
    except OSError as error:
        os.write(status, REFUSED + str(error).encode() + MARK)
        stopped()
    with open(job, "rb") as file:
        parts = decode(file.read())
    os.write(status, ", ".join(in_force).encode() + MARK)
    ending = run_tester(answers, ask, *parts)
    stop()
    flush()
    os.write(status, ending)
    os._exit(0)
