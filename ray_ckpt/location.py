"""Storage paths: a folder that all nodes mount, or the URL of an object store, without secrets.

A storage path is an absolute path, `file://`, `s3://bucket/prefix`, `gs://bucket/prefix` with pyarrow's query
parameters, or another URL that fsspec supports, as in Ray Train. Credentials come from the environment of the
process that opens the path (variables, profiles, roles); an option may name credentials, but not contain
them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias
from urllib.parse import parse_qsl, urlencode

from ray_ckpt.errors import ConfigError

_VALUES = {
    "backend": ("obstore", "fsspec"),
    "anonymous": ("true", "false"),
    "sse": ("AES256", "aws:kms", "aws:kms:dsse"),
}
_SAME = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}  # aliases of schemes
_QUERY = ("endpoint_override", "scheme", "region")  # parameters of pyarrow's URLs that name no secret
BUCKETS: Mapping[str, tuple[str, ...]] = {  # schemes with a client of this package, and the client's options
    "s3": ("backend", "profile", "endpoint_url", "region", "anonymous", "checksum", "sse", "sse_kms_key_id"),
    "gs": ("backend", "endpoint_url", "anonymous"),
}
ENV_PREFIX = "env:"  # prefix of the name of an environment variable of the process that opens the store
_SECRET = re.compile(
    r"secret|pass|pwd|token|credential|connection_?string|shared_?access|key|sas|auth|\bpat\b", re.IGNORECASE
)
_USERINFO = re.compile(r"//[^/@]*:.*@|account_?key=", re.IGNORECASE)  # secrets in a value
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)\Z", re.DOTALL)
_BAD_KEY = re.compile(r"[\x00-\x1f\x7f%#\\\ud800-\udfff]|(^|/)\.{1,2}(/|$)|//")


@dataclass(frozen=True, slots=True)
class Location:
    """A folder or an object in a store. `str(location)` is its normalized storage path."""

    scheme: str
    """"file", "s3", "gs", or another scheme that fsspec supports."""
    path: str
    """file: absolute path; s3, gs: bucket/key; others: the text after "://"."""
    query: tuple[tuple[str, str], ...] = ()
    """endpoint_override, scheme and region of an s3 or gs URL."""

    @classmethod
    def parse(cls, text: str | os.PathLike[str]) -> Location:
        """Parse a storage path; ConfigError if `text` is relative, holds a secret, or is no storage path."""
        text = _text(text)
        found = _URL.match(text)
        if found is None or found[1].lower() == "file":
            return cls("file", _folder(found[2] if found else text, text))
        scheme = _SAME.get(found[1].lower(), found[1].lower())
        if scheme not in BUCKETS:
            return cls(scheme, _other(found[2], scheme))
        rest, _, query = found[2].partition("?")
        return cls(scheme, _bucket_path(rest, scheme), _parse_query(query, scheme))

    @property
    def is_posix(self) -> bool:
        return self.scheme == "file"

    @property
    def folder(self) -> Path:
        """The folder of a file location."""
        assert self.is_posix
        return Path(self.path)

    @property
    def bare(self) -> str:
        """The location without its query, so that file names can be appended."""
        return self.path if self.is_posix else f"{self.scheme}://{self.path}"

    @property
    def bucket(self) -> str:
        return self.path.partition("/")[0]

    @property
    def key(self) -> str:
        """The part after the bucket; may be empty."""
        return self.path.partition("/")[2]

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Location:
        return Location(self.scheme, self.path.rpartition("/")[0] or "/", self.query)

    @property
    def endpoint(self) -> str | None:
        """The URL of the server in the query."""
        query = dict(self.query)
        host = query.get("endpoint_override")
        if host is None or "://" in host:
            return host
        return f"{query.get('scheme', 'https')}://{host}"

    @property
    def region(self) -> str | None:
        return dict(self.query).get("region")

    def __truediv__(self, name: str) -> Location:
        return Location(self.scheme, f"{self.path.rstrip('/')}/{name}", self.query)

    def __str__(self) -> str:
        if self.is_posix:
            return self.path
        query = f"?{urlencode(self.query, safe=':/')}" if self.query else ""
        return f"{self.bare}{query}"


def storage_options(location: Location, options: Mapping[str, str] | None) -> Mapping[str, str]:
    """Check and return the options for a store; ConfigError if an option is unknown or may be a secret."""
    options = options or {}
    if not isinstance(options, Mapping):  # the message shows no values, since a value may be a secret
        raise ConfigError(
            "storage_options is not a mapping from str to str.",
            hint="Give a dict such as {'profile': 'training'}.",
            option="storage_options",
        )
    for name, value in options.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigError(
                f"storage_options[{name!r}] is not a str.", hint="Give names and values as str.", option=name
            )
        known = BUCKETS.get(location.scheme)
        if known is not None and name not in known:
            raise ConfigError(
                f"Unknown storage option {name!r} for {location.scheme}://.",
                hint=f"Known: {', '.join(known)}. Credentials come from environment or profile.",
                option=name,
            )
        allowed = _VALUES.get(name) if known is not None else None
        if allowed is not None and value not in allowed:
            raise ConfigError(
                f"The storage option {name} is not one of {', '.join(allowed)}.",
                hint="Set it to one of them.",
                option=name,
            )
        is_hidden = value.startswith(ENV_PREFIX)
        may_be_secret = (known is None and _SECRET.search(name)) or _USERINFO.search(value)
        if may_be_secret and not is_hidden:
            raise ConfigError(
                f"storage_options[{name!r}] may hold a secret, which would end up in messages and logs.",
                hint=f"Put it into an environment variable of the nodes and give {ENV_PREFIX}NAME.",
                option=name,
            )
    if location.is_posix and options:
        raise ConfigError(
            f"The storage path {location} takes no storage_options.",
            hint="Leave them out.",
            option="storage_options",
        )
    return MappingProxyType(dict(options))


def resolve_options(options: Mapping[str, str]) -> dict[str, str]:
    """Return options with the value of NAME for `env:NAME`; ConfigError if NAME is not set."""
    found: dict[str, str] = {}
    for name, value in options.items():
        if value.startswith(ENV_PREFIX):
            variable = value.removeprefix(ENV_PREFIX)
            if variable not in os.environ:
                raise ConfigError(
                    f"The environment variable {variable} of storage_options[{name!r}] is not set.",
                    hint="Set it where Ray is started on every node, or in the job's runtime_env.",
                    option=name,
                )
            value = os.environ[variable]
        found[name] = value
    return found


def without_tilde(path: str | os.PathLike[str]) -> Path:
    """Return `path` with a leading `~` or `~user` expanded; unchanged if no such home exists."""
    with contextlib.suppress(RuntimeError, ValueError):  # no user of that name, or no name at all
        return Path(path).expanduser()
    return Path(path)


def _text(path: object) -> str:
    if isinstance(path, str | os.PathLike) and isinstance(text := os.fspath(path), str):
        return text
    raise ConfigError(f"The path is of type {type(path).__name__}.", hint="Give a str or a pathlib.Path.")


def _folder(path: str, text: str) -> str:
    if not _is_file_name(path):
        raise ConfigError(
            "The storage path has characters that no file can have in its name.",
            hint="Remove NUL characters and lone surrogates from it.",
        )
    folder = without_tilde(path)
    if not folder.is_absolute():
        shown = "is neither a folder nor a URL" if "@" in text or "://" in text else f"{text!r} is relative"
        raise ConfigError(
            f"The storage path {shown}.",
            hint="Make it absolute; each node would read a relative path from another folder.",
        )
    if "%" in path and text.lower().startswith("file:"):  # some readers decode the %, others do not
        raise ConfigError(
            "The storage path has a '%' in a file:// URL.", hint="Give the path without file://."
        )
    return "/" + os.path.normpath(folder).lstrip("/")


def _is_file_name(path: str) -> bool:
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


def _bucket_path(rest: str, scheme: str) -> str:
    bucket, _, key = rest.partition("/")
    if "@" in bucket or ("@" in key and ":" in bucket):  # a secret may contain a slash
        raise _holds_credentials(scheme)
    key = key.strip("/")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}", bucket) or (key and _BAD_KEY.search(key)):
        shown = repr(f"{scheme}://{rest}") if ":" not in rest and "@" not in rest else f"of scheme {scheme}"
        raise ConfigError(
            f"The storage path {shown} is not a bucket and a prefix.",
            hint=f"Give {scheme}://bucket/prefix without empty parts, '..', '%', '#' or control characters.",
        )
    return f"{bucket}/{key}" if key else bucket


def _other(rest: str, scheme: str) -> str:
    if ":" in rest.rpartition("@")[0]:  # a user name alone is no secret
        raise _holds_credentials(scheme)
    if "?" in rest or "#" in rest:
        raise ConfigError(
            f"The {scheme}:// storage path has a query.", hint="Give options as storage_options instead."
        )
    return rest.rstrip("/")


def _holds_credentials(scheme: str) -> ConfigError:
    return ConfigError(
        f"The {scheme}:// storage path holds credentials.",
        hint="Remove them; credentials come from the environment, a profile or a role of each node.",
    )


def _parse_query(query: str, scheme: str) -> tuple[tuple[str, str], ...]:
    found = parse_qsl(query, keep_blank_values=True)
    for name, value in found:
        if "@" in value:
            raise _holds_credentials(scheme)
        if name not in _QUERY:  # the message omits the value, which may be a secret
            raise ConfigError(
                f"The {scheme}:// storage path has the parameter {name!r}.",
                hint=f"Only {', '.join(_QUERY)} are allowed; credentials come from the environment.",
            )
    if len(dict(found)) < len(found):
        raise ConfigError(
            f"The {scheme}:// storage path has a parameter twice.", hint="Give each parameter once."
        )
    return tuple(sorted(found))


StoragePath: TypeAlias = str | os.PathLike[str] | Location
"""A folder of this machine, absolute or relative, or the URL of a place in a store."""


def locate(path: StoragePath) -> Location:
    """Return the location of `path`; a relative path starts at the working directory.

    ConfigError if `path` is empty, as an unset variable of a shell is, or is no text or no storage path.
    """
    if isinstance(path, Location):
        return path
    text = _text(path)
    if not text:
        raise ConfigError("The path is empty.", hint="Give a folder or a URL, or '.' for this folder.")
    return Location.parse(text if "://" in text else without_tilde(text).absolute())
