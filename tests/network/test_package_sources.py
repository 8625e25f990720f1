"""Which indexes packages come from: what this host's pip and npm are told is read as they read it."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import pytest

from cloche import errors
from cloche.config.sections import PackagesConfig
from cloche.egress.packages.sources import DEFAULT_NPM, DEFAULT_PYPI, PackageSources, read_sources
from cloche.egress.packages.upstream import BadURL, Keyring, join_url, split_userinfo
from cloche.telemetry import log

Read = Callable[..., PackageSources]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """With files below a root of the test's own, and no variables but those given."""

    def read(
        files: dict[str, str] | None = None, config: PackagesConfig | None = None, **environ: str
    ) -> PackageSources:
        for name, text in (files or {}).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        known = {"HOME": str(tmp_path / "home"), "VIRTUAL_ENV": str(tmp_path / "venv"), "PATH": "/nowhere"}
        return read_sources(config or PackagesConfig(), {**known, **environ}, tmp_path)

    return read


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def test_without_any_configuration_it_is_the_public_ones(read: Read) -> None:
    sources = read()
    assert (sources.pypi, sources.npm, sources.npm_scopes) == ((DEFAULT_PYPI,), DEFAULT_NPM, {})
    assert sources.places == {("pypi.org", 443), ("registry.npmjs.org", 443)}


def test_cloches_settings_win_over_those_of_pip(read: Read) -> None:
    config = PackagesConfig(pypi=("https://a.test/simple", "https://b.test/"), npm="https://n.test/npm")
    sources = read({"etc/pip.conf": "[global]\nindex-url = https://c.test/"}, config, PIP_INDEX_URL="https://d.test/")
    assert sources.pypi == ("https://a.test/simple/", "https://b.test/")
    assert sources.npm == "https://n.test/npm/"


def test_extra_indexes_come_before_the_default(read: Read) -> None:
    sources = read(PIP_EXTRA_INDEX_URL="https://private.test/simple https://second.test/")
    assert sources.pypi == ("https://private.test/simple/", "https://second.test/", DEFAULT_PYPI)


def test_files_of_pip_in_its_order(read: Read) -> None:
    order = ["etc/xdg/pip/pip.conf", "etc/pip.conf", "home/.pip/pip.conf", "home/.config/pip/pip.conf", "venv/pip.conf"]
    for number, name in enumerate(order):
        sources = read({name: f"[global]\nindex-url = https://{number}.test/simple"})
        assert sources.pypi == (f"https://{number}.test/simple/",)
    assert read(PIP_INDEX_URL="https://variable.test/").pypi == ("https://variable.test/",)
    assert read(PIP_CONFIG_FILE="/dev/null").pypi == (DEFAULT_PYPI,)


def test_a_section_of_install_wins_over_the_global_one(read: Read) -> None:
    text = "[install]\nindex-url=https://install.test/\n[global]\nindex_url=https://global.test/\n"
    assert read({"etc/pip.conf": text}).pypi == ("https://install.test/",)


def test_several_extra_indexes_on_lines_of_their_own(read: Read) -> None:
    text = "[global]\nextra-index-url =\n    https://a.test/simple\n    https://b.test/simple/\n"
    assert read({"etc/pip.conf": text}).pypi == ("https://a.test/simple/", "https://b.test/simple/", DEFAULT_PYPI)


def test_variables_of_uv(read: Read) -> None:
    assert read(UV_INDEX_URL="https://uv.test/").pypi == ("https://uv.test/",)
    sources = read(UV_DEFAULT_INDEX="https://new.test/simple", UV_INDEX="corp=https://corp.test/simple?x=1")
    assert sources.pypi[-1] == "https://new.test/simple/"
    assert sources.pypi[0].startswith("https://corp.test/simple")
    assert read(UV_INDEX_URL="https://uv.test/", PIP_INDEX_URL="https://pip.test/").pypi == ("https://pip.test/",)


def test_no_index_means_none(read: Read) -> None:
    assert read({"etc/pip.conf": "[global]\nno-index = true\n"}).pypi == ()


def test_directories_are_skipped_with_one_line_that_names_none(read: Read) -> None:
    log.recent.clear()
    text = "[global]\nextra-index-url = file:///srv/private/simple /srv/more\nfind-links = /srv/wheels\n"
    assert read({"etc/pip.conf": text}).pypi == (DEFAULT_PYPI,)
    (said,) = log.recent
    assert (said.event, said.fields["count"], "srv" in repr(said)) == ("packages.sources_skipped", 3, False)
    assert said.level == "info"  # of a server: who only uses the library is not told


def test_a_file_that_is_none_is_skipped(read: Read) -> None:
    assert read({"etc/pip.conf": "index-url without a section\n\x00"}).pypi == (DEFAULT_PYPI,)
    assert read({"home/.npmrc": "\x00=\n=\n[x\nregistry\n"}).npm == DEFAULT_NPM


def test_certificates_and_trusted_hosts(read: Read) -> None:
    sources = read({"etc/pip.conf": "[global]\ncert = /ca/pip.pem\ntrusted-host = a.test b.test:8080\n"})
    assert (sources.pypi_ca_file, sources.trusted_hosts) == ("/ca/pip.pem", {"a.test", "b.test"})
    assert read({"home/.npmrc": "cafile=/ca/npm.pem"}).npm_ca_file == "/ca/npm.pem"
    assert read(PIP_CERT="/ca/variable.pem").pypi_ca_file == "/ca/variable.pem"


def test_passwords_in_urls_go_to_the_keyring_and_nowhere_else(read: Read) -> None:
    sources = read(PIP_INDEX_URL="https://me:s%40cret@private.test:8443/simple")
    assert sources.pypi == ("https://private.test:8443/simple/",)
    key = sources.keyring.authorization
    assert key("https://private.test:8443/simple/demo/") == basic("me", "s@cret")
    assert key("https://private.test:8443/files/demo-1.0.tar.gz") == basic("me", "s@cret")  # as pip does
    for other in (
        "http://private.test:8443/simple/demo/",
        "https://private.test/simple/demo/",
        "https://other.test:8443/simple/demo/",
        "https://private.test.evil.test:8443/simple/",
    ):
        assert key(other) is None
    assert "cret" not in repr(vars(sources)) + repr(vars(sources.keyring))


def test_a_password_of_netrc_goes_to_its_host_over_tls(read: Read) -> None:
    file = "machine private.test login me password pw\ndefault login x password y\n"
    sources = read({"home/.netrc": file}, PIP_EXTRA_INDEX_URL="https://private.test/simple http://private.test:8080/")
    key = sources.keyring.authorization
    assert key("https://private.test/simple/x/") == basic("me", "pw")
    assert key("https://private.test/files/x.whl") == basic("me", "pw")
    for other in ("http://private.test/simple/x/", "http://private.test:8080/x/", "https://pypi.org/simple/x/"):
        assert key(other) is None
    sources = read({"home/.netrc": file}, PIP_INDEX_URL="https://private.test:8443/simple")
    assert sources.keyring.authorization("https://private.test:8443/simple/x/") == basic("me", "pw")
    assert sources.keyring.authorization("https://private.test/simple/x/") is None


def test_passwords_for_hosts_that_are_no_index_are_left_alone(read: Read) -> None:
    """A page, or a redirect, could name such a host, and the host would fetch it as its operator."""
    files = {
        "home/.netrc": "machine git.test login me password pw\n",
        "home/.npmrc": "registry=https://npm.test/all/\n//npm.test:8443/:_authToken=a\n//git.test/:_authToken=b\n"
        "//npm.test/others/:_authToken=c\n//npm.test/allied/:_authToken=d\n",
    }
    key = read(files).keyring.authorization
    for url in ("git.test/x", "npm.test:8443/all/x", "npm.test/others/x", "npm.test/allied/x", "npm.test/all/x"):
        assert key(f"https://{url}") is None


def test_a_token_for_a_host_is_for_the_registry_there(read: Read) -> None:
    files = {"home/.npmrc": "registry=https://npm.test/all/\n//npm.test/:_authToken=a\n//npm.test/all/new:_authToken=b"}
    key = read(files).keyring.authorization
    assert (key("https://npm.test/all/x"), key("https://npm.test/all/new/x")) == ("Bearer a", "Bearer b")


def test_registries_and_tokens_of_npm(read: Read) -> None:
    text = """
    # a comment
    registry = https://npm.test/all/
    @corp:registry=https://corp.test/npm
    //corp.test/npm/:_authToken=${TOKEN}
    //npm.test/all/:_auth="bWU6cHc="
    @old:registry=https://old.test/
    //old.test/:username=me
    //old.test/:_password=cHc=
    //unset.test/:_authToken=${UNSET}
    """
    sources = read({"home/.npmrc": text}, TOKEN="t0ken")
    assert (sources.npm, sources.npm_scopes) == (
        "https://npm.test/all/",
        {"@corp": "https://corp.test/npm/", "@old": "https://old.test/"},
    )
    key = sources.keyring.authorization
    assert key("https://corp.test/npm/@corp%2fui") == "Bearer t0ken"
    assert key("https://npm.test/all/left-pad") == "Basic bWU6cHc="
    assert key("https://old.test/x") == basic("me", "pw")
    assert key("https://corp.test/other/") is None
    assert key("http://corp.test/npm/x") is None


def test_npm_files_and_variables_in_their_order(read: Read) -> None:
    assert read({"etc/npmrc": "registry=https://host.test/"}).npm == "https://host.test/"
    assert read({"home/.npmrc": "registry=https://user.test/"}).npm == "https://user.test/"
    assert read(NPM_CONFIG_REGISTRY="https://variable.test/").npm == "https://variable.test/"
    assert read(npm_config_registry="https://lower.test").npm == "https://lower.test/"


def test_a_token_goes_over_plain_http_only_where_the_registry_is_there(read: Read) -> None:
    sources = read({"home/.npmrc": "registry=http://npm.test:4873/\n//npm.test:4873/:_authToken=t\n"})
    assert sources.keyring.authorization("http://npm.test:4873/x") == "Bearer t"


def test_the_longest_path_of_a_host_wins() -> None:
    keyring = Keyring()
    keyring.add("https://a.test/", "one")
    keyring.add("https://a.test/deep/", "two")
    assert keyring.authorization("https://a.test/deep/x") == "two"
    assert keyring.authorization("https://a.test/deeper") == "one"


@pytest.mark.parametrize("url", ["ftp://a.test/", "https://", "file:///x", "https://a.test:99999/", "pypi.org/simple"])
def test_a_url_that_leads_nowhere_is_refused_without_repeating_it(url: str) -> None:
    for config in ({"pypi": (url,)}, {"npm": url}):
        with pytest.raises(errors.InvalidRequest, match="begins with https://") as raised:
            PackagesConfig(**config)  # type: ignore[arg-type]
        assert url not in str(raised.value).replace("https://pypi.org/simple/", "")[20:] or url == "https://"


@pytest.mark.parametrize("pattern", ["", "  ", "pypi:", "rpm:bash", "two names"])
def test_a_pattern_of_packages_that_is_none_is_refused(pattern: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="pattern of packages"):
        PackagesConfig(allow=(pattern,))


def test_urls_lose_fragments_and_passwords_and_must_be_of_the_web() -> None:
    assert join_url("https://a.test/simple/x/", "../../f/y.whl#sha256=1") == "https://a.test/f/y.whl"
    assert join_url("https://a.test/x/", "https://u:p@b.test/y") == "https://b.test/y"
    assert split_userinfo("https://u@b.test/") == ("https://b.test/", basic("u", ""))
    for bad in ("javascript:x", "data:x,y", "file:///x", "https://[::1", "x" * 10_000):
        with pytest.raises(BadURL):
            join_url("https://a.test/", bad)
