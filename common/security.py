"""The cluster secret: who may speak as one of us.

A secret file (mode 0600) holds one key per line, `key_id:hex`; the first signs,
all verify, so that a key can be rotated while both sides run. The secret signs
`context_phase_params` and yields the control key that Control calls carry.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from protos.errors import AccessDeniedError, ConfigError, InvalidRequestError
from protos.messages import SignedContextPhaseParams

KEY_BYTES_MIN = 16
KEYS_MAX = 2
CONTROL_METADATA_KEY = "x-baton-control"


def secret_recipe(path: Path) -> str:
    """The shell's line that makes a secret file; `baton secret` does the same."""
    return f'(umask 077; echo "k1:$(openssl rand -hex 32)" > {shlex.quote(str(path))})'


@dataclass(frozen=True)
class ClusterSecret:
    """`keys` maps key ids to key bytes, the signing key first."""

    keys: Mapping[str, bytes]

    def __repr__(self) -> str:
        return f"ClusterSecret(key_ids={list(self.keys)})"

    @property
    def signing_key_id(self) -> str:
        return next(iter(self.keys))

    def sign_params(self, payload: bytes) -> SignedContextPhaseParams:
        key_id = self.signing_key_id
        return SignedContextPhaseParams(
            payload, key_id, _mac(self.keys[key_id], b"params", payload)
        )

    def verify_params(self, signed: SignedContextPhaseParams) -> None:
        """Raises InvalidRequestError where the signature is not one of ours."""
        key = self.keys.get(signed.key_id)
        if key is None:
            raise InvalidRequestError(
                f"context_phase_params are signed with the unknown key id {signed.key_id!r}",
                field="context_phase_params.key_id",
                value=signed.key_id,
                limit=", ".join(self.keys),
            )
        if not hmac.compare_digest(_mac(key, b"params", signed.payload), signed.signature):
            raise InvalidRequestError(
                "context_phase_params carry a wrong signature: they were damaged or not signed "
                "by this cluster",
                field="context_phase_params.signature",
                value=signed.signature.hex(),
                limit="an HMAC-SHA256 by a key of this cluster",
            )

    def control_token(self) -> str:
        """What a Control call carries in the metadata `x-baton-control`."""
        key_id = self.signing_key_id
        return f"{key_id}:{_mac(self.keys[key_id], b'control', b'').hex()}"

    def verify_control(self, token: str) -> None:
        """Raises AccessDeniedError where the token is missing or wrong."""
        key_id, _, given = token.partition(":")
        key = self.keys.get(key_id)
        expected = _mac(key, b"control", b"").hex() if key else ""
        if key is None or not hmac.compare_digest(expected, given):
            raise AccessDeniedError(
                f"this call needs the control key in the metadata {CONTROL_METADATA_KEY!r}",
                field=CONTROL_METADATA_KEY,
                value="absent" if not token else "wrong",
                limit="the token derived from the cluster's secret file",
            )

    def derive(self, purpose: bytes) -> dict[str, bytes]:
        """A key for one purpose out of each of ours, the signing one first."""
        return {key_id: _mac(key, b"derive", purpose) for key_id, key in self.keys.items()}


def _mac(key: bytes, purpose: bytes, payload: bytes) -> bytes:
    return hmac.digest(key, purpose + b"\x00" + payload, hashlib.sha256)


def load_secret(path: Path) -> ClusterSecret:
    """Raises ConfigError for a missing, malformed or group-readable file."""
    shown = shlex.quote(str(path))
    try:
        mode = path.stat().st_mode
        lines = path.read_text(errors="replace").split()
    except OSError as error:
        raise ConfigError(
            f"cannot read the cluster secret {path}: {error.strerror}; every host of a cluster "
            f"needs the same file: copy it, or make one with `baton secret {shown}` or "
            f"{secret_recipe(path)}",
            field="secret_file",
            value=str(path),
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(
            f"the cluster secret {path} has mode {stat.S_IMODE(mode):04o}; run chmod 600 {shown}",
            field="secret_file",
            value=f"{stat.S_IMODE(mode):04o}",
            limit="0600",
        )
    return ClusterSecret(dict(_parse_key(line, path) for line in _bounded(lines, path)))


def _bounded(lines: list[str], path: Path) -> list[str]:
    if not 1 <= len(lines) <= KEYS_MAX:
        raise ConfigError(
            f"the cluster secret {path} holds {len(lines)} keys; it must hold 1 to {KEYS_MAX}, "
            f"one a line; to make a fresh one: {secret_recipe(path)}",
            field="secret_file",
            value=f"{len(lines)} keys",
            limit=f"1 to {KEYS_MAX} keys",
        )
    return lines


def _parse_key(line: str, path: Path) -> tuple[str, bytes]:
    key_id, _, text = line.partition(":")
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if not key_id or len(key) < KEY_BYTES_MIN:
        raise ConfigError(
            f"a line of the cluster secret {path} is not KEY_ID:HEX with at least "
            f"{KEY_BYTES_MIN} bytes; to make a fresh one: {secret_recipe(path)}",
            field="secret_file",
            limit=f"KEY_ID:HEX with at least {KEY_BYTES_MIN} bytes",
        )
    return key_id, key


def create_secret(path: Path) -> ClusterSecret:
    """Write a fresh secret, never readable by others, and never over an old one.

    Raises OSError, FileExistsError among them.
    """
    key_id, key = f"k{secrets.token_hex(3)}", secrets.token_bytes(32)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{key_id}:{key.hex()}\n")
    return ClusterSecret({key_id: key})
