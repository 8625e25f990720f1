"""An assembler for classic BPF, as far as seccomp filters need it.

Code is a list of instructions built from the inside out: every block either ends in a `ret` or is meant to fall through
to what follows it, and jumps only go forward. There are no labels; a jump's offset is the length of the block skipped.

The kernel runs a filter symbolically once per system call number and remembers the numbers that are allowed whatever
their arguments (since 5.11). That works only as long as nothing but `nr` and `arch` is loaded on the way to the
verdict, so arguments are loaded in the leaf of the one call that needs them: a plain allowed call then costs next to
nothing.
"""

from __future__ import annotations

import struct
from typing import NamedTuple


class Instruction(NamedTuple):
    """One `struct sock_filter`."""

    code: int
    jump_true: int
    jump_false: int
    operand: int


Code = list[Instruction]

_LOAD_WORD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_AND = 0x54  # BPF_ALU | BPF_AND | BPF_K
_JUMP = 0x05  # BPF_JMP | BPF_JA
_JUMP_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_JUMP_AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K

# Offsets in `struct seccomp_data`. Both machines are little-endian: the low half of an argument comes first.
_NUMBER_AT = 0
_ARCH_AT = 4
_ARGUMENTS_AT = 16

RET_KILL_PROCESS = 0x80000000
RET_ERRNO = 0x00050000
RET_ALLOW = 0x7FFF0000

_FARTHEST = 255  # a conditional jump's offset is one byte
_LONGEST = 4096  # BPF_MAXINSNS
_SOCK_FILTER = struct.Struct("=HBBI")


class Test(NamedTuple):
    """True if `(argument & mask)` is one of `values`; only the argument's low 32 bits are looked at."""

    argument: int
    mask: int
    values: tuple[int, ...]


def allow() -> Code:
    return ret(RET_ALLOW)


def errno(number: int) -> Code:
    """Fails the call with that errno; 0 makes it a call that succeeds and does nothing."""
    return ret(RET_ERRNO | number)


def kill_process() -> Code:
    return ret(RET_KILL_PROCESS)


def ret(verdict: int) -> Code:
    return [Instruction(_RETURN, 0, 0, verdict)]


def only_arch(audit_arch: int, then: Code) -> Code:
    """Kills the process on a call made for any other machine (such as int 0x80 on x86-64), else goes on with `then`."""
    kill = kill_process()
    return [_load(_ARCH_AT), Instruction(_JUMP_EQUAL, len(kill), 0, audit_arch), *kill, *then]


def dispatch(blocks: list[tuple[int, Code]]) -> Code:
    """Runs the block of the last entry whose number is not above the call's; they are sorted, the first at 0."""
    return [_load(_NUMBER_AT), *_search(blocks)]


def clause(tests: tuple[Test, ...], verdict: Code) -> Code:
    """Gives that verdict if all tests hold, else falls through to what follows."""
    code = list(verdict)
    for test in reversed(tests):
        code = _one_of(test, otherwise=len(code)) + code
    return code


def assemble(code: Code) -> bytes:
    """The array of `struct sock_filter` that the kernel takes."""
    if len(code) > _LONGEST:
        raise ValueError(f"a filter of {len(code)} instructions: the kernel takes {_LONGEST}")
    return b"".join(_SOCK_FILTER.pack(*instruction) for instruction in code)


def _load(offset: int) -> Instruction:
    return Instruction(_LOAD_WORD, 0, 0, offset)


def _search(blocks: list[tuple[int, Code]]) -> Code:
    if len(blocks) == 1:
        return blocks[0][1]
    middle = len(blocks) // 2
    below, above = _search(blocks[:middle]), _search(blocks[middle:])
    return [*_unless_at_least(blocks[middle][0], len(below)), *below, *above]


def _unless_at_least(bound: int, skipped: int) -> Code:
    if skipped <= _FARTHEST:
        return [Instruction(_JUMP_AT_LEAST, skipped, 0, bound)]
    return [Instruction(_JUMP_AT_LEAST, 0, 1, bound), Instruction(_JUMP, 0, 0, skipped)]


def _one_of(test: Test, otherwise: int) -> Code:
    """Falls through if the test holds, else skips `otherwise` instructions."""
    if otherwise > _FARTHEST or not 0 < len(test.values) <= _FARTHEST:
        raise ValueError("a rule too long for one conditional jump")
    code = [_load(_ARGUMENTS_AT + 8 * test.argument)]
    if test.mask != 0xFFFFFFFF:
        code.append(Instruction(_AND, 0, 0, test.mask))
    *first, last = test.values
    for index, value in enumerate(first):
        code.append(Instruction(_JUMP_EQUAL, len(first) - index, 0, value))
    return [*code, Instruction(_JUMP_EQUAL, 0, otherwise, last)]
