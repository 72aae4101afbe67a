"""Ties a process to the life of its parent, so that nothing outlives a killed `manage.py start` (Linux).

Run as a script it ties itself, takes on another user if asked, and becomes the command it was given. The tie is made
after the change of user, because the kernel drops it with a change of credentials, and it survives the exec. It does
not pass to grandchildren: `tie_forks()` does that for processes that fork (the cluster of django-q2).
"""

import ctypes
import os
import pwd
import signal
import sys

PR_SET_PDEATHSIG = 1


def tie(*, to: int | None = None, with_signal: int = signal.SIGKILL) -> None:
    """Have the kernel send `with_signal` to this process when its parent dies; does nothing where there is no prctl.

    `to` is the parent that the caller means. The tie only counts from now on: a parent that died before it was made
    would never be noticed, so that case ends the process at once.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(with_signal), 0, 0, 0)
    if to is not None and os.getppid() != to:
        os.kill(os.getpid(), with_signal)


def tie_forks() -> None:
    """Tie this process, and every process that it or its children fork from now on, to its own parent."""
    tie()
    forking: list[int] = [0]
    os.register_at_fork(
        before=lambda: forking.__setitem__(0, os.getpid()),
        after_in_child=lambda: tie(to=forking[0]),
    )


def become(*, user: str) -> None:
    """Give up root for `user`."""
    entry = pwd.getpwnam(user)
    os.setgroups([])
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)


def command(*argv: str, user: str | None = None, with_signal: int = signal.SIGKILL) -> list[str]:
    """Return the command line that runs `argv` tied to the calling process."""
    return [sys.executable, "-I", __file__, str(os.getpid()), str(int(with_signal)), user or "", *argv]


def main(parent: str, with_signal: str, user: str, *argv: str) -> None:
    if user:
        become(user=user)
    tie(to=int(parent), with_signal=int(with_signal))
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main(*sys.argv[1:])
