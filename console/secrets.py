"""The installation's secrets: from the environment, and otherwise made once and kept in one file."""

import contextlib
import json
import os
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.fernet import Fernet


@dataclass(frozen=True, kw_only=True)
class Secrets:
    """`key_secret` derives operation keys, so it never changes; `seal_keys` are Fernet keys, newest first."""

    secret_key: str
    key_secret: bytes
    seal_keys: list[str]
    problem: str = ""


def load(file: Path, *, environ: Mapping[str, str]) -> Secrets:
    """Return the secrets of `environ`, and for those it does not name, those of `file`, made where it is missing.

    Never raises: what is wrong is said in `problem`, and the values then last for this process only.
    """
    given = _given(environ)
    kept, problem = ({}, "") if len(given) == 3 else _kept(file)
    values = {**_fresh(), **kept, **given}
    return Secrets(
        secret_key=values["secret_key"],
        key_secret=values["key_secret"].encode(),
        seal_keys=values["seal_keys"].split(","),
        problem=problem,
    )


def _given(environ: Mapping[str, str]) -> dict[str, str]:
    names = ("secret_key", "key_secret", "seal_keys")
    return {name: environ[f"AFTERCALL_{name.upper()}"] for name in names if environ.get(f"AFTERCALL_{name.upper()}")}


def _kept(file: Path) -> tuple[dict[str, str], str]:
    try:
        if not file.exists():
            _make(file)
        return json.loads(file.read_text()), ""
    except PermissionError:
        return {}, f"{file} cannot be read or written; make the folder writable or set AFTERCALL_VAR to one that is."
    except (OSError, ValueError) as error:
        return {}, f"{file} holds no secrets that can be read ({type(error).__name__}); restore it from a copy."


def _make(file: Path) -> None:
    """Write the file whole or not at all; of two processes that make it at once, both use the first one's."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=file.parent, prefix=".secrets-")  # mkstemp makes it 0600
    with os.fdopen(handle, "w") as out:
        json.dump(_fresh(), out)
    with contextlib.suppress(FileExistsError):
        os.link(draft, file)
    os.unlink(draft)


def _fresh() -> dict[str, str]:
    return {
        "secret_key": secrets.token_urlsafe(50),
        "key_secret": secrets.token_hex(32),
        "seal_keys": Fernet.generate_key().decode(),
    }
