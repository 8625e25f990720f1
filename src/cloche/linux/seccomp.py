"""System call filters: a policy (TOML, one reason per line) is compiled to a BPF program and installed.

Compiling happens on the host; code inside a sandbox gets the bytes of a `SeccompFilter`. A policy
looks so:

    extends = "other.toml"              # entries here replace entries there, call by call
    default = "EPERM"                   # for the calls that are known and not mentioned

    [constants]
    AF_UNIX = 1
    O_DIRECT = { x86_64 = 0x4000, aarch64 = 0x10000 }       # where machines differ

    [allow]
    "read readv" = "the reason"

    [answer.ENOSYS]                     # an errno by its name; OK: succeed and do nothing; LISTENER: it answers
    clone3 = "the reason"

    [rule.socket]
    allow = [["arg0 in AF_UNIX"], ["arg0 & 0xf in 2 10", "arg2 in 0"]]      # any of these lists, all tests of it
    errno = "EAFNOSUPPORT"              # otherwise; the default if absent. With `deny`: if any list holds
    answer.ENOSYS = [["arg0 in 16"]]    # looked at first: other answers than `errno`, or OK
    reason = "the reason"

Only the low 32 bits of an argument are compared. Nearly every argument that a rule can sensibly look at is an
`int` to the kernel, which ignores the upper half too; comparing all 64 bits would let a caller slip past a
`deny` by setting them. For pointers, `arg0 high in 0` looks at the upper half.

Numbers that the table does not know get ENOSYS, the answer of a kernel that does not have them, so that a C
library newer than this table falls back as it would there. The x32 numbers (bit 30) are among them.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import platform
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

from cloche.linux.syscalls import SYSCALL_NUMBERS, syscall

# An assembler for classic BPF, as far as seccomp filters need it.
#
# Code is a list of instructions built from the inside out: every block either ends in a `ret` or is meant to
# fall through to the next block, and jumps only go forward. There are no labels; a jump's offset is the length
# of the block skipped.
#
# The kernel runs a filter symbolically once per system call number and remembers the numbers that are allowed
# for all arguments (since 5.11). That works only as long as nothing but `nr` and `arch` is loaded on the way to
# the verdict, so arguments are loaded in the leaf of the one call that needs them: a plain allowed call then
# costs next to nothing.


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
RET_USER_NOTIF = 0x7FC00000
RET_ALLOW = 0x7FFF0000

_LEAF_VALUES = 4  # so few are compared one by one
_FARTHEST = 255  # a conditional jump's offset is one byte
_LONGEST = 4096  # BPF_MAXINSNS
_SOCK_FILTER = struct.Struct("=HBBI")


class ArgumentTest(NamedTuple):
    """True if `(argument & mask)` is one of `values`; 32 bits are compared, the argument's low ones if not `high`."""

    argument: int
    mask: int
    values: tuple[int, ...]
    high: bool = False


def return_allow() -> Code:
    return return_verdict(RET_ALLOW)


def return_errno(number: int) -> Code:
    """Fails the call with that errno; 0 makes it a call that succeeds and does nothing."""
    return return_verdict(RET_ERRNO | number)


def return_listener() -> Code:
    """Hands the call over to the filter's listener; without one it fails with ENOSYS."""
    return return_verdict(RET_USER_NOTIF)


def return_kill() -> Code:
    return return_verdict(RET_KILL_PROCESS)


def return_verdict(verdict: int) -> Code:
    return [Instruction(_RETURN, 0, 0, verdict)]


def require_arch(audit_arch: int, then: Code) -> Code:
    """Kills the process on a call made for any other machine (such as int 0x80 on x86-64), else goes on with `then`."""
    kill = return_kill()
    return [_load_word(_ARCH_AT), Instruction(_JUMP_EQUAL, len(kill), 0, audit_arch), *kill, *then]


def dispatch_numbers(blocks: list[tuple[int, Code]]) -> Code:
    """Runs the block of the last entry with a number not above the call's; they are sorted, the first at 0."""
    return [_load_word(_NUMBER_AT), *_search_number(blocks)]


def verdict_if_all(tests: tuple[ArgumentTest, ...], verdict: Code) -> Code:
    """Returns that verdict if all tests hold, else falls through to the next block."""
    code = list(verdict)
    for test in reversed(tests):
        code = _test_argument(test, otherwise=len(code)) + code
    return code


Clause = tuple[tuple[ArgumentTest, ...], Code]
"""A verdict, and the tests that must all hold for it."""


def verdict_of_first(clauses: list[Clause]) -> Code:
    """The verdict of the first clause whose tests hold; falls through if there is none."""
    firsts = [tests[0] for tests, _ in clauses if len(tests) > 1]
    kinds = {first._replace(values=()) for first in firsts}
    if (
        len(clauses) < 3
        or len(firsts) < len(clauses)
        or len(kinds) > 1
        or any(len(first.values) > 1 for first in firsts)
    ):
        return [instruction for tests, verdict in clauses for instruction in verdict_if_all(tests, verdict)]
    return _select_by_first_test(clauses)


def _select_by_first_test(clauses: list[Clause]) -> Code:
    """The same for clauses that begin with one value of one argument: it is loaded once, not for each of them."""
    groups: dict[int, Code] = {}
    for tests, verdict in clauses:
        groups.setdefault(tests[0].values[0], []).extend(verdict_if_all(tests[1:], verdict))
    code: Code = []
    for value, group in reversed(groups.items()):
        group.append(Instruction(_JUMP, 0, 0, len(code)))
        if len(group) > _FARTHEST:
            raise ValueError("a rule too long for one conditional jump")
        code = [Instruction(_JUMP_EQUAL, 0, len(group), value), *group, *code]
    return [*_load_argument(clauses[0][0][0]), *code]


def assemble_filter(code: Code) -> bytes:
    """The array of `struct sock_filter` that the kernel takes."""
    if len(code) > _LONGEST:
        raise ValueError(f"a filter of {len(code)} instructions: the kernel takes {_LONGEST}")
    return b"".join(_SOCK_FILTER.pack(*instruction) for instruction in code)


def _load_word(offset: int) -> Instruction:
    return Instruction(_LOAD_WORD, 0, 0, offset)


def _search_number(blocks: list[tuple[int, Code]]) -> Code:
    if len(blocks) == 1:
        return blocks[0][1]
    middle = len(blocks) // 2
    below, above = _search_number(blocks[:middle]), _search_number(blocks[middle:])
    return [*_unless_at_least(blocks[middle][0], len(below)), *below, *above]


def _unless_at_least(bound: int, skipped: int) -> Code:
    if skipped <= _FARTHEST:
        return [Instruction(_JUMP_AT_LEAST, skipped, 0, bound)]
    return [Instruction(_JUMP_AT_LEAST, 0, 1, bound), Instruction(_JUMP, 0, 0, skipped)]


def _test_argument(test: ArgumentTest, otherwise: int) -> Code:
    """Falls through if the test holds, else skips `otherwise` instructions."""
    search = _search_value(sorted(test.values), 0, otherwise)
    if any(step.jump_true > _FARTHEST or step.jump_false > _FARTHEST for step in search):
        raise ValueError("a rule too long for one conditional jump")
    return [*_load_argument(test), *search]


def _load_argument(test: ArgumentTest) -> Code:
    load = _load_word(_ARGUMENTS_AT + 8 * test.argument + 4 * test.high)
    return [load] if test.mask == 0xFFFFFFFF else [load, Instruction(_AND, 0, 0, test.mask)]


def _search_value(values: list[int], matched: int, otherwise: int) -> Code:
    """Skips `matched` instructions for one of the values, and `otherwise` more for any other."""
    if len(values) <= _LEAF_VALUES:
        *first, last = values
        steps = [Instruction(_JUMP_EQUAL, len(first) - index + matched, 0, value) for index, value in enumerate(first)]
        return [*steps, Instruction(_JUMP_EQUAL, matched, matched + otherwise, last)]
    middle = len(values) // 2
    above = _search_value(values[middle:], matched, otherwise)
    below = _search_value(values[:middle], matched + len(above), otherwise)
    return [Instruction(_JUMP_AT_LEAST, len(below), 0, values[middle]), *below, *above]


Policy = dict[str, Any]

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SECTIONS = {"extends", "default", "constants", "allow", "answer", "rule"}
_TEST = re.compile(r"arg([0-5])( high)?(?: & (\S+))? in (.+)")
_SECCOMP_SET_MODE_FILTER = 1
_NEW_LISTENER, _WAIT_KILLABLE_RECV = 8, 32
_KNOWN_CALLS = {name for numbers in SYSCALL_NUMBERS.values() for name in numbers}


class PolicyError(ValueError):
    """A policy that cannot be compiled; the message names the line's subject and its mistake."""


def load_policy(path: Path) -> Policy:
    """Reads a policy file and those it extends, which lie in the same directory."""
    policy = _parse_policy(path.read_text(encoding="utf-8"))
    if "extends" in policy:
        policy["extends"] = load_policy(path.parent / policy["extends"])
    return policy


def compile_policy(policy: Policy | str, arch: str | None = None) -> bytes:
    """The program (an array of `struct sock_filter`) of a policy for that machine, this one if not said.

    `policy` is a result of `load_policy`, or the text of a policy that extends nothing. Raises PolicyError.
    """
    arch = arch or platform.machine()
    if arch not in SYSCALL_NUMBERS:
        raise PolicyError(f"no system call numbers for {arch!r}: Cloche runs on {' and '.join(SYSCALL_NUMBERS)}")
    verdicts = _call_verdicts(_parse_policy(policy) if isinstance(policy, str) else policy, arch)
    blocks = _number_ranges(verdicts, SYSCALL_NUMBERS[arch])
    return assemble_filter(require_arch(_AUDIT_ARCH[arch], dispatch_numbers(blocks)))


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


class SeccompFilter:
    """A program, ready to be installed any number of times."""

    def __init__(self, program: bytes):
        self._program = _FilterProgram(len(program) // 8, program)
        self._address = ctypes.addressof(self._program)
        self._number = SYSCALL_NUMBERS[platform.machine()]["seccomp"]

    def install(self) -> None:
        """Puts the calling thread, and its later children, behind the filter; there is no way back. Filters add up.

        Needs no_new_privs or CAP_SYS_ADMIN in the caller's user namespace, else raises PermissionError.

        No flags. SPEC_ALLOW in particular stays off: before Linux 5.16, and where the operator boots with
        `spectre_v2_user=seccomp`, a filter also keeps the process from steering other processes' branch prediction.
        The code in here is hostile, so that is wanted; by a newer kernel's defaults a filter changes nothing about
        it.
        """
        syscall(self._number, _SECCOMP_SET_MODE_FILTER, 0, self._address, name="seccomp")

    def install_with_listener(self) -> int | None:
        """As `install`; returns the listener: see `seccomp_listener`.

        None, with the calls meant for it failing with ENOSYS, where the process is behind a filter with another one.
        """
        for flags in (_NEW_LISTENER | _WAIT_KILLABLE_RECV, _NEW_LISTENER):  # the second flag: Linux 5.19
            try:
                return syscall(self._number, _SECCOMP_SET_MODE_FILTER, flags, self._address, name="seccomp")
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EBUSY):
                    raise
        self.install()
        return None


def _parse_policy(text: str) -> Policy:
    import tomllib  # only on the host, which has 3.11

    return tomllib.loads(text)


def _number_ranges(verdicts: dict[str, Code], numbers: dict[str, int]) -> list[tuple[int, Code]]:
    """Ranges of numbers with the same verdict, so that the search is over as few as can be."""
    unknown = return_errno(errno.ENOSYS)
    by_number = {number: verdicts[name] for name, number in numbers.items()}
    every = ((number, by_number.get(number, unknown)) for number in range(max(by_number) + 2))
    groups = itertools.groupby(every, key=lambda entry: entry[1])
    return [(next(entries)[0], verdict) for verdict, entries in groups]


def _call_verdicts(policy: Policy, arch: str) -> dict[str, Code]:
    """The verdict of each known system call."""
    stated = _stated_verdicts(policy, arch)
    return {**dict.fromkeys(_KNOWN_CALLS, return_errno(_errno_number(_default_errno(policy)))), **stated}


def _default_errno(policy: Policy) -> str:
    inherited = _default_errno(policy["extends"]) if "extends" in policy else "EPERM"
    return str(policy.get("default", inherited))


def _stated_verdicts(policy: Policy, arch: str) -> dict[str, Code]:
    """The verdict of each call that this policy mentions, over those of the policy it extends."""
    _check_sections(policy)
    own: dict[str, Code] = {}
    for name, verdict in _policy_lines(policy, arch):
        if name not in _KNOWN_CALLS:
            raise PolicyError(f"{name!r} is no system call")
        if name in own:
            raise PolicyError(f"{name!r} is mentioned twice")
        own[name] = verdict
    return {**_stated_verdicts(policy["extends"], arch), **own} if "extends" in policy else own


def _check_sections(policy: Policy) -> None:
    if unknown := policy.keys() - _SECTIONS:
        raise PolicyError(f"unknown sections: {', '.join(sorted(unknown))}")
    if isinstance(policy.get("extends"), str):
        raise PolicyError("a policy that extends another must come from load_policy")


def _policy_lines(policy: Policy, arch: str) -> list[tuple[str, Code]]:
    allowed = [(name, return_allow()) for name in _call_names(policy.get("allow", {}))]
    answered = [
        (name, _answer_verdict(answer))
        for answer, table in policy.get("answer", {}).items()
        for name in _call_names(table)
    ]
    constants = _merged_constants(policy, arch)
    default = _default_errno(policy)
    ruled = [(name, _compile_rule(name, rule, constants, default)) for name, rule in policy.get("rule", {}).items()]
    return allowed + answered + ruled


def _call_names(table: dict[str, str]) -> list[str]:
    for names, reason in table.items():
        if not isinstance(reason, str) or not reason.strip():
            raise PolicyError(f"{names!r} has no reason")
    return [name for names in table for name in names.split()]


def _merged_constants(policy: Policy, arch: str) -> dict[str, int]:
    inherited = _merged_constants(policy["extends"], arch) if "extends" in policy else {}
    own = policy.get("constants", {}).items()
    return {**inherited, **{name: value[arch] if isinstance(value, dict) else value for name, value in own}}


def _compile_rule(name: str, rule: Policy, constants: dict[str, int], default: str) -> Code:
    if (
        not rule.get("reason")
        or ("allow" in rule) == ("deny" in rule)
        or rule.keys() - {"allow", "deny", "errno", "answer", "reason"}
    ):
        raise PolicyError(f"rule {name!r} needs a reason, and either allow or deny")
    refused = return_errno(_errno_number(rule.get("errno", default)))
    hit, miss = (return_allow(), refused) if "allow" in rule else (refused, return_allow())
    verdicts = [(_answer_verdict(name), clauses) for name, clauses in rule.get("answer", {}).items()]
    verdicts.append((hit, rule.get("allow") or rule["deny"]))
    tests = [
        (tuple(_parse_test(text, constants) for text in texts), verdict)
        for verdict, clauses in verdicts
        for texts in clauses
    ]
    return verdict_of_first(_merge_clauses(tests)) + miss


def _merge_clauses(clauses: list[Clause]) -> list[Clause]:
    """The same clauses, with neighbours in one that differ in the values of their last test only."""
    merged: list[Clause] = []
    for tests, verdict in clauses:
        before, known = merged[-1] if merged else ((), verdict)
        if before and known == verdict and _forget_last_values(before) == _forget_last_values(tests):
            merged.pop()
            tests = (*tests[:-1], tests[-1]._replace(values=before[-1].values + tests[-1].values))
        merged.append((tests, verdict))
    return merged


def _forget_last_values(tests: tuple[ArgumentTest, ...]) -> tuple[ArgumentTest, ...]:
    return (*tests[:-1], tests[-1]._replace(values=()))


def _parse_test(text: str, constants: dict[str, int]) -> ArgumentTest:
    match = _TEST.fullmatch(text)
    if not match:
        raise PolicyError(f"{text!r} is no test: write 'arg0 in A B' or 'arg0 & MASK in A B'")
    mask = _parse_integer(match[3], constants) if match[3] else 0xFFFFFFFF
    values = tuple(_parse_integer(word, constants) for word in match[4].split())
    return ArgumentTest(int(match[1]), mask, values, high=bool(match[2]))


def _parse_integer(word: str, constants: dict[str, int]) -> int:
    try:
        value = constants[word] if word in constants else int(word, 0)
    except ValueError:
        raise PolicyError(f"{word!r} is neither a number nor among the constants") from None
    if not 0 <= value <= 0xFFFFFFFF:
        raise PolicyError(f"{word!r} does not fit into 32 bits")
    return value


def _answer_verdict(name: str) -> Code:
    return return_listener() if name == "LISTENER" else return_errno(_errno_number(name))


def _errno_number(name: str) -> int:
    number = 0 if name == "OK" else getattr(errno, name, None)
    if not isinstance(number, int):
        raise PolicyError(f"{name!r} is no errno")
    return number
