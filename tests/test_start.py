"""`manage.py start` with real processes: what it refuses, what it runs, and that nothing of it stays behind."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import psutil
import psycopg
import pytest
from django.db import connections

from audit.migrations import __path__ as audit_migrations
from console import embedded, preflight, tether
from console.preflight import CannotStart, Facts
from drill import place
from tests.processes import wait_until

ROOT = Path(__file__).parent.parent
READY = "Aftercall is at (http://\\S+)"
PATIENCE = 20  # seconds; an idle machine needs one or two


def environ(**more):
    """The environment of a person who starts Aftercall: nothing of the tests in it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AFTERCALL_", "DATABASE_"))}
    return {**kept, "DJANGO_SETTINGS_MODULE": "console.settings", **more}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Start:
    """A running `manage.py start`."""

    def __init__(self, folder, *options, **more):
        self.log = folder.with_name(folder.name + ".log")
        self.port = free_port()
        argv = [sys.executable, "manage.py", "start", "--port", str(self.port), *options]
        with open(self.log, "w") as out:
            self.process = subprocess.Popen(
                tether.command(*argv, with_signal=signal.SIGTERM),
                cwd=ROOT,
                env=environ(AFTERCALL_VAR=str(folder), **more),
                stdout=out,
                stderr=out,
            )

    def said(self):
        return self.log.read_text()

    def address(self):
        def found():
            assert self.process.poll() is None, self.said()
            return re.search(READY, self.said())

        return wait_until(found, seconds=120)[1]

    def family(self):
        return psutil.Process(self.process.pid).children(recursive=True)

    def one(self, *words):
        """The process directly below whose command line holds all words."""
        children = psutil.Process(self.process.pid).children()
        return next((child for child in children if set(words) <= set(words_of(child))), None)

    def end(self, number):
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)


def words_of(process):
    """The command line of a process that may be about to vanish."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


@pytest.fixture
def started():
    running = []

    def start(folder, *options, **more):
        running.append(Start(folder, *options, **more))
        return running[-1]

    yield start
    for one in running:
        if one.process.poll() is None:
            one.end(signal.SIGTERM)


def refused(*options, **more):
    """Start, expect the refusal, and return its one sentence."""
    if "--host" not in options:
        more.setdefault("AFTERCALL_URL", "http://127.0.0.1:8000")  # saves one new beginning
    ended = subprocess.run(
        [sys.executable, "manage.py", "start", *options],
        cwd=ROOT,
        env=environ(**more),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    sentence = ended.stderr.strip()
    assert sentence.count("\n") == 0, sentence
    return sentence


@pytest.mark.processes
def test_it_runs_restarts_what_dies_ends_on_ctrl_c_and_finds_its_data_again(folder, started):
    var = folder / "var"
    first = started(var)
    assert first.address() == f"http://127.0.0.1:{first.port}"
    assert (var / "address").read_text() == f"http://127.0.0.1:{first.port}\n"
    with socket.create_connection(("127.0.0.1", first.port), timeout=PATIENCE) as web:
        web.sendall(b"GET /nowhere HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
        assert b"content-security-policy" in web.recv(4096).lower()

    worker = wait_until(lambda: first.one("manage.py", "qcluster"), seconds=PATIENCE)
    worker.kill()
    wait_until(lambda: (new := first.one("manage.py", "qcluster")) and new.pid != worker.pid, seconds=PATIENCE)
    assert "was ended by SIGKILL; it is started again" in first.said()

    with psycopg.connect(embedded.url(var / "postgres", database="aftercall"), autocommit=True) as superuser:
        superuser.execute("CREATE TABLE kept AS SELECT 1 AS one")

    assert "already runs from" in refused("--port", str(free_port()), AFTERCALL_VAR=str(var))

    family, began = first.family(), time.monotonic()
    assert first.end(signal.SIGINT) == 0
    assert time.monotonic() - began < PATIENCE
    assert psutil.wait_procs(family, timeout=PATIENCE)[1] == []

    second = started(var)
    second.address()
    with psycopg.connect(embedded.url(var / "postgres", database="aftercall")) as superuser:
        assert superuser.execute("SELECT one FROM kept").fetchone() == (1,)


@pytest.mark.processes
def test_a_killed_parent_leaves_nothing_behind_and_does_not_stop_the_next_start(folder, started):
    var = folder / "var"
    first = started(var)
    first.address()
    # The cluster's workers are grandchildren: they are what a parent-death signal alone would leave.
    family = wait_until(
        lambda: (now := first.family()) and sum("qcluster" in words_of(one) for one in now) >= 5 and now,
        seconds=PATIENCE,
    )
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    assert psutil.wait_procs(family, timeout=PATIENCE)[1] == []
    started(var).address()


@pytest.mark.processes
def test_a_start_says_where_to_read_why_nothing_is_sent(folder, started):
    var = folder / "var"
    first = started(var)
    first.address()
    assert "Nothing is sent" not in first.said()
    assert first.end(signal.SIGINT) == 0
    (var / "anchor.json").unlink()
    second = started(var)
    second.address()
    wait_until(lambda: f"Nothing is sent until a person has looked at {second.address()}/restore" in second.said())


@pytest.mark.processes
def test_it_ends_with_the_make_that_ran_it(folder):
    log = folder / "log"
    argv = [sys.executable, "manage.py", "start", "--end-with-parent", "--port", str(free_port())]
    with open(log, "w") as out:
        above = subprocess.Popen(
            [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])", *argv],
            cwd=ROOT,
            env=environ(AFTERCALL_VAR=str(folder / "var")),
            stdout=out,
            stderr=out,
        )
    wait_until(lambda: above.poll() is not None or re.search(READY, log.read_text()), seconds=120)
    assert above.poll() is None, log.read_text()
    family = psutil.Process(above.pid).children(recursive=True)
    assert len(family) > 5
    above.kill()
    above.wait()
    assert psutil.wait_procs(family, timeout=PATIENCE)[1] == []
    assert "Ended." in log.read_text()


@pytest.mark.processes
def test_a_database_killed_with_its_pid_file_left_is_started_again(folder):
    data = folder / "postgres"
    server = embedded.start(data)
    server.kill()
    server.wait()
    pid_file = data / "postmaster.pid"
    assert pid_file.exists()
    # The number may by then belong to another program of the same user.
    other = subprocess.Popen(tether.command("/bin/sleep", "60", user="pgserver" if os.geteuid() == 0 else None))
    wait_until(lambda: "sleep" in psutil.Process(other.pid).name())
    pid_file.write_text(f"{other.pid}\n" + pid_file.read_text().split("\n", 1)[1])
    again = embedded.start(data)
    try:
        assert psycopg.connect(embedded.url(data)).execute("SELECT 1").fetchone() == (1,)
        with pytest.raises(embedded.EmbeddedError, match=f"already running as process {again.pid}"):
            embedded.start(data)
    finally:
        embedded.stop(again)
        other.kill()
        other.wait()


@pytest.fixture
def left_session(folder):
    """A killed server of which one session, frozen, still holds the memory: (data folder, the session's pid)."""
    data = folder / "postgres"
    server = embedded.start(data)
    connection = psycopg.connect(embedded.url(data))
    session = connection.info.backend_pid
    os.kill(session, signal.SIGSTOP)
    server.kill()
    server.wait()
    yield data, session
    with contextlib.suppress(ProcessLookupError):
        os.kill(session, signal.SIGKILL)
    connection.close()


@pytest.mark.processes
def test_a_start_waits_for_the_last_session_of_a_killed_server_however_much_the_new_one_says(left_session):
    data, session = left_session

    def end_it_when_it_was_met():
        wait_until(lambda: embedded.STILL_IN_USE in (data / "server.log").read_text())
        os.kill(session, signal.SIGKILL)

    ending = Thread(target=end_it_when_it_was_met)
    ending.start()
    server = embedded.start(data, options=("log_min_messages=debug3",))
    try:
        assert psycopg.connect(embedded.url(data)).execute("SELECT 1").fetchone() == (1,)
    finally:
        embedded.stop(server)
        ending.join()


@pytest.mark.processes
def test_a_start_that_waited_in_vain_says_what_was_in_the_way(left_session):
    data, _ = left_session
    with pytest.raises(embedded.EmbeddedError, match="pre-existing shared memory block"):
        embedded.start(data, wait=1)


@pytest.mark.processes
def test_the_drill_kills_a_server_with_its_sessions(folder):
    server = embedded.start(folder / "postgres")
    with psycopg.connect(embedded.url(folder / "postgres")) as connection:
        session = psutil.Process(connection.info.backend_pid)
        session.suspend()  # it would not notice by itself that its server is gone
        place.kill(server)
        connection.close()
    assert not session.is_running() or session.status() == psutil.STATUS_ZOMBIE


@pytest.mark.processes
def test_a_half_made_data_folder_is_made_anew(folder):
    half = folder / "postgres.new"
    half.mkdir()
    (half / "PG_VERSION").write_text("18\n")
    embedded.stop(embedded.start(folder / "postgres"))
    assert not half.exists()


@pytest.mark.processes
def test_a_path_too_long_for_a_socket_works(folder):
    data = folder / ("long" * 20) / "postgres"
    assert embedded.socket_folder(data) != data
    embedded.stop(embedded.start(data))


def test_a_taken_port_is_said(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        said = refused("--port", str(port), AFTERCALL_VAR=str(tmp_path))
    assert said == (
        f"Port {port} on 127.0.0.1 is taken; end what listens there or start with --port and another number."
    )


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").touch()
    said = refused(AFTERCALL_VAR=str(tmp_path / "file" / "var"))
    assert re.search("The folder .*/file/var cannot be written .*set AFTERCALL_VAR to a folder that is", said)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgres:hush@nowhere", "DATABASE_URL does not begin with postgresql://; it should look like"),
        ("postgresql://app:hush@127.0.0.1:{port}/ledger", "Connection refused); start that server or correct"),
        ("postgresql://app:hush@127.0.0.1/ledger?colour=red", "carries a parameter that PostgreSQL does not know"),
    ],
)
def test_a_database_that_cannot_be_used_is_said_without_its_password(tmp_path, url, said):
    url = url.format(port=free_port())
    sentence = refused("--port", str(free_port()), AFTERCALL_VAR=str(tmp_path), DATABASE_URL=url)
    assert said in sentence
    assert "hush" not in sentence


def test_the_throw_away_database_of_the_tests_is_refused(ledger_db, database_url_env, tmp_path):
    urls = {name: database_url_env[name] for name in ("DATABASE_URL", "DATABASE_OWNER_URL")}
    said = refused("--port", str(free_port()), AFTERCALL_VAR=str(tmp_path), **urls)
    assert "fsync off" in said or "aftercall_now()" in said


def test_the_movable_clock_of_the_tests_is_seen(ledger_db):
    facts = preflight.read_facts(connections["default"].settings_dict, name="DATABASE_URL")
    assert "test_clock" in facts.clock


def test_the_clock_that_is_expected_is_the_one_that_migrations_make():
    text = (Path(audit_migrations[0]) / "0001_initial.py").read_text()
    assert f"AS '{preflight.CLOCK}'" in text


GOOD = {"version": 18, "is_replica": False, "fsync": "on", "synchronous_commit": "on", "clock": preflight.CLOCK}


@pytest.mark.parametrize("fine", [{}, {"version": 15}, {"clock": None}, {"synchronous_commit": "remote_apply"}])
def test_a_good_server_passes(fine):
    preflight.judge(Facts(**{**GOOD, **fine}))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"version": 14}, "is PostgreSQL 14; Aftercall needs 15 or newer"),
        ({"is_replica": True}, "is a replica that takes no writes; point DATABASE_URL at the primary"),
        ({"fsync": "off"}, "set fsync = on"),
        ({"synchronous_commit": "off"}, "set synchronous_commit = on"),
        ({"clock": "SELECT now()"}, "use a database that was not made for tests"),
    ],
)
def test_a_server_that_could_lose_or_mistime_a_commit_is_refused(wrong, said):
    with pytest.raises(CannotStart, match=re.escape(said)):
        preflight.judge(Facts(**{**GOOD, **wrong}))


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::"])
def test_the_example_listens_on_this_machine_only(tmp_path, host):
    said = refused("--example", "--host", host, AFTERCALL_VAR=str(tmp_path))
    assert said == f"The example lets anybody in, so it listens on this machine only, not on {host}."


def test_the_example_is_refused_in_production(tmp_path):
    said = refused("--example", "--port", str(free_port()), AFTERCALL_VAR=str(tmp_path), AFTERCALL_ENV="production")
    assert said.startswith("AFTERCALL_EXAMPLE is on, but AFTERCALL_ENV says production.")


@pytest.mark.parametrize("value", ["soon", "nan"])
def test_a_waiting_time_that_is_none_is_said(tmp_path, value):
    said = refused("--port", str(free_port()), AFTERCALL_VAR=str(tmp_path), AFTERCALL_LEASE_MARGIN=value)
    assert said == "AFTERCALL_LEASE_MARGIN is not a number of seconds; it should look like 10."


def test_an_address_for_everybody_needs_a_name(tmp_path):
    said = refused("--host", "0.0.0.0", AFTERCALL_VAR=str(tmp_path))
    assert "set AFTERCALL_URL to the one that people type" in said
