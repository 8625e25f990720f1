"""Which version of a template a name means, what two of them differ in, and a template as one file."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from cloche import cli, errors
from cloche.model import Template
from cloche.templates import (
    Catalogue,
    build,
    compare_templates,
    ensure_template,
    export_template,
    import_archive,
    pythons,
    recipe,
)
from cloche.templates import catalogue as catalogues
from cloche.templates.archive import CONTENTS_NAME
from cloche.templates.build import describe_template, template_version
from cloche.templates.recipe import Recipe

OWN = pythons.own_interpreter()
assert OWN is not None


def make(catalogue: Catalogue, packages: str, at: float = 1.0, **changes: object) -> Template:
    """A template as a build leaves it, without the packages themselves: a module, a script and links are enough."""
    wanted = Recipe(**{"name": "geo", "env": {"UNITS": "metric"}, **changes})  # type: ignore[arg-type]
    locked = build.parse_lock("".join(f"{each} \\\n    --hash=sha256:00\n" for each in packages.split()))
    version = template_version(wanted, OWN, locked)
    root = catalogue.directory / wanted.name / version
    series = root / "env/lib" / f"python{OWN.minor_version}"
    (series / "site-packages").mkdir(parents=True)
    (series / "site-packages/six.py").write_text("A = 'ä'\n" * 1000)
    (series / "site-packages/nothing.py").write_text("")
    (root / "env/bin").mkdir()
    (root / "env/bin/six").write_text("#!/opt/cloche/env/bin/python3\n")
    (root / "env/bin/six").chmod(0o755)
    (root / "env/bin/python3").symlink_to(f"/opt/cloche/python/bin/python{OWN.minor_version}")
    (root / "env/lib64").symlink_to("lib")
    (root / "template.toml").write_text(recipe.canonical_text(wanted))
    (root / "lock.txt").write_text(locked.text)
    template = describe_template(wanted, OWN, locked, version, root, 4096)
    catalogues.write_template(msgspec.structs.replace(template, created_at=at), root)
    return catalogue.resolve(f"{wanted.name}@{version}")


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    return Catalogue(tmp_path / "data", {"maps": "geo"})


def run(catalogue: Catalogue, *words: str):
    return CliRunner().invoke(cli.main, ["--data-dir", str(catalogue.directory.parent), "template", *words])


# -- pins


def test_a_pinned_version_is_used_after_newer_builds(catalogue):
    first, second = make(catalogue, "six==1.0", 1.0), make(catalogue, "six==2.0", 2.0)
    assert catalogue.resolve("geo") == second
    assert run(catalogue, "pin", first.ref).stdout == f"geo is {first.ref} from now on\n"
    third = make(catalogue, "six==3.0", 3.0)
    assert catalogue.resolve("geo") == catalogue.resolve("maps") == ensure_template(catalogue, "geo") == first
    assert catalogue.resolve(third.ref) == third
    assert [line.endswith("pinned") for line in run(catalogue, "list").stdout.splitlines()] == [False, False, True]
    assert run(catalogue, "unpin", "geo").stdout.startswith(f"geo is {third.ref}")
    assert catalogue.resolve("geo") == third
    assert run(catalogue, "unpin", "geo").exit_code != 0


def test_rolling_back_goes_one_version_back_each_time(catalogue):
    first, second, third = (make(catalogue, f"six=={at}", at) for at in (1.0, 2.0, 3.0))
    assert run(catalogue, "rollback", "geo").stdout.startswith(f"geo is {second.ref}")
    assert run(catalogue, "rollback", "geo").stdout.startswith(f"geo is {first.ref}")
    over = run(catalogue, "rollback", "geo")
    assert over.exit_code != 0 and "oldest" in over.stderr
    assert catalogue.resolve("geo") == first and catalogue.list() == [third, second, first]
    history = run(catalogue, "history", "geo").stdout.splitlines()
    assert [line.split()[0] for line in history[::2]] == [third.ref, second.ref, first.ref]
    assert history[1].strip().startswith("1 changed") and history[4].endswith("pinned")


def test_a_pinned_version_cannot_be_removed(catalogue):
    first = make(catalogue, "six==1.0")
    catalogue.pin(first.ref)
    with pytest.raises(errors.InvalidRequest, match="unpin geo"):
        catalogue.remove("geo")
    catalogue.unpin("geo")
    assert catalogue.remove("geo") == first


def test_a_pin_of_a_version_that_is_gone_is_said_and_nothing_else_is_taken(catalogue):
    first, second = make(catalogue, "six==1.0", 1.0), make(catalogue, "six==2.0", 2.0)
    catalogue.pin(first.ref)
    Path(first.root).rename(catalogue.directory.parent / "elsewhere")
    for ask in (catalogue.resolve, lambda ref: ensure_template(catalogue, ref)):
        with pytest.raises(errors.TemplateNotFound, match="unpin geo") as caught:
            ask("geo")
        assert second.ref in str(caught.value)


@pytest.mark.parametrize("ref", ["geo@ffff", "nothing", "../geo"])
def test_a_missing_version_cannot_be_pinned(catalogue, ref):
    make(catalogue, "six==1.0")
    with pytest.raises(errors.TemplateNotFound):
        catalogue.pin(ref)
    assert catalogue.pinned("geo") is None


# -- differences


def test_a_difference_has_packages_recipe_and_sizes(catalogue):
    before = make(catalogue, "six==1.0 gone==1.0 same==1.0", 1.0)
    after = make(catalogue, "six==2.0 new==1.0 same==1.0", 2.0, env={"UNITS": "imperial"}, imports=("six",))
    found = compare_templates(before, after)
    assert found.packages_added == ("new==1.0",) and found.packages_removed == ("gone==1.0",)
    assert [(each.what, each.before, each.after) for each in found.packages_changed] == [("six", "1.0", "2.0")]
    assert [each.what for each in found.recipe] == ["imports", "env"] and found.python is None
    lines = run(catalogue, "diff", before.ref, "geo").stdout.splitlines()
    assert lines[0] == f"{before.ref} -> {after.ref}"
    assert {"  + new==1.0", "  - gone==1.0", "  ~ six 1.0 -> 2.0"} <= set(lines)
    assert '  ~ template.toml: env = {"UNITS":"metric"} -> {"UNITS":"imperial"}' in lines
    assert json.loads(run(catalogue, "diff", before.ref, "geo", "--json").stdout)["packages_added"] == ["new==1.0"]
    assert "no difference" in run(catalogue, "diff", "geo", after.ref).stdout


# -- archives


def tree(root: str | Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for directory, directories, files in os.walk(root):
        for path in (Path(directory, name) for name in (*directories, *files)):
            key = str(path.relative_to(root))
            if path.is_symlink():
                found[key] = os.readlink(path)
            else:
                found[key] = (path.stat().st_mode, path.read_bytes() if path.is_file() else None)
    return found


def test_a_template_goes_to_another_machine_as_one_file(catalogue, tmp_path):
    template = make(catalogue, "six==1.0", 12.5)
    file = tmp_path / "geo.tar.gz"
    said = run(catalogue, "export", "geo", str(file)).stdout
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert said.startswith(template.ref) and said.split()[-1] == digest
    assert export_template(template, tmp_path / "again.tar.gz") == digest
    with pytest.raises(errors.InvalidRequest, match=f"no directory {tmp_path / 'missing'}$"):
        export_template(template, tmp_path / "missing" / "a.tar.gz")
    other = Catalogue(tmp_path / "other")
    assert run(other, "import", str(file), "--sha256", digest).stdout.startswith(template.ref)
    moved = other.resolve("geo")
    assert msgspec.structs.replace(moved, root="", size_bytes=0) == msgspec.structs.replace(
        template, root="", size_bytes=0
    )
    here, there = tree(template.root), tree(moved.root)
    assert here.pop("template.json") and there.pop("template.json") and here == there
    assert import_archive(other, file) == moved  # again: it is there
    assert {each.name for each in (other.directory / "geo").iterdir()} == {".lock", moved.version}


def repack(file: Path, change) -> Path:
    """The same archive with its list and members changed, as a hostile exporter would write it."""
    with tarfile.open(file) as archive:
        members = [(each, archive.extractfile(each).read() if each.isreg() else b"") for each in archive]
    listed = json.loads(members.pop(0)[1])
    members = change(listed, members) or members
    text = json.dumps(listed).encode()
    changed = file.with_name("changed.tar.gz")
    with tarfile.open(changed, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        first = tarfile.TarInfo(CONTENTS_NAME)
        first.size = len(text)
        for member, content in [(first, text), *members]:
            archive.addfile(member, io.BytesIO(content) if content else None)
    return changed


def insert(listed, members, entry, type=tarfile.REGTYPE, linkname="") -> None:
    """Lists something more, at the end, and puts it into the archive."""
    member = tarfile.TarInfo(entry["path"])
    member.type, member.linkname = type, linkname
    listed["entries"].append({"sha256": hashlib.sha256(b"").hexdigest(), "size": 0, **entry})
    members.append((member, b""))


def add(path: str, kind: str = "file"):
    return lambda listed, members: insert(listed, members, {"path": path, "kind": kind})


def link(path: str, target: str, then: str | None = None):
    def change(listed, members):
        insert(listed, members, {"path": path, "kind": "symlink", "target": target}, tarfile.SYMTYPE, target)
        if then:
            insert(listed, members, {"path": then, "kind": "file"})

    return change


def damage(listed, members):
    return [(member, content.replace(b"A", b"B")) for member, content in members]


def claim(name: str, value: object):
    return lambda listed, members: listed.__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (add("../escaped"), "path that no template has"),
        (add("env/../../escaped"), "path that no template has"),
        (add("/tmp/escaped"), "path that no template has"),
        (add("template.json"), "path that no template has"),
        (add("env/lib"), "twice"),
        (add("env/no/such/directory"), "in no directory"),
        (link("env/out", "../../../.."), "leads out"),
        (link("env/out", "/etc"), "leads out"),
        (link("env/out", "/opt/cloche/python/../../../etc"), "leads out"),
        (link("env/in", "lib", then="env/in/through"), "in no directory"),
        (lambda listed, members: members[:-1], "is missing"),
        (lambda listed, members: [*members, members[-1]], "more than it lists"),
        (lambda listed, members: [(tarfile.TarInfo("x"), b"")], "is missing"),
        (damage, "damaged"),
        (claim("name", "../geo"), "name that none has"),
        (claim("name", "other"), "not those of the version"),
        (claim("version", "f" * 64), "not those of the version"),
        (claim("format", 2), "format 2"),
        (claim("platform", "cpython-311-riscv64-linux-gnu"), "this host has"),
        (claim("entries", []), "lacks"),
        (claim("entries", "none"), "damaged"),
    ],
)
def test_a_hostile_archive_is_refused_and_leaves_nothing(catalogue, tmp_path, change, said):
    file = tmp_path / "geo.tar.gz"
    export_template(make(catalogue, "six==1.0"), file)
    other = Catalogue(tmp_path / "other/data")
    with pytest.raises(errors.ClocheError, match=said):
        import_archive(other, repack(file, change))
    assert other.list() == []
    left = [str(each.relative_to(tmp_path / "other")) for each in (tmp_path / "other").rglob("*") if each.is_file()]
    assert set(left) <= {"data/templates/geo/.lock", "data/templates/other/.lock"}


def test_a_file_that_is_no_archive_or_half_of_one_is_refused(catalogue, tmp_path):
    file, other = tmp_path / "geo.tar.gz", Catalogue(tmp_path / "other")
    export_template(make(catalogue, "six==1.0"), file)
    content = file.read_bytes()
    for bad in (b"", b"no archive", content[: len(content) // 2], content[:-20], gzip.compress(b"\0" * 10240)):
        file.write_bytes(bad)
        with pytest.raises(errors.InvalidRequest):
            import_archive(other, file)
    with pytest.raises(errors.InvalidRequest, match="another file, or damaged"):
        import_archive(other, file, "0" * 64)
    assert other.list() == []


def test_an_import_that_is_killed_leaves_nothing_that_counts(catalogue, tmp_path):
    template, file = make(catalogue, "six==1.0"), tmp_path / "geo.tar.gz"
    export_template(template, file)
    other = Catalogue(tmp_path / "other")
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from cloche.templates import Catalogue, archive as importing\n"
        "importing.build.make_readable = lambda root: (print('unpacked', flush=True), time.sleep(60))\n"
        "importing.import_archive(Catalogue(sys.argv[1]), Path(sys.argv[2]))\n"
    )
    words = [sys.executable, "-c", program, str(tmp_path / "other"), str(file)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "unpacked\n"
        process.send_signal(signal.SIGKILL)
    assert other.list() == []
    assert import_archive(other, file).version == template.version
    assert {each.name for each in (other.directory / "geo").iterdir()} == {".lock", template.version}
