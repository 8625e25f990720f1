"""Programs, run by an interpreter of classic BPF, for both machines: the kernel here can run only one of them."""

from __future__ import annotations

import errno
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cloche.isolation
from cloche.linux import seccomp
from cloche.linux.syscalls import SYSCALL_NUMBERS

POLICIES = Path(cloche.isolation.__file__).parent / "policy"
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ARCHES = sorted(AUDIT_ARCH)
ENOSYS = seccomp.RET_ERRNO | errno.ENOSYS
EPERM = seccomp.RET_ERRNO | errno.EPERM


def run(program: bytes, number: int, arch: int, args: tuple[int, ...] = ()) -> tuple[int, int]:
    """The verdict, and how many instructions it took."""
    data = struct.pack("=IIQ6Q", number, arch, 0, *(*args, 0, 0, 0, 0, 0, 0)[:6])
    instructions = list(struct.iter_unpack("=HBBI", program))
    at, steps, accumulator = 0, 0, 0
    while True:
        code, jump_true, jump_false, operand = instructions[at]
        at, steps = at + 1, steps + 1
        if code == 0x06:
            return operand, steps
        if code == 0x20:
            accumulator = struct.unpack_from("=I", data, operand)[0]
        elif code == 0x54:
            accumulator &= operand
        elif code == 0x05:
            at += operand
        elif code in (0x15, 0x35):
            at += jump_true if (accumulator == operand if code == 0x15 else accumulator >= operand) else jump_false
        else:
            raise AssertionError(f"unexpected instruction {code:#x}")


def program(name: str, arch: str) -> bytes:
    return seccomp.compile_policy(seccomp.load_policy(POLICIES / f"{name}.toml"), arch)


@pytest.mark.parametrize("arch", ARCHES)
def test_each_number_gets_its_verdict(arch: str) -> None:
    names = {number: name for name, number in SYSCALL_NUMBERS[arch].items()}
    policy = seccomp.load_policy(POLICIES / "cell.toml")
    allowed = {name for line in policy["allow"] for name in line.split()}
    answered = {
        n: getattr(errno, e, 0) for e, table in policy["answer"].items() for line in table for n in line.split()
    }
    filter_ = program("cell", arch)
    for number in range(600):
        name = names.get(number)
        if name in policy["rule"]:
            continue
        expected = seccomp.RET_ALLOW if name in allowed else EPERM if name else ENOSYS
        if name in answered:
            expected = seccomp.RET_ERRNO | answered[name]
        assert run(filter_, number, AUDIT_ARCH[arch])[0] == expected, name


@pytest.mark.parametrize("name", ["cell", "nursery"])
def test_flags_are_those_of_the_machine(name: str) -> None:
    """O_DIRECT of the one is O_DIRECTORY of the other."""
    x86, arm = (program(name, arch) for arch in ("x86_64", "aarch64"))
    for flags, on_x86, on_arm in (
        (0x4000, True, False),
        (0x10000, False, True),
        (0x14000, True, True),
        (0, False, False),
    ):
        for filter_, arch, refused in ((x86, "x86_64", on_x86), (arm, "aarch64", on_arm)):
            number = SYSCALL_NUMBERS[arch]["openat"]
            verdict = seccomp.RET_ERRNO | errno.EINVAL if refused else seccomp.RET_ALLOW
            assert run(filter_, number, AUDIT_ARCH[arch], (0, 0, flags))[0] == verdict, (arch, flags)


@pytest.mark.parametrize("name", ["cell", "nursery"])
@pytest.mark.parametrize("arch", ARCHES)
def test_no_call_runs_more_than_a_few_instructions(name: str, arch: str) -> None:
    filter_ = program(name, arch)
    assert max(run(filter_, number, AUDIT_ARCH[arch])[1] for number in range(600)) <= 24


@pytest.mark.parametrize("arch", ARCHES)
def test_calls_for_another_machine_kill(arch: str) -> None:
    filter_ = program("cell", arch)
    others = {0x40000003, 0x40000028, *AUDIT_ARCH.values()} - {AUDIT_ARCH[arch]}
    assert {run(filter_, 0, other)[0] for other in others} == {seccomp.RET_KILL_PROCESS}


@pytest.mark.parametrize("arch", ARCHES)
def test_numbers_beyond_the_table_look_absent(arch: str) -> None:
    filter_ = program("nursery", arch)
    for number in (0x40000000, 0x40000000 | 59, 0x7FFFFFFF, 0xFFFFFFFF):
        assert run(filter_, number, AUDIT_ARCH[arch])[0] == ENOSYS


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(
    ("name", "args", "allowed"),
    [
        ("clone", (0x01200011,), True),  # fork
        ("clone", (0x003D0F00,), True),  # pthread_create
        ("clone", (0x02000000,), False),  # NEWCGROUP
        ("clone", (0xFFFFFFFF_40000000,), False),  # NEWNET
        ("socket", (1, 1, 0), True),
        ("socket", (10, 2, 17), True),
        ("socket", (16, 3, 0), True),
        ("socket", (16, 3, 9), False),
        ("socket", (40, 1, 0), False),
        ("socketpair", (1,), True),
        ("socketpair", (30,), False),
        ("mknodat", (0, 0, 0o010644), True),
        ("mknodat", (0, 0, 0o020644), False),
        ("mknodat", (0, 0, 0x10000 | 0o060644), False),
        ("ioctl", (0, 0x5401), True),
        ("ioctl", (0, 0x5412), False),
        ("ioctl", (0, 0xFFFFFFFF_00005412), False),
        ("prlimit64", (0, 4, 0, 1), True),
        ("prlimit64", (0, 4, 1 << 32, 0), False),
        ("prlimit64", (0, 4, 1, 0), False),
        ("prlimit64", (0, 7, 1, 0), True),
        ("setrlimit", (4, 1), False),
        ("setrlimit", (0x1_0000_0004, 1), False),
        ("setrlimit", (7, 1), True),
        ("prctl", (15,), True),
        ("prctl", (22,), False),
        ("prctl", (35,), False),
        ("personality", (0xFFFFFFFF,), True),
        ("personality", (0x0400000,), False),
    ],
)
def test_arguments_decide(arch: str, name: str, args: tuple[int, ...], allowed: bool) -> None:
    verdict, _ = run(program("cell", arch), SYSCALL_NUMBERS[arch][name], AUDIT_ARCH[arch], args)
    assert (verdict == seccomp.RET_ALLOW) == allowed


@settings(max_examples=50, deadline=None)
@given(
    bounds=st.sets(st.integers(1, 2000), min_size=1, max_size=900), numbers=st.lists(st.integers(0, 2100), max_size=30)
)
def test_the_search_finds_the_block_however_long_the_jumps(bounds: set[int], numbers: list[int]) -> None:
    starts = sorted(bounds | {0})
    filter_ = seccomp.assemble_filter(
        seccomp.require_arch(1, seccomp.dispatch_numbers([(start, seccomp.return_verdict(start)) for start in starts]))
    )
    for number in numbers:
        assert run(filter_, number, 1)[0] == max(start for start in starts if start <= number)


def test_a_program_longer_than_the_kernel_takes_is_refused() -> None:
    with pytest.raises(ValueError, match="4096"):
        seccomp.assemble_filter(seccomp.return_allow() * 4097)
