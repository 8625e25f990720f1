"""A certificate authority of one sandbox, with which the proxy stands in for hosts that get secrets.

Its key is in the memory of this process and nowhere else, and goes with the sandbox. It may sign for any
name: a secret that is added later, for another host, must be served by the authority that programs inside
trust already.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

MAX_LEAVES = 64  # of hosts below a wildcard there can be any number
_HOUR, _DAY = datetime.timedelta(hours=1), datetime.timedelta(days=1)
_BACKDATED = _HOUR  # clocks differ
_AUTHORITY_LIFE = 3650 * _DAY  # a sandbox without a deadline lives until it is closed
_LEAF_LIFE = 7 * _DAY
_LEAF_RENEWAL = _DAY  # before its end

Leaf = tuple[datetime.datetime, ssl.SSLContext]  # when to make a new one


class CertificateAuthority:
    """An authority. Making one loads `cryptography`, which takes long: do it in a thread. Its methods are
    thread-safe.
    """

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec

        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = _self_signed(self._key)
        self._leaves: OrderedDict[str, Leaf] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def certificate_pem(self) -> bytes:
        """The certificate that a program must trust."""
        from cryptography.hazmat.primitives.serialization import Encoding

        return self._certificate.public_bytes(Encoding.PEM)

    def known(self, host: str) -> ssl.SSLContext | None:
        """As `context_for`, but only if the certificate exists already."""
        with self._lock:
            renewal, context = self._leaves.get(host, (None, None))
            if renewal is None or datetime.datetime.now(datetime.UTC) >= renewal:
                return None
            self._leaves.move_to_end(host)
            return context

    def context_for(self, host: str) -> ssl.SSLContext:
        """The TLS context of a server that stands in for `host`, a name or an address."""
        context = self.known(host)
        if context is not None:
            return context
        now = datetime.datetime.now(datetime.UTC)
        context = _server_context(host, self._make_leaf_pem(host, now))
        with self._lock:
            self._leaves[host] = (now + _LEAF_LIFE - _LEAF_RENEWAL, context)
            if len(self._leaves) > MAX_LEAVES:
                self._leaves.popitem(last=False)
        return context

    def _make_leaf_pem(self, host: str, now: datetime.datetime) -> bytes:
        """A key and the certificate for it, of this host alone."""
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        key = ec.generate_private_key(ec.SECP256R1())
        leaf = _certificate_builder("Cloche", self._certificate.subject, key, now, _LEAF_LIFE)
        leaf = leaf.add_extension(x509.SubjectAlternativeName([_general_name(host)]), critical=True)
        leaf = leaf.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        leaf = leaf.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        leaf = leaf.add_extension(_key_usage(digital_signature=True), critical=True)
        return key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ) + _sign_certificate(leaf, self._key).public_bytes(serialization.Encoding.PEM)


def _self_signed(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    # Distinguished by its name: two authorities of one name and different keys confuse clients that keep sessions.
    name = f"Cloche sandbox {os.urandom(8).hex()}"
    authority = _certificate_builder(name, _subject_name(name), key, now, _AUTHORITY_LIFE)
    authority = authority.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return _sign_certificate(authority.add_extension(_key_usage(key_cert_sign=True), critical=True), key)


def _certificate_builder(
    subject: str,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime.datetime,
    life: datetime.timedelta,
) -> x509.CertificateBuilder:
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(_subject_name(subject))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _sign_certificate(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    """The signed certificate. It names the key that signed it: strict clients, Python 3.13 among them, insist."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
    return builder.add_extension(signer, critical=False).sign(key, hashes.SHA256())


def _subject_name(common_name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_usage(*, digital_signature: bool = False, key_cert_sign: bool = False) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _server_context(host: str, pem: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sni_callback = _refuse_other_names(host)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    context.num_tickets = 0  # no session is resumed: every connection is checked by itself
    context.set_alpn_protocols(["http/1.1"])
    # OpenSSL reads keys from files only. This one is in no file system, and gone with its descriptor.
    fd = os.memfd_create("leaf", os.MFD_CLOEXEC)
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context


def _refuse_other_names(host: str) -> Callable[[ssl.SSLObject, str | None, ssl.SSLContext], int | None]:
    """An SNI callback that refuses a client which names another host than the requested one."""

    def check(_: ssl.SSLObject, named: str | None, __: ssl.SSLContext) -> int | None:
        agrees = named is None or named.lower().removesuffix(".") == host
        return None if agrees else ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME

    return check
