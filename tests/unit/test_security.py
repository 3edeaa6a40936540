"""Who may speak as one of us: secret files, rotation, signatures, the control key."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from common.security import ClusterSecret, create_secret, load_secret
from protos.errors import AccessDeniedError, ConfigError, InvalidRequestError
from protos.messages import SignedContextPhaseParams

OLD, NEW = b"o" * 32, b"n" * 32


def test_created_secret_loads_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "run" / "secret"
    secret = create_secret(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_secret(path) == secret
    assert next(iter(secret.keys.values())).hex() not in repr(secret)
    with pytest.raises(FileExistsError):
        create_secret(path)


def test_signature_covers_every_byte() -> None:
    secret = ClusterSecret({"a": NEW})
    signed = secret.sign_params(b"payload")
    secret.verify_params(signed)
    for forged in (
        SignedContextPhaseParams(b"paYload", "a", signed.signature),
        SignedContextPhaseParams(b"payload", "a", signed.signature[:-1]),
        SignedContextPhaseParams(b"payload", "a", b""),
        SignedContextPhaseParams(b"payload", "b", signed.signature),
        ClusterSecret({"a": OLD}).sign_params(b"payload"),
    ):
        with pytest.raises(InvalidRequestError, match="context_phase_params"):
            secret.verify_params(forged)


def test_two_keys_let_a_cluster_rotate() -> None:
    before, during = ClusterSecret({"old": OLD}), ClusterSecret({"new": NEW, "old": OLD})
    during.verify_params(before.sign_params(b"x"))
    during.verify_control(before.control_token())
    assert during.sign_params(b"x").key_id == "new"


def test_a_signature_is_no_control_key() -> None:
    """Signing an empty payload must not yield the token that opens Control."""
    secret = ClusterSecret({"a": NEW})
    secret.verify_control(secret.control_token())
    for token in ("", "a:", "a:00", "b:00", f"a:{secret.sign_params(b'').signature.hex()}"):
        with pytest.raises(AccessDeniedError, match="x-baton-control"):
            secret.verify_control(token)


@pytest.mark.parametrize("name", ["secret", "a folder's secret"])
def test_the_line_of_the_refusal_makes_a_good_secret(tmp_path: Path, name: str) -> None:
    """A newcomer was told KEY_ID:HEX and left to find out how to make one, mode and all."""
    path = tmp_path / name
    path.write_text("mine\n")
    path.chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        load_secret(path)
    line = caught.value.message.partition("to make a fresh one: ")[2]
    path.unlink()
    subprocess.run(["sh", "-c", line], check=True)
    assert len(load_secret(path).keys["k1"]) == 32


def test_a_secret_of_other_bytes_is_refused_as_any_other(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 ended in a UnicodeDecodeError."""
    path = tmp_path / "secret"
    path.write_bytes(b"\xff\xfe\n")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="KEY_ID:HEX"):
        load_secret(path)


@pytest.mark.parametrize(
    ("text", "mode", "what"),
    [
        ("", 0o600, "0 keys"),
        ("a:00\nb:00\nc:00", 0o600, "3 keys"),
        ("nonsense", 0o600, "KEY_ID:HEX"),
        ("a:zz", 0o600, "KEY_ID:HEX"),
        ("a:0011", 0o600, "16 bytes"),
        ("a:" + "00" * 32, 0o644, "chmod 600"),
    ],
)
def test_bad_secret_files(tmp_path: Path, text: str, mode: int, what: str) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=what):
        load_secret(path)


def test_missing_secret_file_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`baton secret .*openssl rand"):
        load_secret(tmp_path / "none")
