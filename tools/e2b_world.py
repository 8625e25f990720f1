"""Runs a command in a little internet of its own, for others' tests of a sandbox's network, which want the real one.

    sudo python tools/e2b_world.py --port 8140 COMMAND ...

It is a network namespace with nothing but loopback, where 1.1.1.1, 8.8.8.8, connectivitycheck.gstatic.com, pypi.org and
www.github.com are servers of this program's, over TLS, that answer as those do; names below cloche.test lead, over TLS,
to a `cloche serve` on that port. The command finds in its environment whom to trust, and a configuration for that
server.
Needs root, `ip`, `unshare` and `mount`; nothing of it is left when the command has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import ipaddress
import os
import ssl
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DOMAIN = "cloche.test"
CONNECTIVITY = "connectivitycheck.gstatic.com"
PLAIN = {"pypi.org": "151.101.0.223", "www.github.com": "140.82.112.3"}  # as OpenSandbox's tests ask for them
ADDRESSES = {
    CONNECTIVITY: "142.250.74.35",
    DOMAIN: "203.0.113.7",
    **PLAIN,
}  # public ones: others are refused to sandboxes
ANSWERS = {
    "1.1.1.1": "301 Moved Permanently\r\nLocation: https://one.one.one.one/",
    "8.8.8.8": "302 Found\r\nLocation: https://dns.google/",
    ADDRESSES[CONNECTIVITY]: "204 No Content",
    **dict.fromkeys(PLAIN.values(), "200 OK"),
}
NAME_SERVER = "127.0.0.53"
INSIDE = "E2B_WORLD_INSIDE"
# In this little internet all of it is on the host itself, whose own addresses are refused unless its operator has them.
INTERNAL = ", ".join(f'"{address}"' for address in (*ANSWERS, ADDRESSES[DOMAIN]))
CONFIG = f'[server]\ndomain = "{DOMAIN}"\n[network]\nallow = ["*:*"]\ninternal = [{INTERNAL}]\n'


def main() -> None:
    asked = _arguments()
    if INSIDE not in os.environ:
        os.environ[INSIDE] = "1"
        os.execvp("unshare", ["unshare", "--net", "--mount", sys.executable, *sys.argv])
    with tempfile.TemporaryDirectory() as place:
        _furnish(Path(place))
        sys.exit(asyncio.run(_run(Path(place), asked.port, asked.command)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--port", type=int, required=True, help="where the command's server listens")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser.parse_args()


def _furnish(place: Path) -> None:
    """Addresses, a name server, and who vouches for all of them."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for address in (*ANSWERS, ADDRESSES[DOMAIN]):
        subprocess.run(["ip", "address", "add", f"{address}/32", "dev", "lo"], check=True)
    (place / "resolv.conf").write_text(f"nameserver {NAME_SERVER}\n")
    subprocess.run(["mount", "--bind", place / "resolv.conf", "/etc/resolv.conf"], check=True)
    (place / "cloche.toml").write_text(CONFIG)
    _write_certificates(place)


async def _run(place: Path, port: int, command: list[str]) -> int:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(place / "server.pem")
    for address, answer in ANSWERS.items():
        await asyncio.start_server(_answering(answer), address, 443, ssl=tls)
    await asyncio.start_server(_leading_to(port), ADDRESSES[DOMAIN], 443, ssl=tls)
    await asyncio.get_running_loop().create_datagram_endpoint(NameServer, local_addr=(NAME_SERVER, 53))
    own = {
        "SSL_CERT_FILE": place / "bundle.pem",
        "NODE_EXTRA_CA_CERTS": place / "authority.pem",
        "CLOCHE_CONFIG": place / "cloche.toml",
        "E2B_DOMAIN": DOMAIN,
    }
    process = await asyncio.create_subprocess_exec(*command, env={**os.environ, **{k: str(v) for k, v in own.items()}})
    return await process.wait()


def _answering(answer: str):  # type: ignore[no-untyped-def]
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {answer}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        writer.close()

    return serve


def _leading_to(port: int):  # type: ignore[no-untyped-def]
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))

    return serve


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while part := await reader.read(1 << 16):
            writer.write(part)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


class NameServer(asyncio.DatagramProtocol):
    """Knows the names of `ADDRESSES`, and what is below them."""

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def datagram_received(self, asked: bytes, sender: tuple[str, int]) -> None:
        self._transport.sendto(_told(asked), sender)


def _told(asked: bytes) -> bytes:
    labels, at = [], 12
    while length := asked[at]:
        labels.append(asked[at + 1 : at + 1 + length].decode().lower())
        at += 1 + length
    (kind,) = struct.unpack(">H", asked[at + 1 : at + 3])
    name, question = ".".join(labels), asked[12 : at + 5]
    found = next((ip for known, ip in ADDRESSES.items() if f".{name}".endswith(f".{known}")), None)
    packed = ipaddress.IPv4Address(found).packed if found is not None and kind == 1 else b""
    answer = struct.pack(">HHHLH", 0xC00C, 1, 1, 60, 4) + packed if packed else b""
    flags = 0x8180 if found is not None else 0x8183  # the latter: there is no such name
    return asked[:2] + struct.pack(">HHHHH", flags, 1, bool(answer), 0, 0) + question + answer


def _write_certificates(place: Path) -> None:
    """An authority's, and one of the server's for all names and addresses."""
    pem = serialization.Encoding.PEM
    key, authority = _certificate("A little internet", None)
    server_key, server = _certificate("A server", (key, authority))
    private = server_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (place / "server.pem").write_bytes(private + server.public_bytes(pem))
    (place / "authority.pem").write_bytes(authority.public_bytes(pem))
    usual = ssl.get_default_verify_paths().cafile
    (place / "bundle.pem").write_bytes((Path(usual).read_bytes() if usual else b"") + authority.public_bytes(pem))


def _certificate(
    name: str, signer: tuple[ec.EllipticCurvePrivateKey, x509.Certificate] | None
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    signing_key, issuer = (key, subject) if signer is None else (signer[0], signer[1].subject)
    names = [x509.DNSName(each) for each in (CONNECTIVITY, *PLAIN, f"*.{DOMAIN}")]
    addresses = [x509.IPAddress(ipaddress.ip_address(each)) for each in ANSWERS]
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.BasicConstraints(ca=signer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()), critical=False)
        .add_extension(x509.SubjectAlternativeName([*names, *addresses]), critical=False)
    )
    return key, builder.sign(signing_key, hashes.SHA256())


if __name__ == "__main__":
    main()
