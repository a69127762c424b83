"""API keys: a file of their hashes, with the identity that belongs to each.

A key is 256 random bits, so that it can't be guessed from its hash, however fast the hash function is. SHA-256 is used
and not scrypt, which is meant for passwords that people invent and would add 50 ms to every call. A key is looked up by
its hash. The time of the look-up reveals nothing about the key, since nobody can choose the first bits of a guess's
hash; the entry that is found is compared again in constant time.

The file is JSON, written atomically and readable by its owner alone. A server checks once a second whether it has
changed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import ConfigError, Unauthenticated
from baton.messages.request_limits import MAX_PRIORITY, MIN_PRIORITY
from baton.security.matrix import KEY_ROLES, Caller, CallerRole

_log = logging.getLogger(__name__)

VERSION = 1
CHECK_INTERVAL_S = 1.0
"""Seconds between two checks whether the file has changed."""
MAX_KEY_CHARS = 256
"""Longer texts are refused without hashing them. A key has 49 characters."""
_PREFIX = "baton-"
_TENANT = re.compile(r"[a-z0-9][a-z0-9-]{0,31}\Z")
_FIELDS = {"sha256", "tenant", "role", "max_concurrent", "created"}
_OPTIONAL_FIELDS = {"min_priority"}
"""Fields that are written only for keys that have them. A version of Baton that does not know one of them refuses the
whole file."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One entry of the file."""

    sha256: str
    """The key's hash, in hexadecimal."""
    tenant: str
    role: CallerRole
    created: str
    """The day on which the key was made, as text."""
    max_concurrent: int | None = None
    min_priority: int | None = None

    @property
    def key_id(self) -> str:
        """The name of the key in logs and commands: the first digits of its hash, which reveal nothing."""
        return self.sha256[:8]

    @property
    def caller(self) -> Caller:
        """The caller that shows this key."""
        return Caller(self.role, self.tenant, self.key_id, self.max_concurrent, self.min_priority)


def new_key(
    tenant: str,
    role: CallerRole,
    created: str,
    max_concurrent: int | None = None,
    min_priority: int | None = None,
) -> tuple[str, ApiKey]:
    """Make a key, which is shown once, and its entry for the file. Raises ConfigError for a bad tenant name."""
    check_tenant(tenant)
    key = _PREFIX + secrets.token_urlsafe(32)
    return key, ApiKey(_digest(key).hex(), tenant, role, created, max_concurrent, min_priority)


def check_tenant(tenant: str) -> None:
    """Raise ConfigError unless this is a valid name of a tenant."""
    if not _TENANT.match(tenant):
        raise ConfigError(
            f"tenant {tenant[:80]!r}: use up to 32 lower-case letters, digits and '-', not beginning with '-'"
        )


def read_keys(path: Path) -> Sequence[ApiKey]:
    """Read the keys in a file. Raises ConfigError for a file that `write_keys` has not written."""
    try:
        content = json.loads(path.read_bytes())
        if content["version"] != VERSION:
            raise ConfigError(
                f"{path} has format version {content['version']!r}; this version of Baton reads {VERSION}"
            )
        return [_key(entry) for entry in content["keys"]]
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: `baton keys add {path}` makes it") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is not a file of API keys: {error}") from None


def write_keys(path: Path, keys: Sequence[ApiKey]) -> None:
    """Replace the file atomically, readable by its owner alone. Raises OSError."""
    entries = [
        {
            "sha256": key.sha256,
            "tenant": key.tenant,
            "role": key.role.value,
            "max_concurrent": key.max_concurrent,
            "created": key.created,
            **({} if key.min_priority is None else {"min_priority": key.min_priority}),
        }
        for key in keys
    ]
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump({"version": VERSION, "keys": entries}, file, indent=2)
            file.write("\n")
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


class KeyRing:
    """The API keys in a file, which is read again when it changes."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises ConfigError if it can't be read; if that happens later, the keys stay as they are."""
        self._path = path
        self._checked_at = 0.0
        self._stamp_read = _stamp(path)
        self._by_digest = _by_digest(read_keys(path))

    def caller(self, key: str, now: float) -> Caller:
        """The caller to whom the key belongs. Raises Unauthenticated. `now`: seconds on any monotonic clock."""
        if now - self._checked_at >= CHECK_INTERVAL_S:
            self._checked_at = now
            self._read_if_changed()
        if not key:
            raise Unauthenticated(
                "no API key was sent: send `authorization: Bearer KEY` (with `baton`, set BATON_API_KEY)"
            )
        if len(key) > MAX_KEY_CHARS:
            raise Unauthenticated(f"the API key has {len(key)} characters; no valid key has more than {MAX_KEY_CHARS}")
        digest = _digest(key)
        known = self._by_digest.get(digest)
        if known is None or not hmac.compare_digest(bytes.fromhex(known.sha256), digest):
            raise Unauthenticated("this API key is unknown or has been removed")
        return known.caller

    def _read_if_changed(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._stamp_read:
            return
        self._stamp_read = stamp
        try:
            self._by_digest = _by_digest(read_keys(self._path))
            _log.info("keys: the file has changed and holds %d keys", len(self._by_digest))
        except ConfigError as error:
            # While the file is being written, callers must not be refused.
            _log.error("keys: the file can't be read, and the keys stay as they were: %s", error)


def bearer_key(authorization: str) -> str:
    """The key in an `authorization` header of the form `Bearer KEY`; empty if it has another form."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def _by_digest(keys: Sequence[ApiKey]) -> Mapping[bytes, ApiKey]:
    return {bytes.fromhex(key.sha256): key for key in keys}


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Modification time, size and inode of a file, which tell whether it has changed; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _key(entry: Mapping[str, Any]) -> ApiKey:
    if set(entry) - _OPTIONAL_FIELDS != _FIELDS:
        raise ValueError(f"a key has the fields {', '.join(sorted(_FIELDS))}, and may have min_priority")
    role, most = CallerRole(entry["role"]), entry["max_concurrent"]
    if role not in KEY_ROLES:
        raise ValueError(f"a key can't have the role {role.value}")
    if len(bytes.fromhex(entry["sha256"])) != hashlib.sha256().digest_size:
        raise ValueError("sha256 has a wrong length")
    if most is not None and (type(most) is not int or most < 1):
        raise ValueError("max_concurrent must be a number of at least 1, or null")
    least = entry.get("min_priority")
    if least is not None and (type(least) is not int or not MIN_PRIORITY <= least <= MAX_PRIORITY):
        raise ValueError("min_priority must be a 32-bit integer, or null")
    check_tenant(entry["tenant"])
    return ApiKey(entry["sha256"], entry["tenant"], role, str(entry["created"]), most, least)
