"""API keys: a file of their hashes, with the identity that belongs to each.

A key is 256 random bits, so that it can't be guessed from its hash, however fast the hash function is. SHA-256 is used
and not scrypt, which is meant for passwords that people invent and would add 50 ms to every call. A key is looked up by
its hash. The time of the look-up reveals nothing about the key, since nobody can choose the first bits of a guess's
hash; the entry that is found is compared again in constant time.

The file is JSON, written atomically and readable by its owner alone. Beside the keys it has what is said of tenants:
their weights and quotas. A server checks once a second whether it has changed.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from baton.errors import ConfigError, Unauthenticated
from baton.messages.request_limits import MAX_PRIORITY, MIN_PRIORITY
from baton.security.json_lines import Path as JsonPath
from baton.security.json_lines import lines_of_values
from baton.security.matrix import KEY_ROLES, Caller, CallerRole
from baton.security.quotas import KEY_FIELDS, NO_QUOTAS, KeyClass, Quotas, TenantSettings, read_quotas, read_tenant

_log = logging.getLogger(__name__)

VERSION = 1
CHECK_INTERVAL_S = 1.0
"""Seconds between two checks whether the file has changed."""
MAX_KEY_CHARS = 256
"""Longer texts are refused without hashing them. A key has 49 characters."""
_PREFIX = "baton-"
_TENANT = re.compile(r"[a-z0-9][a-z0-9-]{0,31}\Z")
_FIELDS = {"sha256", "tenant", "role", "max_concurrent", "created"}
_OPTIONAL_FIELDS = {"min_priority", "class", *KEY_FIELDS.values()}
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
    """The requests of its tenant, with whatever key, beside which this key begins no more."""
    min_priority: int | None = None
    service_class: KeyClass | None = None
    """The class of its requests; None: their priority says it."""
    quotas: Quotas = NO_QUOTAS
    """The limits of this key alone."""

    @property
    def key_id(self) -> str:
        """The name of the key in logs and commands: the first digits of its hash, which reveal nothing."""
        return self.sha256[:8]

    def caller(self, tenant: TenantSettings, *, is_counted: bool) -> Caller:
        """The caller that shows this key. `is_counted`: some key of the tenant has a limit of its requests at once."""
        limits = [most for most in (self.max_concurrent, tenant.quotas.max_concurrent) if most is not None]
        return Caller(
            self.role,
            self.tenant,
            self.key_id,
            min(limits, default=None),
            self.min_priority,
            weight=tenant.weight,
            service_class=self.service_class or "",
            is_counted=is_counted,
            tenant_quotas=tenant.quotas,
            key_quotas=self.quotas,
        )


NO_SETTINGS = TenantSettings()


@dataclass(frozen=True, slots=True)
class KeyFile:
    """The contents of a file."""

    keys: Sequence[ApiKey] = ()
    tenants: Mapping[str, TenantSettings] = field(default_factory=dict)
    """By name; a tenant without an entry has `NO_SETTINGS`."""

    def with_tenant(self, name: str, settings: TenantSettings) -> KeyFile:
        """The contents with other settings of a tenant."""
        tenants = {**self.tenants, name: settings}
        return replace(self, tenants={name: each for name, each in tenants.items() if each.written()})


def new_key(
    tenant: str,
    role: CallerRole,
    created: str,
    max_concurrent: int | None = None,
    min_priority: int | None = None,
    service_class: KeyClass | None = None,
    quotas: Quotas = NO_QUOTAS,
) -> tuple[str, ApiKey]:
    """Make a key, which is shown once, and its entry for the file. Raises ConfigError for a bad tenant name."""
    check_tenant(tenant)
    key = _PREFIX + secrets.token_urlsafe(32)
    return key, ApiKey(_digest(key).hex(), tenant, role, created, max_concurrent, min_priority, service_class, quotas)


def check_tenant(tenant: str) -> None:
    """Raise ConfigError unless this is a valid name of a tenant."""
    if not _TENANT.match(tenant):
        raise ConfigError(
            f"tenant {tenant[:80]!r}: use up to 32 lower-case letters, digits and '-', not beginning with '-'"
        )


def read_key_file(path: Path) -> KeyFile:
    """Read a file. Raises ConfigError for one that is not valid, with the line of the first entry that is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: `baton keys add {path}` makes it") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not a file of API keys: {error}") from None
    try:
        return _parsed(path, text)
    except RecursionError:
        raise ConfigError(f"{path} is not a file of API keys: its values are nested too deep") from None


def _parsed(path: Path, text: str) -> KeyFile:
    """Raises ConfigError, and RecursionError for a text that is nested too deep."""
    try:
        content = json.loads(text)
    except ValueError as error:
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigError(f"{path}{line}: this is not JSON: {error}") from None
    try:
        return _key_file(content)
    except _WrongEntry as error:
        if not error.place:
            raise ConfigError(f"{path} is not a file of API keys: {error}") from None
        raise ConfigError(f"{path}, line {lines_of_values(text)[error.place]}: {error}") from None


class _WrongEntry(ValueError):
    """An entry that can't be read, and its place in the file."""

    def __init__(self, why: str, place: JsonPath = ()) -> None:
        super().__init__(why)
        self.place = place


def _key_file(content: Any) -> KeyFile:
    """Raises _WrongEntry."""
    if not isinstance(content, dict) or not isinstance(content.get("keys"), list):
        raise _WrongEntry('it must be an object with "version" and a list "keys"')
    if content.get("version") != VERSION:
        raise _WrongEntry(f"it has version {content.get('version')!r}; this version of Baton reads {VERSION}")
    if unknown := sorted(set(content) - {"version", "keys", "tenants"}):
        raise _WrongEntry(f"{unknown[0]!r} is unknown: it may have version, keys and tenants", (unknown[0],))
    tenants = content.get("tenants", {})
    if not isinstance(tenants, dict):
        raise _WrongEntry("tenants must be an object with the settings of each tenant by its name", ("tenants",))
    keys, settings = [], {}
    for index, entry in enumerate(content["keys"]):
        try:
            keys.append(_key(entry))
        except (ValueError, TypeError, KeyError, ConfigError) as error:
            raise _WrongEntry(str(error), ("keys", index)) from None
    for name, entry in tenants.items():
        try:
            check_tenant(name)
            settings[name] = read_tenant(entry)
        except (ValueError, ConfigError) as error:
            raise _WrongEntry(f"tenant {name[:80]!r}: {error}", ("tenants", name)) from None
    return KeyFile(keys, settings)


def write_keys(path: Path, keys: Sequence[ApiKey], tenants: Mapping[str, TenantSettings] | None = None) -> None:
    """Replace the file atomically, readable by its owner alone. Raises OSError."""
    entries = [
        {
            "sha256": key.sha256,
            "tenant": key.tenant,
            "role": key.role.value,
            "max_concurrent": key.max_concurrent,
            "created": key.created,
            **({} if key.min_priority is None else {"min_priority": key.min_priority}),
            **({} if key.service_class is None else {"class": key.service_class.value}),
            **key.quotas.written(KEY_FIELDS),
        }
        for key in keys
    ]
    of_tenants = {name: settings.written() for name, settings in (tenants or {}).items()}
    content = {"version": VERSION, "keys": entries, **({"tenants": of_tenants} if of_tenants else {})}
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file, indent=2)
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
        self._callers = _by_digest(read_key_file(path))

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
        known = self._callers.get(digest)
        if known is None or not hmac.compare_digest(known[0], digest):
            raise Unauthenticated("this API key is unknown or has been removed")
        return known[1]

    def _read_if_changed(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._stamp_read:
            return
        self._stamp_read = stamp
        try:
            self._callers = _by_digest(read_key_file(self._path))
            _log.info("keys: the file has changed and holds %d keys", len(self._callers))
        except ConfigError as error:
            # While the file is being written, callers must not be refused.
            _log.error("keys: the file can't be read, and the keys stay as they were: %s", error)


def bearer_key(authorization: str) -> str:
    """The key in an `authorization` header of the form `Bearer KEY`; empty if it has another form."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def _by_digest(file: KeyFile) -> Mapping[bytes, tuple[bytes, Caller]]:
    """The digest of each key, and its caller, by digest."""
    counted = {key.tenant for key in file.keys if key.max_concurrent is not None}
    counted |= {name for name, settings in file.tenants.items() if settings.quotas.max_concurrent is not None}
    found = {}
    for key in file.keys:
        digest, settings = bytes.fromhex(key.sha256), file.tenants.get(key.tenant, NO_SETTINGS)
        found[digest] = digest, key.caller(settings, is_counted=key.tenant in counted)
    return found


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Modification time, size and inode of a file, which tell whether it has changed; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _key(entry: Mapping[str, Any]) -> ApiKey:
    if not isinstance(entry, dict) or set(entry) - _OPTIONAL_FIELDS != _FIELDS:
        optional = ", ".join(sorted(_OPTIONAL_FIELDS))
        raise ValueError(f"a key has the fields {', '.join(sorted(_FIELDS))}, and may have {optional}")
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
    named = entry.get("class")
    if named not in (None, *KeyClass):
        raise ValueError(f"class must be {', '.join(KeyClass)} or null, not {named!r}")
    service_class = None if named is None else KeyClass(named)
    check_tenant(entry["tenant"])
    quotas = read_quotas(entry, KEY_FIELDS)
    created = str(entry["created"])
    return ApiKey(entry["sha256"], entry["tenant"], role, created, most, least, service_class, quotas)
