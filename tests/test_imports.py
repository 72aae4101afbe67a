"""Imports run one way: console -> reconciliation -> audit."""

import pytest

from tests import source

FORBIDDEN = {
    "audit": {"reconciliation", "console", "examples", "tests"},
    "reconciliation": {"console", "examples", "tests"},
    "console": {"tests"},
    "examples": {"console", "audit", "tests"},
}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_run_one_way(package):
    wrong = {
        f"{path.relative_to(source.ROOT)} imports {name}"
        for path in source.files(package)
        for name in source.imported(path) & FORBIDDEN[package]
    }
    assert not wrong


@pytest.mark.parametrize(
    "line", ["import console.access", "from console import access", "def f():\n    from console.access import x",
             'import_string("console.access.role")', 'import_module("console")'],
)  # fmt: skip
def test_an_import_in_any_form_is_seen(tmp_path, line):
    (tmp_path / "bad.py").write_text(line)
    assert "console" in source.imported(tmp_path / "bad.py")


@pytest.mark.parametrize("line", ["from . import console", "x = 'console'", "import consoles"])
def test_what_is_no_import_of_it_is_not_taken_for_one(tmp_path, line):
    (tmp_path / "good.py").write_text(line)
    assert "console" not in source.imported(tmp_path / "good.py")


def test_the_domain_knows_no_request_and_no_template():
    for path in source.files("reconciliation", "audit"):
        text = path.read_text()
        assert "django.http" not in text, path
        assert "django.template" not in text, path
        assert "django.shortcuts" not in text, path


def test_there_are_no_drawers_for_whatever_fits_nowhere():
    names = {path.name for path in source.files(*source.SHIPPED)}
    assert not names & {"services.py", "utils.py", "helpers.py", "managers.py", "signals.py"}
