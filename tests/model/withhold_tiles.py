"""Run a Python program without permission to use AMX.

    python withhold_tiles.py -m pytest ...

A seccomp filter rejects every request for permission, including those of matrix libraries.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

ARCH_PRCTL, REQUEST_PERMISSION = 158, 0x1023
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2
_REFUSE, _ALLOW = 0x50000 | errno.EPERM, 0x7FFF0000
# Instructions of a packet filter: code, jumps if true and if false, operand. They load words of `struct seccomp_data`.
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_FILTER = (
    (_LOAD, 0, 0, 0),  # system call number
    (_JUMP_IF_EQUAL, 0, 3, ARCH_PRCTL),
    (_LOAD, 0, 0, 16),  # first argument
    (_JUMP_IF_EQUAL, 0, 1, REQUEST_PERMISSION),
    (_RETURN, 0, 0, _REFUSE),
    (_RETURN, 0, 0, _ALLOW),
)


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction)))


def withhold() -> None:
    """Deny this process and its children permission to use tiles."""
    instructions = (_Instruction * len(_FILTER))(*_FILTER)
    program, libc = _Program(len(_FILTER), instructions), ctypes.CDLL(None, use_errno=True)
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0), (_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program))):
        if libc.prctl(*arguments, 0, 0):
            raise OSError(ctypes.get_errno(), "the kernel refuses a filter of system calls")


if __name__ == "__main__":
    withhold()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
