"""A sandbox's own certificate authority, as clients see it."""

from __future__ import annotations

import os
import ssl

import pytest
from cryptography import x509

from cloche.egress.authority import MAX_LEAVES, CertificateAuthority


@pytest.fixture(scope="module")
def authority() -> CertificateAuthority:
    return CertificateAuthority()


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None) -> ssl.SSLObject:
    """The client's side of a handshake in memory. Raises what either side does."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname=name)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (ours, theirs):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
    return ours


def strict_client(authority: CertificateAuthority) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=authority.certificate_pem.decode())
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # as Python 3.13 has it
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


@pytest.mark.parametrize("host", ["api.example.com", "192.0.2.7", "2001:db8::7"])
def test_a_strict_client_takes_its_word_for_a_name_and_an_address(authority: CertificateAuthority, host: str) -> None:
    secured = shake_hands(authority.context_for(host), strict_client(authority), host)
    assert secured.version() == "TLSv1.3"
    assert secured.selected_alpn_protocol() == "http/1.1"


def test_a_leaf_is_for_one_host_only(authority: CertificateAuthority) -> None:
    client = strict_client(authority)
    client.check_hostname = False
    leaf = shake_hands(authority.context_for("api.example.com"), client, "api.example.com").getpeercert()
    assert leaf is not None
    assert leaf["subjectAltName"] == (("DNS", "api.example.com"),)


def test_another_sandboxs_authority_is_not_trusted(authority: CertificateAuthority) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(CertificateAuthority().context_for("api.example.com"), strict_client(authority), "api.example.com")


def test_a_client_that_names_another_host_is_not_served(authority: CertificateAuthority) -> None:
    with pytest.raises(ssl.SSLError):
        shake_hands(authority.context_for("api.example.com"), strict_client(authority), "other.example.com")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_old_versions_of_tls_are_not_spoken(authority: CertificateAuthority) -> None:
    client = strict_client(authority)
    client.minimum_version = ssl.TLSVersion.TLSv1
    client.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError):
        shake_hands(authority.context_for("api.example.com"), client, "api.example.com")


def test_it_can_sign_hosts_and_no_other_authority(authority: CertificateAuthority) -> None:
    certificate = x509.load_pem_x509_certificate(authority.certificate_pem)
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert (constraints.value.ca, constraints.value.path_length) == (True, 0)


def test_leaves_are_kept_and_do_not_pile_up(authority: CertificateAuthority) -> None:
    first = authority.context_for("kept.example.com")
    assert authority.context_for("kept.example.com") is first
    for number in range(MAX_LEAVES):
        authority.context_for(f"a{number}.example.com")
    assert authority.context_for("kept.example.com") is not first


def test_no_descriptor_stays_open(authority: CertificateAuthority) -> None:
    before = len(os.listdir("/proc/self/fd"))
    authority.context_for("another.example.com")
    assert len(os.listdir("/proc/self/fd")) == before
