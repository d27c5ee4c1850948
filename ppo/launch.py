"""Becomes another program, one that ends with its parent.

    python launch.py SIGNAL [--as-nobody | --as-nobody-with-reach] COMMAND ...

A child of a killed `ppo up` would otherwise live on and hold the data folder. The signal is set here, after the
account was changed (which would clear it) and before the program starts, so that there is no moment without it.

PostgreSQL refuses to run as root. Started by root it runs as the account `nobody`; where the way to its programs or
data leads through folders closed to that account, such as /root, it keeps the one capability that reaching them takes.

Runs by itself, with the standard library alone: it imports nothing of ours.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import signal
import struct
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_SECUREBITS = 28
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_RAISE = 2
_SECBIT_NO_SETUID_FIXUP = 4
_CAP_DAC_OVERRIDE = 1
_CAPABILITY_VERSION_3 = 0x20080522
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}


def _prctl(*arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(*(ctypes.c_ulong(argument) for argument in arguments)) != 0:
        raise OSError(ctypes.get_errno(), f"prctl{arguments}: {os.strerror(ctypes.get_errno())}")


def _keep_only(capability: int) -> None:
    """Hold one capability, across exec too, and no other."""
    libc = ctypes.CDLL(None, use_errno=True)
    bit = 1 << capability
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    data = struct.pack("=6I", bit, bit, bit, 0, 0, 0)  # effective, permitted, inheritable; low and high words
    if libc.syscall(_SYS_CAPSET[os.uname().machine], header, data) != 0:
        raise OSError(ctypes.get_errno(), f"capset: {os.strerror(ctypes.get_errno())}")
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, capability, 0, 0)


def become_nobody(with_reach: bool) -> None:
    """Give up root for good; `with_reach` keeps the right to pass closed folders."""
    account = pwd.getpwnam("nobody")
    if with_reach:
        # Without this bit access(2), by which PostgreSQL looks for its own programs, would not see the capability.
        _prctl(_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP, 0, 0, 0)
    os.setgroups([])
    os.setgid(account.pw_gid)
    os.setuid(account.pw_uid)
    if with_reach:
        _keep_only(_CAP_DAC_OVERRIDE)


def main(arguments: list[str]) -> None:
    parent = os.getppid()
    signum = signal.Signals[arguments.pop(0)]
    if arguments[0].startswith("--as-nobody"):
        become_nobody(with_reach=arguments.pop(0) == "--as-nobody-with-reach")
    _prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent:  # it died before the signal was set
        sys.exit(1)
    os.execvp(arguments[0], arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
