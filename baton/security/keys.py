"""API keys: a file of their hashes, and who each one is.

A key is 256 random bits, so nobody can guess one from its hash, however fast the hash is: SHA-256 it is, and not
scrypt, which is for what people think up and would cost 50 ms of every call. A key is looked up by its hash. How long
that takes says nothing of the key, since nobody can choose what the hash of a guess begins with; what is found is
compared again in constant time.

The file is JSON, written in one piece and for its owner alone. Who serves looks once a second whether it has changed.
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
from baton.security.callers import Caller
from baton.security.matrix import KEY_ROLES, CallerRole

_log = logging.getLogger(__name__)

VERSION = 1
LOOK_EVERY_S = 1.0
MAX_KEY_CHARS = 256
"""What is longer is no key, and is not hashed: ours have 49 characters."""
_PREFIX = "baton-"
_TENANT = re.compile(r"[a-z0-9][a-z0-9-]{0,31}\Z")
_FIELDS = {"sha256", "tenant", "role", "max_concurrent", "created"}


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What the file says of a key."""

    sha256: str
    """Of the key, in hexadecimal."""
    tenant: str
    role: CallerRole
    created: str
    """The day, for people."""
    max_concurrent: int | None = None

    @property
    def key_id(self) -> str:
        """What logs and people call it: the beginning of its hash, which gives nothing away."""
        return self.sha256[:8]

    @property
    def caller(self) -> Caller:
        """Whoever shows it."""
        return Caller(self.role, self.tenant, self.key_id, self.max_concurrent)


def new_key(tenant: str, role: CallerRole, created: str, max_concurrent: int | None = None) -> tuple[str, ApiKey]:
    """A new key, to be shown once, and what the file will say of it. Raises ConfigError for a bad name."""
    check_tenant(tenant)
    key = _PREFIX + secrets.token_urlsafe(32)
    return key, ApiKey(_digest(key).hex(), tenant, role, created, max_concurrent)


def check_tenant(tenant: str) -> None:
    """Raises ConfigError for what can't be a tenant's name."""
    if not _TENANT.match(tenant):
        raise ConfigError(f"tenant {tenant[:80]!r}: up to 32 small letters, digits and '-', the first one no '-'")


def read_keys(path: Path) -> Sequence[ApiKey]:
    """The keys in a file; raises ConfigError for one that is not as `write_keys` left it."""
    try:
        content = json.loads(path.read_bytes())
        if content["version"] != VERSION:
            raise ConfigError(f"{path} is of version {content['version']!r}: this is Baton with version {VERSION}")
        return [_key(entry) for entry in content["keys"]]
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: `baton keys add {path}` makes it") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is no file of keys: {error}") from None


def write_keys(path: Path, keys: Sequence[ApiKey]) -> None:
    """Replace the file in one piece; its owner's alone. Raises OSError."""
    entries = [
        {
            "sha256": key.sha256,
            "tenant": key.tenant,
            "role": key.role.value,
            "max_concurrent": key.max_concurrent,
            "created": key.created,
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
    """The keys of a file as it is now."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that can't be read; later on such a file changes nothing."""
        self._path = path
        self._looked_at = 0.0
        self._seen = _stamp(path)
        self._by_digest = _by_digest(read_keys(path))

    def caller(self, key: str, now: float) -> Caller:
        """Whose key it is; raises Unauthenticated. `now`: seconds on any clock that goes on."""
        if now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            self._look()
        if not key:
            raise Unauthenticated("no key: send it as `authorization: Bearer KEY` (BATON_API_KEY does for `baton`)")
        if len(key) > MAX_KEY_CHARS:
            raise Unauthenticated(
                f"the key has {len(key)} characters; none that is known here has over {MAX_KEY_CHARS}"
            )
        digest = _digest(key)
        found = self._by_digest.get(digest)
        if found is None or not hmac.compare_digest(bytes.fromhex(found.sha256), digest):
            raise Unauthenticated("this key is not known here, or no more")
        return found.caller

    def _look(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._by_digest = _by_digest(read_keys(self._path))
            _log.info("keys: there are %d now", len(self._by_digest))
        except ConfigError as error:
            # Nobody is shut out by a file that somebody is still writing.
            _log.error("keys: those of before stay: %s", error)


def bearer(authorization: str) -> str:
    """The key in an `authorization` header; empty when there is none."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def _by_digest(keys: Sequence[ApiKey]) -> Mapping[bytes, ApiKey]:
    return {bytes.fromhex(key.sha256): key for key in keys}


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _key(entry: Mapping[str, Any]) -> ApiKey:
    if set(entry) != _FIELDS:
        raise ValueError(f"a key has the fields {', '.join(sorted(_FIELDS))}")
    role, most = CallerRole(entry["role"]), entry["max_concurrent"]
    if role not in KEY_ROLES:
        raise ValueError(f"no key makes anybody a {role.value}")
    if len(bytes.fromhex(entry["sha256"])) != hashlib.sha256().digest_size:
        raise ValueError("sha256 has another length")
    if most is not None and (type(most) is not int or most < 1):
        raise ValueError("max_concurrent is a number of at least 1, or null")
    check_tenant(entry["tenant"])
    return ApiKey(entry["sha256"], entry["tenant"], role, str(entry["created"]), most)
