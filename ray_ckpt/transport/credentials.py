"""Who may speak with the agents of a service, and how each end knows the other.

An agent proves itself with the service's self-signed certificate, which is the only root that its peers
trust. A peer proves itself with a token that is good for one run: a rank of one run can neither read nor
write the files of another. Keys stay with the coordinator and the agents; ranks get `Credentials` with the
ticket of their restore. Both travel inside Ray's control plane only and stand in no repr, error or log.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from ray_ckpt.format import names

SERVER_NAME = "ray_ckpt"  # in every certificate: nodes are known by their service's key, not by an address
VALID_DAYS = 3650  # longer than any service lives
CLOCK_SKEW_DAYS = 1  # a node whose clock is behind must not refuse a new certificate
SECRET_BYTES = 32  # as long as the SHA-256 that the tokens are made with


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What a peer of one run shows (`token`) and whom it trusts (`root_cert`, PEM)."""

    root_cert: bytes = field(repr=False)  # not secret, only long
    token: str = field(repr=False)
    encrypt: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceKeys:
    """The keys of one service, made once by its coordinator. `encrypt=False` is for trusted networks."""

    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)
    secret: bytes = field(repr=False)
    encrypt: bool = True

    @classmethod
    def make(cls, now: datetime, *, encrypt: bool = True) -> ServiceKeys:
        """New keys, valid from `now` (with its time zone) for VALID_DAYS."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)])
        cert = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=CLOCK_SKEW_DAYS))
            .not_valid_after(now + timedelta(days=VALID_DAYS))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, SHA256())
        )
        return cls(
            cert=cert.public_bytes(Encoding.PEM),
            key=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
            secret=secrets.token_bytes(SECRET_BYTES),
            encrypt=encrypt,
        )

    def credentials(self, run_uid: str) -> Credentials:
        """What the peers of a run need."""
        names.check_run_uid(run_uid)
        return Credentials(root_cert=self.cert, token=self._token(run_uid), encrypt=self.encrypt)

    def run_of(self, token: str) -> str | None:
        """The run that a token is good for; None if it is no token of this service. Takes constant time."""
        run_uid = token.partition(".")[0]
        is_good = hmac.compare_digest(token.encode(errors="replace"), self._token(run_uid).encode())
        return run_uid if is_good else None

    def _token(self, run_uid: str) -> str:
        return f"{run_uid}.{hmac.new(self.secret, run_uid.encode(errors='replace'), 'sha256').hexdigest()}"
