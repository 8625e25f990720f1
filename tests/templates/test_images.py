"""Imported images: their files, their Python, their limits, and the walls around them."""

from __future__ import annotations

import gzip
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from e2b import Template as E2bTemplate
from e2b_code_interpreter import Sandbox as E2bSandbox
from tests.conftest import RunningServer, embedding, serving
from tests.opensandbox.conftest import Lifecycle, said
from tests.templates.image_roots import (
    add_python,
    digest_of,
    file_member,
    make_busybox_root,
    other_member,
    pack_layer,
    pack_tree,
    save_archive,
    write_layout,
)

import cloche
from cloche import cli, errors
from cloche.config import Config, PoolConfig
from cloche.engine.operations.conformance import claims_for_backend, make_box_opener
from cloche.isolation import conformance
from cloche.model import Template
from cloche.sdk.assembly import assemble_engine
from cloche.templates import Catalogue, Recipe, import_image
from cloche.templates import image_source as sources

pytestmark = pytest.mark.skipif(not Path("/usr/bin/busybox").exists(), reason="needs busybox-static")

UPPER = pack_layer(
    [
        file_member("data/old.txt", b"old"),
        file_member("data/inner/a.txt", b"a"),
        file_member("data/inner/b.txt", b"b"),
        other_member("data/again.txt", tarfile.LNKTYPE, "data/old.txt"),
        file_member("usr/bin/root-shell", b"#!/bin/sh\nid\n", 0o4755),
        file_member("greeting_of_image.py", b"TEXT = 'imported'\n"),
    ]
)
TOP = pack_layer(
    [
        file_member("data/inner/c.txt", b"c"),
        file_member("data/.wh.old.txt"),
        file_member("data/inner/.wh..wh..opq"),
    ]
)
# Everything in it is where a sandbox has something of its own, or would lead the host elsewhere.
NASTY = pack_layer(
    [
        other_member("proc", tarfile.SYMTYPE, "/data"),
        other_member("tmp", tarfile.SYMTYPE, "/"),
        other_member("home", tarfile.SYMTYPE, "../../../../../../etc"),
        other_member("var", tarfile.SYMTYPE, "/root"),
        other_member("opt", tarfile.SYMTYPE, "/usr"),
        other_member("app", tarfile.SYMTYPE, "/etc"),
        other_member("run", tarfile.SYMTYPE, "/usr"),
        file_member("mnt", b"no directory"),
        other_member("dev/mem", tarfile.CHRTYPE),
        other_member("etc/passwd", tarfile.SYMTYPE, "/../../../../etc/passwd"),
        other_member("etc/pip.conf", tarfile.SYMTYPE, "/root/.ssh/id_rsa"),
        file_member("usr/bin/root-shell", b"#!/bin/sh\nid\n", 0o6755),
    ]
)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("roots")
    add_python(make_busybox_root(place / "own"))
    make_busybox_root(place / "bare")
    return place


@pytest.fixture(scope="module")
def imported(roots: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A data directory with the templates `own` (with a Python of its own) and `bare` (without), and `nasty`."""
    place = tmp_path_factory.mktemp("images")
    catalogue = Catalogue(place / "data")
    base = pack_tree(roots / "own")
    env = ["PATH=/usr/local/bin:/usr/bin:/bin", "GREETING=hello from the image", "HOME=/nowhere", "LD_PRELOAD=/x.so"]
    saved = save_archive(place / "own.tar", [base, UPPER, TOP], env=env)
    recipe = Recipe(name="own", imports=("csv",), env={"ADDED": "1"})
    import_image(catalogue, saved, recipe)
    import_image(catalogue, save_archive(place / "nasty.tar", [base, NASTY]), Recipe(name="nasty"))
    layout = write_layout(place / "layout", [pack_tree(roots / "bare")], env=["PATH=/bin"])
    import_image(catalogue, layout, Recipe(name="bare"))
    return str(place / "data")


@pytest.fixture(scope="module")
def engine(imported: str) -> Iterator[None]:
    with embedding(imported):
        yield


def read_text(box: cloche.Sandbox, command: str) -> str:
    done = box.commands.run(command)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_image_with_its_own_python_runs_kernels_commands_and_files(engine: None):
    with cloche.Sandbox("own") as box:
        assert box.run("1+1").text == "2"
        assert box.run("import sys; print(sys.base_prefix, 'csv' in sys.modules)").stdout == "/opt/cloche/python True\n"
        assert read_text(box, "readlink /opt/cloche/python") == "/usr/local\n"
        assert read_text(box, "cat /data/note.txt; echo $GREETING $ADDED $HOME $LD_PRELOAD") == (
            "from the image\nhello from the image 1 /home/user\n"
        )
        assert read_text(box, "python3 -c 'import sys; print(sys.version_info[:2])'") == f"{sys.version_info[:2]}\n"
        box.files.write("/home/user/x.txt", b"mine")
        assert read_text(box, "cat ~/x.txt") == "mine"
        assert box.files.read("/data/note.txt") == b"from the image\n"


def test_whiteouts_hide_files_of_lower_layers_only(engine: None):
    with cloche.Sandbox("own") as box:
        assert read_text(box, "ls /data /data/inner") == "/data:\nagain.txt\ninner\nnote.txt\n\n/data/inner:\nc.txt\n"
        assert read_text(box, "cat /data/again.txt") == "old"


def test_image_without_python_runs_ours_and_commands_see_the_image(engine: None):
    with cloche.Sandbox("bare") as box:
        assert box.run("1+1").text == "2"
        ours = box.run("import sys, ssl, sqlite3, ctypes; print(sys.version.split()[0])")
        assert ours.stdout == f"{platform.python_version()}\n"
        assert read_text(box, "ls -d /usr/* /lib* 2>/dev/null; echo $SHELL") == "/usr/share\n/bin/sh\n"
        assert read_text(box, "cat /etc/os-release").startswith("ID=tiny")
        assert box.run("import subprocess\nsubprocess.check_output('id -un', shell=True)").text == "b'user\\n'"
        assert read_text(box, "python3 -c 'print(40+2)'") == "42\n"


@pytest.mark.long
@pytest.mark.parametrize("name", ["own", "bare"])
def test_pause_and_resume_keep_the_variables_of_an_image(engine: None, name: str):
    with cloche.Sandbox(name) as box:
        box.run("x = 41")
        box.pause()
        box.resume()
        assert box.run("x + 1").text == "42"


def test_set_uid_programs_of_an_image_give_no_rights(engine: None, imported: str):
    root = Path(Catalogue(imported).resolve("nasty").root, "rootfs")
    assert not [path for path in root.rglob("*") if path.lstat().st_mode & 0o6022 and not path.is_symlink()]
    with cloche.Sandbox("nasty") as box:
        assert read_text(box, "/usr/bin/root-shell").startswith("uid=1000(user)")


def test_symlinks_of_an_image_lead_sandboxes_to_no_file_of_the_host(engine: None):
    with cloche.Sandbox("nasty") as box:
        assert read_text(box, "ls /home /app /mnt") == "/app:\n\n/home:\nuser\n\n/mnt:\ndata\n"
        assert read_text(box, "readlink /etc/passwd; ls /opt") == "/opt/cloche/etc/passwd\ncloche\n"
        assert read_text(box, "cat /etc/passwd").count("\n") == 3


@pytest.mark.long
@pytest.mark.parametrize("name", ["nasty", "bare"])
async def test_every_claim_holds_over_the_root_of_an_image(imported: str, name: str):
    async with assemble_engine(Config(data_dir=imported, pool=PoolConfig(ready=1))) as engine:
        opener = make_box_opener(engine, name)
        found = [each async for each in conformance.run_claims(opener, claims_for_backend("namespaces"))]
    assert {each.name: each.detail for each in found if not each.passed} == {}


# -- hostile and damaged ones


def import_saved(tmp_path: Path, *layers: bytes, **options) -> Template:
    file = save_archive(tmp_path / "image.tar", list(layers), **options)
    return import_image(Catalogue(tmp_path / "data"), file, Recipe(name="hostile"))


def sparse_layer() -> bytes:
    member, _ = file_member("sparse")
    member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "sparse"}
    return pack_layer([(member, b"9" * 512)])


def layer_with_field(key: str, value: str) -> bytes:
    member, _ = file_member("long")
    member.pax_headers = {key: value}
    return pack_layer([member])


def layer_with_size(field: bytes) -> bytes:
    """A layer with a file of that size, as it stands in the header."""
    header = bytearray(file_member("x")[0].tobuf())
    header[124:136] = field
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(1024)


HOSTILE = {
    "parent": pack_layer([file_member("../outside", b"x")]),
    "absolute": pack_layer([file_member("/tmp/outside", b"x")]),
    "parent inside": pack_layer([file_member("a/../../outside", b"x")]),
    "hard link outside": pack_layer([other_member("passwd", tarfile.LNKTYPE, "../../../etc/passwd")]),
    "hard link to the host": pack_layer([other_member("passwd", tarfile.LNKTYPE, "/etc/passwd")]),
    "hard link to nothing": pack_layer([other_member("passwd", tarfile.LNKTYPE, "etc/passwd")]),
    "hard link to a directory": pack_layer(
        [
            other_member("a", tarfile.DIRTYPE),
            other_member("b", tarfile.LNKTYPE, "a"),
        ]
    ),
    "character device": pack_layer([other_member("data/mem", tarfile.CHRTYPE)]),
    "block device": pack_layer([other_member("data/disk", tarfile.BLKTYPE)]),
    "pipe": pack_layer([other_member("data/pipe", tarfile.FIFOTYPE)]),
    "unknown kind": pack_layer([other_member("data/x", b"V")]),
    "twice": pack_layer([file_member("a", b"1"), file_member("a", b"2")]),
    "file below a file": pack_layer([file_member("a", b"1"), file_member("a/b", b"2")]),
    "loop of links": pack_layer([other_member("a", tarfile.SYMTYPE, "a"), file_member("a/b", b"2")]),
    "too deep": pack_layer([file_member("d/" * 100 + "x")]),
    "long name": pack_layer([file_member("n" * 300)]),
    "huge header": layer_with_field("comment", "c" * 100_000),
    "nul in a name": layer_with_field("path", "a\0b"),
    "negative size": layer_with_size(b"\xff" * 12),
    "size beyond all disks": layer_with_size(b"\x80" + b"\xff" * 11),
    "size in words": layer_with_field("size", "-512"),
    "sparse": sparse_layer(),
    "cut off": pack_layer([file_member("a", b"1" * 4096)])[:1024],
    "no tar": b"no tar" * 512,
    "whiteout of the directory above": pack_layer([file_member("data/.wh...", b"")]),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_layer_is_refused_and_leaves_nothing(tmp_path: Path, kind: str):
    with pytest.raises((errors.InvalidRequest, errors.TooLarge)):
        import_saved(tmp_path, HOSTILE[kind])
    assert not (tmp_path / "outside").exists()
    assert [path.name for path in (tmp_path / "data/templates/hostile").iterdir()] == [".lock"]


def test_file_below_a_symlink_lands_in_the_image(roots: Path, tmp_path: Path):
    """As layers of some tools have it: `lib/x` where `lib` is a link to `usr/lib`. The host's is never followed."""
    outside = tmp_path / "outside"
    outside.mkdir()
    lower = pack_layer(
        [
            other_member("usr/lib", tarfile.DIRTYPE),
            other_member("lib", tarfile.SYMTYPE, "usr/lib"),
            other_member("trap", tarfile.SYMTYPE, str(outside)),
            other_member("up", tarfile.SYMTYPE, "../../../../../../srv"),
        ]
    )
    upper = pack_layer([file_member("lib/x", b"x"), file_member("trap/y", b"y"), file_member("up/z", b"z")])
    root = Path(import_saved(tmp_path, lower, upper).root, "rootfs")
    assert (root / "usr/lib/x").read_bytes() == b"x" and (root / "srv/z").read_bytes() == b"z"
    assert list(outside.iterdir()) == []


def test_layer_that_differs_from_its_digest_is_refused(tmp_path: Path):
    with pytest.raises(errors.InvalidRequest, match="has the digest"):
        import_saved(tmp_path, TOP, diff_ids=[digest_of(UPPER)])
    layout = write_layout(tmp_path / "layout", [UPPER])
    blobs = sorted((layout / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    for blob in blobs:
        content = blob.read_bytes()
        blob.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(errors.InvalidRequest):
            import_image(Catalogue(tmp_path / "data"), layout, Recipe(name="damaged"))
        blob.write_bytes(content)


def test_layout_with_a_symlink_for_a_layer_is_refused(tmp_path: Path):
    layout = write_layout(tmp_path / "layout", [UPPER])
    for blob in list((layout / "blobs/sha256").iterdir()):
        blob.rename(tmp_path / blob.name)
        blob.symlink_to(tmp_path / blob.name)
    with pytest.raises(errors.InvalidRequest, match="incomplete"):
        import_image(Catalogue(tmp_path / "data"), layout, Recipe(name="links"))


def test_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "_RATIO_FROM", 1 << 20)
    layout = write_layout(tmp_path / "layout", [bytes(64 << 20)])
    with pytest.raises(errors.TooLarge, match="bomb"):
        import_image(Catalogue(tmp_path / "data"), layout, Recipe(name="bomb"))


def test_image_of_another_machine_is_refused(tmp_path: Path):
    with pytest.raises(errors.InvalidRequest, match="linux/s390x"):
        import_saved(tmp_path, UPPER, architecture="s390x")


def test_device_in_a_root_directory_is_refused(roots: Path, tmp_path: Path):
    root = make_busybox_root(tmp_path / "root")
    os.mkfifo(root / "data/pipe")
    with pytest.raises(errors.InvalidRequest, match="data/pipe"):
        import_image(Catalogue(tmp_path / "data"), root, Recipe(name="pipe"))


# -- the command


def call(data_dir: Path | str, *words: str) -> str:
    return CliRunner().invoke(cli.main, ["--data-dir", str(data_dir), "template", *words]).output


def test_command_imports_a_root_archive_once_and_says_where_it_is_from(roots: Path, tmp_path: Path):
    archive = tmp_path / "root.tar.gz"
    archive.write_bytes(gzip.compress(pack_tree(roots / "bare"), 1))
    first = call(tmp_path / "data", "import", str(archive), "--name", "tiny")
    assert "from root.tar.gz (sha256:" in first and "Python of the host" in first
    assert call(tmp_path / "data", "import", str(archive), "--name", "tiny").split()[0] == first.split()[0]
    assert "from root.tar.gz (sha256:" in call(tmp_path / "data", "list")
    shown = json.loads(call(tmp_path / "data", "show", "tiny", "--json"))
    assert shown["image"]["source"] == "root.tar.gz" and shown["image"]["own_python"] is False


def test_command_asks_for_a_name(tmp_path: Path):
    file = save_archive(tmp_path / "image.tar", [UPPER])
    assert "give --name" in call(tmp_path / "data", "import", str(file))
    assert "with --name" in call(tmp_path / "data", "import", str(tmp_path))


def test_imported_image_cannot_be_exported(imported: str, tmp_path: Path):
    assert "import it on the other machine" in call(imported, "export", "own", str(tmp_path / "own.tar.gz"))


@pytest.mark.long
@pytest.mark.skipif(not (shutil.which("umoci") and shutil.which("skopeo")), reason="needs umoci and skopeo")
@pytest.mark.parametrize("transport", ["docker-archive", "oci", "oci-archive"])
def test_image_made_by_umoci_and_skopeo_is_imported(roots: Path, tmp_path: Path, transport: str):
    def run(*words: str) -> None:
        subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)

    run("umoci", "init", "--layout", "made")
    run("umoci", "new", "--image", "made:v1")
    run("umoci", "unpack", "--image", "made:v1", "bundle")
    for step in ("base", "upper", "top"):
        root = tmp_path / "bundle/rootfs"
        if step == "base":
            shutil.copytree(roots / "own", root, symlinks=True, dirs_exist_ok=True)
        elif step == "upper":
            (root / "data/old.txt").write_text("old")
            (root / "data/inner").mkdir()
            (root / "data/inner/a.txt").write_text("a")
        else:
            (root / "data/old.txt").unlink()
            shutil.rmtree(root / "data/inner")
            (root / "data/inner").mkdir()
            (root / "data/inner/c.txt").write_text("c")
        run("umoci", "repack", "--refresh-bundle", "--image", "made:v1", "bundle")
    run("umoci", "config", "--image", "made:v1", "--config.env", "GREETING=umoci")
    target = tmp_path / ("copied" if transport == "oci" else "copied.tar")
    run("skopeo", "--insecure-policy", "copy", "oci:made:v1", f"{transport}:{target}:tests/image:1")
    template = import_image(Catalogue(tmp_path / "data"), target, Recipe(name="made"))
    with embedding(str(tmp_path / "data")), cloche.Sandbox("made") as box:
        assert box.run("1+1").text == "2"
        seen = read_text(box, "ls /data /data/inner; echo $GREETING")
        assert seen == "/data:\ninner\nnote.txt\n\n/data/inner:\nc.txt\numoci\n"
    assert template.image is not None and template.image.own_python


# -- the dialects


@pytest.fixture(scope="module")
def image_server(imported: str) -> Iterator[RunningServer]:
    with serving(imported) as running:
        yield running


@pytest.mark.long
@pytest.mark.parametrize("image", ["bare", "own"])
def test_e2b_builds_from_an_imported_image(image_server: RunningServer, image: str):
    access = {"api_key": image_server.key, "api_url": f"{image_server.url}/e2b"}
    steps = E2bTemplate().from_image(f"docker.io/library/{image}").run_cmd("cat /data/note.txt > ~/copied")
    lines: list[str] = []
    E2bTemplate.build(steps, f"built-on-{image}", on_build_logs=lambda entry: lines.append(entry.message), **access)
    assert any(line.startswith(f"[base] FROM {image}@") for line in lines)
    box = E2bSandbox.create(f"built-on-{image}", **image_server.e2b)
    try:
        assert box.commands.run("cat ~/copied /etc/os-release").stdout.startswith("from the image\nID=tiny")
        assert box.run_code("1+1").text == "2"
        box.run_code("kept = 41")
        box.pause()
        box = E2bSandbox.connect(box.sandbox_id, **image_server.e2b)
        assert box.run_code("kept + 1").text == "42"
    finally:
        box.kill()


@pytest.mark.long
def test_opensandbox_runs_an_imported_image(image_server: RunningServer):
    lifecycle = Lifecycle(image_server)
    made = lifecycle.create(image={"uri": "bare"}).json()
    try:
        events = lifecycle.execd(made["id"]).run("print(open('/data/note.txt').read())")
        assert said(events, "stdout").strip() == "from the image"
    finally:
        lifecycle.http.delete(f"/sandboxes/{made['id']}")
