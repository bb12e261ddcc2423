"""Keys and tokens with which the agents of a service and their peers authenticate each other.

An agent proves its identity with the service's self-signed certificate, which is the only root that the peers
trust. A peer proves its identity with a token that is valid for one run: a rank of one run can neither read
nor write the files of another run. Only the coordinator and the agents have the keys; a rank gets
`Credentials` with the ticket of a restore. Keys and tokens travel only inside Ray's control plane and appear
in no repr, error or log.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from ray_ckpt.format import names

SERVER_NAME = "ray_ckpt"  # in every certificate: nodes are identified by the service's key, not by address
VALID_DAYS = 3650  # longer than any service lives
CLOCK_SKEW_DAYS = 1  # a node whose clock is behind must not refuse a new certificate
SECRET_BYTES = 32  # as long as the SHA-256 in a token


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The token that a peer of one run sends and the root certificate (PEM) that it trusts."""

    root_cert: bytes = field(repr=False)  # hidden because it is long; it is not secret
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
        """Make new keys, valid from `now` (with its time zone) for VALID_DAYS."""
        # Imported here: only the coordinator makes keys, and each rank would wait for the imports.
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
        from cryptography.x509.oid import NameOID

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
        """Return the credentials for the peers of a run."""
        names.check_run_uid(run_uid)
        return Credentials(root_cert=self.cert, token=self._token(run_uid), encrypt=self.encrypt)

    def run_of(self, token: str) -> str | None:
        """Return the run of a token, or None if this service did not issue it, in constant time."""
        run_uid = token.partition(".")[0]
        is_good = hmac.compare_digest(token.encode(errors="replace"), self._token(run_uid).encode())
        return run_uid if is_good else None

    def _token(self, run_uid: str) -> str:
        return f"{run_uid}.{hmac.new(self.secret, run_uid.encode(errors='replace'), 'sha256').hexdigest()}"
