"""Roots and archives of images for tests, made of this host's own files."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

_LEFT_OUT = (
    "site-packages",
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "turtledemo",
    "ensurepip",
    "__pycache__",
    "config-*",
)
MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)


def make_busybox_root(root: Path) -> Path:
    """A root with nothing but a static busybox and a note."""
    (root / "bin").mkdir(parents=True)
    (root / "etc").mkdir()
    shutil.copy2("/usr/bin/busybox", root / "bin/busybox")
    for name in ("sh", "ls", "cat", "echo", "id", "env", "pwd", "test", "wc", "sleep", "touch", "mount", "readlink"):
        (root / "bin" / name).symlink_to("busybox")
    (root / "etc/os-release").write_text('ID=tiny\nPRETTY_NAME="Tiny"\n')
    (root / "usr/share/zoneinfo/Europe").mkdir(parents=True)
    shutil.copy2("/usr/share/zoneinfo/Europe/Berlin", root / "usr/share/zoneinfo/Europe/Berlin")
    (root / "data").mkdir()
    (root / "data/note.txt").write_text("from the image\n")
    return root


def add_python(root: Path, prefix: str = "usr/local") -> Path:
    """This interpreter and the libraries that it needs, below that prefix of the root."""
    minor = f"python3.{sys.version_info.minor}"
    base = Path(sys.base_prefix)
    target = root / prefix
    (target / "bin").mkdir(parents=True)
    program = Path(os.path.realpath(sys._base_executable))  # type: ignore[attr-defined]
    shutil.copy2(program, target / "bin" / minor)
    (target / "bin/python3").symlink_to(minor)
    shutil.copytree(
        base / "lib" / minor, target / "lib" / minor, ignore=shutil.ignore_patterns(*_LEFT_OUT), symlinks=True
    )
    (target / "lib" / minor / "site-packages").mkdir()
    threads = Path("/lib", f"{os.uname().machine}-linux-gnu", "libgcc_s.so.1")  # opened when a thread ends
    modules = [threads, program, *base.glob(f"lib/{minor}/lib-dynload/*.so"), *base.glob("lib/libpython3.*.so.1.0")]
    for library in sorted(_list_libraries(modules)):
        place = root / library.lstrip("/") if "ld-linux" in library else root / "usr/lib" / Path(library).name
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(library, place)
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc/ld.so.conf").write_text("/usr/local/lib\n")
    subprocess.run(["/sbin/ldconfig", "-r", str(root)], check=True, capture_output=True)
    return root


def _list_libraries(programs: list[Path]) -> set[str]:
    found = set()
    for program in programs:
        said = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False).stdout
        for line in said.splitlines():
            path = line.partition("=>")[2].split() or line.split()
            if path and path[0].startswith("/"):
                found.add(path[0])
        found |= {str(program)} if program.name == "libgcc_s.so.1" else set()
    return found


def pack_layer(entries: list[tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]]) -> bytes:
    """An uncompressed layer."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            member, content = entry if isinstance(entry, tuple) else (entry, b"")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def pack_tree(root: Path) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for child in sorted(root.iterdir()):
            archive.add(child, child.name)
    return packed.getvalue()


def file_member(name: str, content: bytes = b"", mode: int = 0o644) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.mode = mode
    return member, content


def other_member(name: str, kind: bytes, target: str = "", mode: int = 0o755) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode = kind, target, mode
    return member


def digest_of(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def save_archive(
    path: Path,
    layers: list[bytes],
    *,
    env: list[str] | None = None,
    architecture: str = MACHINE,
    diff_ids: list[str] | None = None,
) -> Path:
    """An archive as `docker save` writes it."""
    config = {
        "architecture": architecture,
        "os": "linux",
        "config": {"Env": env},
        "rootfs": {"type": "layers", "diff_ids": diff_ids or [digest_of(layer) for layer in layers]},
    }
    names = [f"{digest_of(layer)[7:19]}{number}/layer.tar" for number, layer in enumerate(layers)]
    manifest = [{"Config": "config.json", "RepoTags": ["tests/image:1"], "Layers": names}]
    files = [("config.json", json.dumps(config).encode()), *zip(names, layers, strict=True)]
    content = pack_layer(
        [file_member(name, data) for name, data in [*files, ("manifest.json", json.dumps(manifest).encode())]]
    )
    path.write_bytes(content)
    return path


def write_layout(directory: Path, layers: list[bytes], *, env: list[str] | None = None) -> Path:
    """An OCI layout with layers compressed by gzip."""
    blobs = directory / "blobs/sha256"
    blobs.mkdir(parents=True)

    def add(content: bytes) -> dict[str, object]:
        digest = digest_of(content)
        (blobs / digest[7:]).write_bytes(content)
        return {"mediaType": "application/octet-stream", "digest": digest, "size": len(content)}

    config = {
        "architecture": MACHINE,
        "os": "linux",
        "config": {"Env": env},
        "rootfs": {"type": "layers", "diff_ids": [digest_of(layer) for layer in layers]},
    }
    manifest = {
        "schemaVersion": 2,
        "config": add(json.dumps(config).encode()),
        "layers": [add(gzip.compress(layer, 1)) for layer in layers],
    }
    index = {"schemaVersion": 2, "manifests": [add(json.dumps(manifest).encode())]}
    (directory / "index.json").write_text(json.dumps(index))
    (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return directory
