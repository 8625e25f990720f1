from __future__ import annotations

import base64
import hashlib
import io
import itertools
import marshal
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from cloche import cli, errors
from cloche.cli.progress import show_progress
from cloche.model import Template
from cloche.templates import Catalogue, TemplateProgress, build_template, ensure_template, pythons, uv
from cloche.templates import catalogue as catalogues
from cloche.templates.build import lock_packages
from cloche.templates.recipe import Recipe

TINY = Recipe(name="tiny", packages=("six", "trapped"), imports=("six",), env={"GREETING": "hello"})


def make_wheel(directory: Path, name: str, files: dict[str, str]) -> None:
    """A wheel with those files and a console script, as small as one can be."""
    info = f"{name}-1.0.dist-info"
    entries = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
    }
    record = ""
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, content in entries.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=").decode()
            record += f"{path},sha256={digest},{len(content)}\n"
            archive.writestr(path, content)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")


def make_sdist(directory: Path, name: str, setup: str) -> None:
    with tarfile.open(directory / f"{name}-1.0.tar.gz", "w:gz") as archive:
        for path, content in {
            "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
            "setup.py": setup,
        }.items():
            member = tarfile.TarInfo(f"{name}-1.0/{path}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content.encode()))


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    """The file that hostile packages write when any of their code runs on the host."""
    return tmp_path_factory.mktemp("trace") / "code-ran-on-the-host"


@pytest.fixture(scope="module")
def hostile_packages(tmp_path_factory, trace):
    """A place to find packages that leave a trace, beside the user's own registry."""
    directory = tmp_path_factory.mktemp("links")
    leave_trace = f"open({str(trace)!r}, 'a').write('ran')"
    make_wheel(directory, "trapped", {"trapped.pth": f"import os; {leave_trace}\n", "trapped.py": f"{leave_trace}\n"})
    make_sdist(directory, "unbuilt", f"{leave_trace}\nimport setuptools; setuptools.setup()\n")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in uv.uv_environment(os.environ).items():
            patch.setenv(name, value)
        links = [value for value in (os.environ.get("UV_FIND_LINKS"), str(directory)) if value]
        patch.setenv("UV_FIND_LINKS", ",".join(links))
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, hostile_packages) -> tuple[Catalogue, Template, list[TemplateProgress]]:
    """A small template, built under the most private umask."""
    catalogue = Catalogue(tmp_path_factory.mktemp("data"))
    reports: list[TemplateProgress] = []
    old = os.umask(0o077)
    try:
        return catalogue, build_template(catalogue, TINY, reports.append), reports
    finally:
        os.umask(old)


def site_packages(template: Template) -> Path:
    series = template.python_version.rpartition(".")[0]
    return Path(template.root, "env", "lib", f"python{series}", "site-packages")


def test_building_runs_no_code_of_a_package(tiny, trace):
    _, template, _ = tiny
    assert (site_packages(template) / "trapped.pth").exists()
    assert not trace.exists()
    # The trap works: any interpreter that processes this directory as a site directory falls into it.
    program = f"import site; site.addsitedir({str(site_packages(template))!r})"
    subprocess.run([template.python, "-I", "-S", "-c", program], check=True)
    assert trace.exists()
    trace.unlink()


def test_a_package_without_a_wheel_is_refused_and_not_built(tmp_path, hostile_packages, trace):
    with pytest.raises(errors.TemplateBuildFailed, match="unbuilt") as caught:
        build_template(Catalogue(tmp_path), Recipe(name="source", packages=("unbuilt",)))
    assert "wheels only" in str(caught.value)
    assert not trace.exists()
    assert Catalogue(tmp_path).list() == []


def test_a_package_that_does_not_exist_is_named(tmp_path, hostile_packages):
    with pytest.raises(errors.TemplateBuildFailed, match="no-such-package-of-cloche"):
        build_template(Catalogue(tmp_path), Recipe(name="missing", packages=("no-such-package-of-cloche",)))


def test_the_environment_points_only_at_places_in_the_sandbox(tiny):
    _, template, _ = tiny
    env = Path(template.root, "env")
    series = template.python_version.rpartition(".")[0]
    for name in ("python", "python3"):
        assert os.readlink(env / "bin" / name) == f"/opt/cloche/python/bin/python{series}"
    settings = (env / "pyvenv.cfg").read_text().splitlines()
    assert settings[:2] == ["home = /opt/cloche/python/bin", "include-system-site-packages = false"]
    scripts = [each for each in (env / "bin").iterdir() if not each.is_symlink()]
    assert {"ipython", "pip", "trapped"} <= {each.name for each in scripts}
    for script in scripts:
        assert script.read_text().startswith("#!/opt/cloche/env/bin/python3\n")


def test_bytecode_has_the_paths_of_the_sandbox_and_is_not_checked_again(tiny):
    _, template, _ = tiny
    (compiled,) = site_packages(template).glob("__pycache__/six.*.pyc")
    content = compiled.read_bytes()
    assert int.from_bytes(content[4:8], "little") == 0b01  # by hash, unchecked
    if template.python_version.startswith("{}.{}.".format(*sys.version_info)):
        code = marshal.loads(content[16:])
        assert code.co_filename == str(site_packages(template) / "six.py").replace(template.root, "/opt/cloche")


def test_everything_is_readable_by_all_with_any_umask(tiny):
    _, template, _ = tiny
    for directory, directories, files in os.walk(template.root):
        for path in (Path(directory, name) for name in (*directories, *files)):
            mode = path.lstat().st_mode
            needed = 0o555 if path.is_dir() and not path.is_symlink() else 0o444
            assert mode & needed == needed and (path.is_symlink() or not mode & 0o022), path
    assert Path(template.root).stat().st_mode & 0o777 == 0o755


def test_the_guests_own_needs_are_in_every_template(tiny):
    _, template, _ = tiny
    names = {package.partition("==")[0] for package in template.packages}
    assert {"ipython", "matplotlib-inline", "threadpoolctl", "pip", "six", "trapped"} <= names
    assert "e2b-charts" not in names and "matplotlib" not in names


def test_charts_come_with_matplotlib(tmp_path):
    locked = lock_packages(
        Recipe(name="plots", packages=("matplotlib",)),
        pythons.choose_interpreter(">=3.11"),
        tmp_path,
        lambda line: None,
    )
    assert any(package.startswith("e2b-charts==") for package in locked.packages)


def test_the_lock_has_hashes_and_neither_hosts_nor_paths(tiny):
    _, template, _ = tiny
    text = Path(template.root, "lock.txt").read_text()
    assert text.count("--hash=sha256:") >= len(template.packages)
    assert "://" not in text and "--index" not in text and "--find-links" not in text and "/" not in text


def test_the_same_recipe_is_built_once(tiny):
    catalogue, template, _ = tiny
    reordered = msgspec.structs.replace(TINY, packages=tuple(reversed(TINY.packages)))
    assert build_template(catalogue, reordered) == template


def test_progress_grows_to_the_end_and_names_its_phases(tiny):
    _, template, reports = tiny
    fractions = [each.fraction for each in reports if each.fraction is not None]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0
    assert list(dict.fromkeys(each.phase for each in reports)) == ["lock", "install", "compile", "done"]
    assert reports[-1].detail == template.ref


def test_a_second_builder_waits_reports_it_and_finds_it_built(tiny):
    catalogue, template, _ = tiny
    reports: list[TemplateProgress] = []
    waiting = threading.Event()
    results = []

    def report(progress: TemplateProgress) -> None:
        reports.append(progress)
        if progress.phase == "wait":
            waiting.set()

    second = threading.Thread(target=lambda: results.append(build_template(catalogue, TINY, report)))
    with catalogue.locked("tiny"):
        second.start()
        assert waiting.wait(60)
        assert not results
    second.join()
    assert results == [template]
    assert "another process is building tiny" in reports[0].detail


def test_a_failed_build_leaves_no_files(tmp_path, hostile_packages):
    with pytest.raises(errors.TemplateBuildFailed):
        build_template(Catalogue(tmp_path), Recipe(name="source", packages=("unbuilt",)))
    assert [each.name for each in (tmp_path / "templates" / "source").iterdir()] == [".lock"]


# The catalogue


def put(catalogue: Catalogue, name: str, version: str, created_at: float, python: str = sys.executable) -> Template:
    root = catalogue.directory / name / version
    root.mkdir(parents=True)
    template = Template(
        name=name,
        version=version,
        python=python,
        python_version="3.11.7",
        python_prefix=sys.base_prefix,
        root=str(root),
        created_at=created_at,
    )
    catalogues.write_template(template, root)
    return template


def test_a_name_is_its_newest_version_and_old_versions_stay_usable(tmp_path):
    catalogue = Catalogue(tmp_path)
    old, new = put(catalogue, "python", "a" * 64, 1.0), put(catalogue, "python", "b" * 64, 2.0)
    assert catalogue.resolve("python") == new
    assert catalogue.resolve("python@" + "a" * 12) == old
    assert catalogue.resolve(old.ref) == old
    assert catalogue.list() == [new, old]


@pytest.mark.parametrize(
    "alias",
    [
        "code-interpreter-v1",
        "base",
        "opensandbox/code-interpreter:latest",
        "python:3.12-slim",
        "e2bdev/code-interpreter",
        "ubuntu:24.04",
    ],
)
def test_names_of_other_products_mean_python(tmp_path, alias):
    catalogue = Catalogue(tmp_path)
    template = put(catalogue, "python", "a" * 64, 1.0)
    assert catalogue.resolve(alias) == template


def test_a_template_of_ones_own_beats_an_alias(tmp_path):
    catalogue = Catalogue(tmp_path)
    put(catalogue, "python", "a" * 64, 1.0)
    own = put(catalogue, "base", "b" * 64, 1.0)
    assert catalogue.resolve("base") == own


@pytest.mark.parametrize("ref", ["pithon", "python@ffff", "python:2.7", "", "../python"])
def test_an_unknown_template_is_an_error_that_lists_the_known_ones(tmp_path, ref):
    catalogue = Catalogue(tmp_path)
    template = put(catalogue, "python", "a" * 64, 1.0)
    with pytest.raises(errors.TemplateNotFound, match=re.escape(template.ref)):
        catalogue.resolve(ref)


def test_a_prefix_of_two_versions_is_refused(tmp_path):
    catalogue = Catalogue(tmp_path)
    put(catalogue, "python", "aa" + "0" * 62, 1.0)
    put(catalogue, "python", "ab" + "0" * 62, 2.0)
    with pytest.raises(errors.TemplateNotFound, match="more digits"):
        catalogue.resolve("python@a")


def test_removing_removes_that_version_only(tmp_path):
    catalogue = Catalogue(tmp_path)
    old, new = put(catalogue, "python", "a" * 64, 1.0), put(catalogue, "python", "b" * 64, 2.0)
    assert catalogue.remove(old.ref) == old
    assert catalogue.list() == [new]
    assert {each.name for each in (tmp_path / "templates" / "python").iterdir()} == {".lock", new.version}
    with pytest.raises(errors.TemplateNotFound):
        catalogue.remove(old.ref)


def test_a_moved_data_directory_still_works(tmp_path):
    put(Catalogue(tmp_path / "before"), "python", "a" * 64, 1.0)
    (tmp_path / "before").rename(tmp_path / "after")
    found = Catalogue(tmp_path / "after").resolve("python")
    assert found.root == str(tmp_path / "after" / "templates" / "python" / ("a" * 64))


def test_ensure_builds_only_built_in_templates(tmp_path):
    with pytest.raises(errors.TemplateNotFound, match="geo"):
        ensure_template(Catalogue(tmp_path), "geo")
    with pytest.raises(errors.TemplateNotFound, match="python@"):
        ensure_template(Catalogue(tmp_path), "python@abcdef123456")


def test_ensure_returns_the_built_template(tmp_path):
    catalogue = Catalogue(tmp_path)
    template = put(catalogue, "python", "a" * 64, 1.0)
    assert ensure_template(catalogue, "base") == template


def test_ensure_says_when_an_interpreter_is_gone(tmp_path):
    catalogue = Catalogue(tmp_path)
    put(catalogue, "geo", "a" * 64, 1.0, python="/nowhere/bin/python3")
    with pytest.raises(errors.TemplateNotFound, match="/nowhere/bin/python3, which is gone"):
        ensure_template(catalogue, "geo")


# The command


def test_list_show_and_rm_in_a_terminal(tmp_path):
    template = put(Catalogue(tmp_path), "geo", "a" * 64, 1.0)
    command = ["--data-dir", str(tmp_path), "template"]
    assert template.ref in CliRunner().invoke(cli.main, [*command, "list"]).stdout
    assert "python_version: 3.11.7" in CliRunner().invoke(cli.main, [*command, "show", "geo"]).stdout
    assert CliRunner().invoke(cli.main, [*command, "rm", "geo"]).stdout == f"removed {template.ref}\n"
    missing = CliRunner().invoke(cli.main, [*command, "show", "geo"])
    assert missing.exit_code == 125 and "no template 'geo'" in missing.stderr


class Screen(io.StringIO):
    """A terminal, as far as progress knows."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar_with_the_step_the_share_and_the_time_left(tiny, monkeypatch):
    seconds = itertools.count(1000.0, 2.0)
    monkeypatch.setattr("time.time", lambda: next(seconds))
    monkeypatch.setattr("sys.stderr", screen := Screen())
    monkeypatch.setenv("COLUMNS", "80")
    with show_progress("building tiny") as report:
        for each in tiny[2]:
            report(each)
    *shown, last = [re.sub(r"\x1b\[\?25[lh]", "", line) for line in screen.getvalue().partition("\n")[0].split("\r")]
    assert any(re.fullmatch(r"building tiny \[#+-+\]  \d\d%  00:\d\d:\d\d  \S.*", line) for line in shown), shown
    assert not any(re.search(r"   0%  \d\d:", line) for line in shown)  # not a guess from nothing
    assert re.match(rf"building tiny \[#+\] 100%  ready as {tiny[1].ref} after \d+ s", last)
    assert max(map(len, shown)) < 80


def test_elsewhere_each_step_is_a_line(tiny, capsys):
    with show_progress("building tiny") as report:
        for each in tiny[2]:
            report(each)
    lines = capsys.readouterr().err.splitlines()
    assert all(re.match(r"building tiny: \d+% \w", line) for line in lines) and len(lines) < 40
    assert re.fullmatch(rf"building tiny: 100% ready as {tiny[1].ref} after \d+ s", lines[-1])


AGAIN = "name = 'tiny'\npackages = ['six', 'trapped']\n[env]\nAGAIN = 'yes'\n"


def test_leftovers_of_a_killed_builder_only_are_removed(tmp_path):
    catalogue = Catalogue(tmp_path)
    abandoned = catalogue.directory / "dead/.scratch-0"
    abandoned.mkdir(parents=True)
    (abandoned.parent / ".lock").touch()
    with catalogue.locked("live"), catalogue.scratch_directory("live") as used:
        assert catalogue.find_abandoned() == [abandoned]
        catalogue.remove_abandoned()
        assert used.exists() and not abandoned.exists()
    assert catalogue.find_abandoned() == []


@pytest.mark.long
def test_a_killed_builder_leaves_nothing_visible_and_the_next_one_cleans_up(tiny, trace, tmp_path):
    """And says so in plain lines where there is no terminal. Nor does a second version run code of the packages."""
    catalogue, template, _ = tiny
    recipe, data_dir = tmp_path / "template.toml", str(catalogue.directory.parent)
    recipe.write_text(AGAIN)
    program = (
        "from pathlib import Path\nfrom cloche.templates import Catalogue, build_template, recipe\n"
        "report = lambda progress: print(progress.phase, flush=True)\n"
        f"build_template(Catalogue({data_dir!r}), recipe.read_recipe(Path({str(recipe)!r})), report)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as builder:
        assert any(line == "install\n" for line in builder.stdout)
        builder.send_signal(signal.SIGKILL)
    # A child that it was just starting has its lock too, until the exec: whoever looks before leaves it alone.
    for _ in range(1000):
        if catalogue.find_abandoned():
            break
        time.sleep(0.01)
    assert catalogue.list() == [template] and len(catalogue.find_abandoned()) == 1
    done = CliRunner().invoke(cli.main, ["--data-dir", data_dir, "template", "build", str(recipe)])
    assert done.exit_code == 0, done.output
    second = catalogue.resolve("tiny")
    assert done.stdout.startswith("tiny@") and second.version != template.version
    assert "building tiny: 0% choosing versions" in done.stderr and "\r" not in done.stderr
    left = {each.name for each in (catalogue.directory / "tiny").iterdir()}
    assert left == {".lock", template.version, second.version}
    assert not trace.exists()
