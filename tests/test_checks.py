"""What the settings may not be."""

import pytest
from django.core.management import call_command
from django.core.management.base import SystemCheckError

from console import checks, database, secrets

pytestmark = pytest.mark.filterwarnings("ignore:Overriding setting DATABASES")


def ids(messages):
    return [message.id for message in messages]


@pytest.fixture
def example(settings):
    settings.AFTERCALL_EXAMPLE = True
    settings.ALLOWED_HOSTS = ["127.0.0.1", "localhost", "[::1]"]
    return settings


def test_the_settings_as_shipped_pass():
    call_command("check", fail_level="WARNING")


def test_the_example_is_fine_at_home(example):
    assert checks.example_stays_at_home() == []


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("AFTERCALL_ENV", "production", "aftercall.E010"),
        ("ALLOWED_HOSTS", ["127.0.0.1", "aftercall.example.com"], "aftercall.E011"),
        ("ALLOWED_HOSTS", ["*"], "aftercall.E011"),
        (
            "DATABASES",
            {"default": {"HOST": "db.example.com", "OPTIONS": {}}, "owner": {"OPTIONS": {}}},
            "aftercall.E012",
        ),
    ],
)
def test_the_example_cannot_be_switched_on_away_from_home(example, name, value, expected):
    setattr(example, name, value)
    assert ids(checks.example_stays_at_home()) == [expected]


def test_the_checks_are_registered(example):
    example.AFTERCALL_ENV = "production"
    with pytest.raises(SystemCheckError, match="AFTERCALL_EXAMPLE is on, but AFTERCALL_ENV says production"):
        call_command("check")


def test_a_task_that_may_be_redelivered_while_it_waits_is_refused(settings):
    longest = checks.longest_delivery(settings.Q_CLUSTER)
    settings.Q_CLUSTER = {**settings.Q_CLUSTER, "retry": longest}
    assert ids(checks.redelivery()) == ["aftercall.E020"]
    settings.Q_CLUSTER = {**settings.Q_CLUSTER, "retry": longest + 1}
    assert checks.redelivery() == []


def test_the_redelivery_rule_follows_the_measurement():
    # Two workers, timeout 10, retry 12 and queued tasks of 6 s gave twelve starts of eight tasks.
    assert checks.longest_delivery({"queue_limit": 2, "workers": 2, "timeout": 10}) == 39


def test_an_alternative_cluster_is_held_to_the_same_rule(settings):
    settings.Q_CLUSTER = {**settings.Q_CLUSTER, "ALT_CLUSTERS": {"slow": {"timeout": 500}}}
    assert ids(checks.redelivery()) == ["aftercall.E020"]


def test_a_pool_is_refused(settings):
    options = {**settings.DATABASES["default"]["OPTIONS"], "pool": True}
    settings.DATABASES = {**settings.DATABASES, "default": {**settings.DATABASES["default"], "OPTIONS": options}}
    assert ids(checks.queue_without_pool()) == ["aftercall.E021"]


@pytest.mark.parametrize("weak", ["short", "a" * 64])
def test_a_secret_that_can_be_guessed_is_refused(settings, weak):
    settings.SECRET_KEY = weak
    settings.AFTERCALL_KEY_SECRET = weak.encode()
    assert ids(checks.secrets()) == ["aftercall.E004", "aftercall.E004"]


@pytest.mark.parametrize("address", ["aftercall.example.com", "http://", "ftp://aftercall.example.com"])
def test_an_address_that_is_none_is_refused(settings, address):
    settings.AFTERCALL_URL = address
    assert ids(checks.console_url()) == ["aftercall.E006"]


def test_an_owner_alone_is_refused(settings, tmp_path):
    use(settings, tmp_path, DATABASE_OWNER_URL="postgresql://owner@127.0.0.1/ledger")
    assert "set both" in checks.database_url()[0].msg


def test_a_seal_key_that_is_none_is_refused(settings):
    settings.AFTERCALL_SEAL_KEYS = ["nonsense"]
    assert ids(checks.seal_keys()) == ["aftercall.E005"]


def test_one_role_for_everything_is_warned_of(settings, tmp_path):
    use(settings, tmp_path, DATABASE_URL="postgresql://one@127.0.0.1/ledger")
    assert ids(checks.two_roles()) == ["aftercall.W001"]


def test_two_roles_on_one_database_pass(settings, tmp_path):
    use(
        settings,
        tmp_path,
        DATABASE_URL="postgresql://app@127.0.0.1/ledger",
        DATABASE_OWNER_URL="postgresql://owner@127.0.0.1/ledger",
    )
    assert checks.two_roles() == []


def test_two_databases_are_refused(settings, tmp_path):
    use(
        settings,
        tmp_path,
        DATABASE_URL="postgresql://app@127.0.0.1/ledger",
        DATABASE_OWNER_URL="postgresql://owner@127.0.0.1/another",
    )
    assert ids(checks.two_roles()) == ["aftercall.E002"]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mysql://app:hush@host/ledger", "DATABASE_URL does not begin with postgresql://"),
        ("app:hush@host", "DATABASE_URL does not begin with postgresql://"),
        ("postgresql://app:hush@host:port/ledger", "DATABASE_URL cannot be read as a URL"),
        ("postgresql://app:hush@[::1/ledger", "DATABASE_URL cannot be read as a URL"),
        ("postgresql://app:hush@host", "DATABASE_URL names no database"),
        ("postgresql://host/ledger", "DATABASE_URL names no user"),
    ],
)
def test_a_malformed_url_is_told_with_the_right_form_and_without_the_password(settings, tmp_path, url, said):
    use(settings, tmp_path, DATABASE_URL=url)
    (message,) = checks.database_url()
    assert message.msg.startswith(said)
    assert "postgresql://user:password@host:5432/database" in message.msg
    assert "hush" not in message.msg


def test_a_url_is_read_with_its_escapes_and_options(tmp_path):
    read = database.settings_of("postgresql://a%40b:p%2Fq@/ledger?host=/run/pg&sslmode=require", name="DATABASE_URL")
    assert (read["USER"], read["PASSWORD"], read["HOST"], read["NAME"]) == ("a@b", "p/q", "/run/pg", "ledger")
    assert read["OPTIONS"]["sslmode"] == "require"


def test_secrets_are_made_once_and_kept_to_their_owner(tmp_path):
    file = tmp_path / "new" / "secrets.json"
    first = secrets.load(file, environ={})
    assert secrets.load(file, environ={}) == first
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["secrets.json"]


def test_given_secrets_win_and_no_file_is_made(tmp_path):
    given = {"AFTERCALL_SECRET_KEY": "s", "AFTERCALL_KEY_SECRET": "k", "AFTERCALL_SEAL_KEYS": "new,old"}
    read = secrets.load(tmp_path / "secrets.json", environ=given)
    assert (read.secret_key, read.key_secret, read.seal_keys) == ("s", b"k", ["new", "old"])
    assert not (tmp_path / "secrets.json").exists()


def test_a_broken_file_of_secrets_is_not_replaced(tmp_path):
    file = tmp_path / "secrets.json"
    file.write_text("{")
    assert "restore it from a copy" in secrets.load(file, environ={}).problem
    assert file.read_text() == "{"


def use(settings, tmp_path, **environ):
    read = database.from_environment(environ, var=tmp_path)
    settings.DATABASES = {"default": read.app, "owner": read.owner}
    settings.AFTERCALL_DATABASE_PROBLEM = read.problem
    settings.AFTERCALL_DATABASE_EMBEDDED = read.embedded


@pytest.mark.case("E7")
@pytest.mark.parametrize("name", ["AFTERCALL_SCHEDULE_GRACE", "AFTERCALL_LEASE_MARGIN", "AFTERCALL_TAKE_AGAIN"])
def test_a_waiting_time_of_nothing_protects_nothing_and_is_refused(settings, name):
    assert checks.waiting_times() == []
    for value in (0, -1):
        setattr(settings, name, value)
        (problem,) = checks.waiting_times()
        assert problem.id == "aftercall.E022"
        assert name in problem.msg
