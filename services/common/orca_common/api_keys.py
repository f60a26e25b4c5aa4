"""API keys: who may call the doors, and under which tenant's name.

A list of keys holds one tenant and one hash a line, never a key:

    # tenant  hash of the key
    research  sha256:5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8  priority=high weight=3

Behind the hash, where they are not the default, stand the highest class that the tenant's requests may have, and the
weight of its share (`priorities`).

Plain SHA-256 is enough, because `new_key` makes keys of 256 random bits that nobody can guess. A slow hash protects
passwords, which can be guessed, and would cost a door 50 ms a call: a wrong key would then be a cheap attack.
"""

import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from .errors import ErrorReason, FailedPrecondition, Unauthenticated
from .file_version import version_of
from .priorities import CLASSES, Grant, Priority

log = logging.getLogger(__name__)

AUTHORIZATION = "authorization"  # the header, or gRPC metadata, in which a client sends its key
LOOK_SECONDS = 1.0  # between looks at whether the file has changed
MAX_KEY_BYTES = 512  # of a credential that a client sends
LEAST_WEIGHT = 0.001  # of a tenant's share; tags of smaller ones would leave the numbers that Redis has exactly
MAX_FILE_BYTES = 1 << 20  # some 10,000 keys
LINE = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._-]{0,63})\s+sha256:([0-9a-f]{64})"
    rf"(?:\s+priority=({'|'.join(CLASSES)}))?(?:\s+weight=([0-9]{{1,6}}(?:\.[0-9]{{1,6}})?))?"
)


def new_key() -> str:
    """A new key: 256 random bits, with a name that scanners for leaked keys can look for."""
    return f"orca-{secrets.token_urlsafe(32)}"


def line_of(tenant: str, key: str) -> str:
    """The line of a list for a key. Raises FailedPrecondition for a name that no tenant may have."""
    line = f"{tenant} sha256:{_digest(key)}"
    if not LINE.fullmatch(line):
        raise FailedPrecondition(f"tenant: {tenant!r} is no name: letters, digits, '.', '_' and '-', at most 64")
    return line


class Keys(NamedTuple):
    """A list of keys."""

    tenants: Mapping[str, str]  # by the hashes of their keys
    grants: Mapping[str, Grant]  # by tenant

    def __or__(self, other: "Keys") -> "Keys":
        return Keys({**self.tenants, **other.tenants}, {**self.grants, **other.grants})


def parse(text: str, where: str) -> Keys:
    """The keys of a list. A tenant may have several, with one class and weight.

    Lines end with a line break, a comma or a semicolon. Raises FailedPrecondition, which names `where` and the line.
    """
    found, grants = dict[str, str](), dict[str, Grant]()
    for number, raw in enumerate(re.split(r"[\n,;]", text), start=1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        match = LINE.fullmatch(line)
        if match is None:  # the line may hold a key by mistake: it is not shown
            raise FailedPrecondition(
                f"{where}: line {number} is not `TENANT sha256:HASH [priority=CLASS] [weight=NUMBER]`; "
                "`orca key TENANT` makes one"
            )
        tenant, digest, highest, weight = match.groups()
        grant = Grant(CLASSES[highest] if highest else Priority.NORMAL, float(weight or 1))
        if grant.weight < LEAST_WEIGHT:
            raise FailedPrecondition(f"{where}: line {number} has weight={weight}; it must be at least {LEAST_WEIGHT}")
        if grants.setdefault(tenant, grant) != grant:
            raise FailedPrecondition(f"{where}: line {number} gives {tenant} another priority or weight than before")
        if found.setdefault(digest, tenant) != tenant:
            raise FailedPrecondition(f"{where}: line {number} gives the key of {found[digest]} to {tenant} too")
    return Keys(found, grants)


class ApiKeys:
    """The keys of a door. Without a list, everybody may call, and the tenant's name is empty.

    The file is read again when it has changed. A change that cannot be read is logged, and the keys before it stay.
    """

    def __init__(self, given: str | None, file: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        """given: a list in a setting. file: the path of a list. Both count. Raises FailedPrecondition."""
        self._given = parse(given, "api_keys") if given is not None else Keys({}, {})
        self._file = Path(file) if file is not None else None
        self._clock, self._next_look = clock, 0.0
        self._seen: object = None  # which version of the file was read last
        self.required = given is not None or file is not None
        self._keys = self._given
        if self._file is not None:
            self._seen = version_of(self._file)
            self._keys = self._given | self._read()
        if self.required and not self._keys.tenants:
            raise FailedPrecondition("api_keys, api_keys_file: hold no key, so nobody could call")

    def tenant_of(self, authorization: str | None) -> str:
        """The tenant of a call that came with this `authorization`. Raises Unauthenticated.

        The answer to a wrong key is the same as to an unknown one, and takes as long: a hash is looked up.
        """
        if not self.required:
            return ""
        self._look()
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise Unauthenticated("no API key: send `authorization: Bearer KEY`", reason=ErrorReason.NO_KEY)
        tenant = self._keys.tenants.get(_digest(key)) if len(key) <= MAX_KEY_BYTES else None
        if tenant is None:
            raise Unauthenticated("the API key is not valid here")
        return tenant

    def grant_of(self, tenant: str) -> Grant:
        """The grant of a tenant. Without keys everybody may ask for every class."""
        return self._keys.grants.get(tenant, Grant()) if self.required else Grant(Priority.URGENT)

    def _look(self) -> None:
        now = self._clock()
        if self._file is None or now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        seen = version_of(self._file)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            keys = self._given | self._read()
        except FailedPrecondition as error:
            log.error("the API keys were not read again: %s", error)
            return
        self._keys = keys
        log.info("API keys read", extra={"keys": len(keys.tenants), "tenants": len(keys.grants)})

    def _read(self) -> Keys:
        assert self._file is not None
        try:
            with self._file.open("rb") as file:
                raw = file.read(MAX_FILE_BYTES + 1)
            if len(raw) > MAX_FILE_BYTES:
                raise FailedPrecondition(f"{self._file}: is larger than {MAX_FILE_BYTES} bytes")
            return parse(raw.decode(), str(self._file))
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise FailedPrecondition(f"api_keys_file: {self._file} cannot be read ({why})") from None


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
