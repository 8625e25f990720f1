"""A server that speaks TLS, with an authority of its own that vouches for it: what a company's API is to a sandbox."""

from __future__ import annotations

import asyncio
import datetime
import json
import ssl
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

ADDRESS = "127.0.0.9"
LARGE_BYTES = 20 << 20


class Trust(NamedTuple):
    bundle: Path  # whom to trust
    server: ssl.SSLContext


def own_trust(directory: Path, names: list[str]) -> Trust:
    """An authority, and a server's certificate for those names."""
    key, authority = _certificate("An authority for tests", None, None)
    server_key, server = _certificate("A server", (key, authority), names)
    bundle, chain = directory / "bundle.pem", directory / "server.pem"
    bundle.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    private = server_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    chain.write_bytes(private + server.public_bytes(serialization.Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    return Trust(bundle, context)


def _certificate(
    name: str, signer: tuple[ec.EllipticCurvePrivateKey, x509.Certificate] | None, names: list[str] | None
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    signing_key, issuer = (key, subject) if signer is None else (signer[0], signer[1].subject)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=names is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()), critical=False)
    )
    if names is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(each) for each in names]), False)
    return key, builder.sign(signing_key, hashes.SHA256())


class Seen(NamedTuple):
    """A request as it reached the server."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    connection: int


class FarServer:
    """Answers over TLS at `port` and in plain text at `plain_port`, and remembers what it was asked."""

    def __init__(self, trust: Trust):
        self.tls = trust.server
        self.seen: list[Seen] = []
        self._connections = 0

    async def __aenter__(self) -> FarServer:
        self._tls = await asyncio.start_server(self._serve, ADDRESS, 0, ssl=self.tls)
        self._plain = await asyncio.start_server(self._serve, ADDRESS, 0)
        self.port: int = self._tls.sockets[0].getsockname()[1]
        self.plain_port: int = self._plain.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._tls.close()
        self._plain.close()

    def asked(self, path: str) -> Seen:
        """The one request for that path."""
        [found] = [each for each in self.seen if each.target.partition("?")[0] == path]
        return found

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        number = self._connections
        try:
            while (seen := await _read(reader, number)) is not None:
                self.seen.append(seen)
                if not await self._answer(seen, writer):
                    break
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection goes on. The path says how it is answered."""
        path = seen.target.partition("?")[0]
        if path in _ANSWERS:
            goes_on = await _ANSWERS[path](self, seen, writer)
        else:
            body = f"{seen.method} {path}\n".encode()
            writer.write(_head(200, f"content-length: {len(body)}") + (b"" if seen.method == "HEAD" else body))
            goes_on = True
        await writer.drain()
        return goes_on and seen.headers.get("connection") != "close"

    async def _echo(self, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        body = json.dumps({"headers": seen.headers, "body": seen.body.decode("latin-1")}).encode()
        echoed = [f"x-echo-{name}: {value}" for name, value in seen.headers.items()]
        writer.write(_head(200, f"content-length: {len(body)}", *echoed) + body)
        return True

    async def _trickle(self, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        """In chunks, each of one byte."""
        writer.write(_head(200, "transfer-encoding: chunked"))
        for byte in json.dumps(seen.headers).encode():
            writer.write(b"1\r\n%c\r\n" % byte)
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")
        return True

    async def _until_closed(self, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        writer.write(_head(200, "connection: close") + json.dumps(seen.headers).encode())
        return False

    async def _gzip(self, _: Seen, writer: asyncio.StreamWriter) -> bool:
        writer.write(_head(200, "content-encoding: gzip", "content-length: 3") + b"abc")
        return True

    async def _away(self, _: Seen, writer: asyncio.StreamWriter) -> bool:
        writer.write(_head(302, f"location: https://other.test:{self.port}/landed", "content-length: 0"))
        return True

    async def _large(self, _: Seen, writer: asyncio.StreamWriter) -> bool:
        writer.write(_head(200, f"content-length: {LARGE_BYTES}"))
        for _ in range(LARGE_BYTES >> 16):
            writer.write(b"x" * (1 << 16))
            await writer.drain()
        return True

    async def _dies(self, _: Seen, writer: asyncio.StreamWriter) -> bool:
        writer.write(_head(200, "content-length: 1000") + b"half")
        await writer.drain()
        writer.transport.abort()
        return False

    async def _silent(self, _: Seen, __: asyncio.StreamWriter) -> bool:
        return False


_ANSWERS = {
    "/echo": FarServer._echo,
    "/trickle": FarServer._trickle,
    "/until-closed": FarServer._until_closed,
    "/gzip": FarServer._gzip,
    "/away": FarServer._away,
    "/large": FarServer._large,
    "/dies": FarServer._dies,
    "/silent": FarServer._silent,
}


def _head(status: int, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} OK", *headers, "", ""]).encode("latin-1")


async def _read(reader: asyncio.StreamReader, connection: int) -> Seen | None:
    head = await reader.readuntil(b"\r\n\r\n")
    start, *lines = head[:-4].decode("latin-1").split("\r\n")
    method, target, _ = start.split(" ")
    pairs = [line.partition(": ") for line in lines]
    headers = {name.lower(): value for name, _, value in pairs}
    assert len(headers) == len(pairs), "a header came twice"
    return Seen(method, target, headers, await _body(reader, headers), connection)


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(headers.get("content-length", 0)))
    body = b""
    while length := int(await reader.readuntil(b"\r\n"), 16):
        body += await reader.readexactly(length)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return body
