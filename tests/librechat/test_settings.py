"""`[librechat]`: from the file, from our variables, and from those of LibreChat's own server."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner
from tests.docs.test_docs import REPOSITORY, blocks, rows
from tests.librechat.minting import jwk, new_ed25519

from cloche import cli, config, errors
from cloche.config import librechat

PAGE = REPOSITORY / "docs/dialects/librechat.md"
SECRET = "a secret that both sides have, and nobody else"


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_nothing_is_accepted_from_librechat_but_keys_unless_it_is_set():
    settings = config.load_config(environ={}).librechat
    assert not settings.jwt.enabled and not settings.python_state and settings.exec_per_minute == 0


def test_the_variables_of_librechats_own_server_mean_the_same_here():
    environ = {
        "CODEAPI_JWT_JWKS_JSON": '{"keys": []}',
        "CODEAPI_JWT_PUBLIC_KEYS_DIR": "/keys",
        "CODEAPI_JWT_PUBLIC_KEY": "/key.pem",
        "CODEAPI_JWT_KID": "k1",
        "CODEAPI_JWT_KEY_ID": "k0",
        "CODEAPI_JWT_HS256_SECRET": SECRET,
        "CODEAPI_JWT_HS256_KID": "h1",
        "CODEAPI_JWT_ALLOWED_ALGS": "EdDSA, HS256",
        "CODEAPI_JWT_ISSUER": "us",
        "CODEAPI_JWT_AUDIENCE": "",  # as a compose file leaves it
        "CODEAPI_JWT_CLOCK_SKEW_SECONDS": "5",
        "CODEAPI_JWT_MAX_TTL_SECONDS": "60",
        "CODEAPI_JWT_SINGLE_TENANT_ID": "acme",
        "CODEAPI_TENANT_ISOLATION_STRICT": "true",
        "CODEAPI_SOMETHING_ELSE": "x",
    }
    loaded = config.load_config(environ=environ)
    jwt = loaded.librechat.jwt
    assert (jwt.jwks, jwt.keys_dir, jwt.public_key, jwt.key_id) == ('{"keys": []}', "/keys", "/key.pem", "k1")
    assert (jwt.hs256_secret, jwt.hs256_key_id, jwt.algorithms) == (SECRET, "h1", ("EdDSA", "HS256"))
    assert (jwt.issuer, jwt.audience, jwt.skew_seconds, jwt.max_age_seconds) == ("us", "codeapi", 5, 60)
    assert (jwt.tenant, jwt.strict_tenants, jwt.enabled) == ("acme", True, True)
    assert loaded.origins["librechat.jwt.issuer"] == "environment variable CODEAPI_JWT_ISSUER"


def test_our_own_variables_win(tmp_path):
    (tmp_path / "named.toml").write_text(
        '[librechat]\nmax_files = 10\nfile_bytes = "1MiB"\n[librechat.jwt]\nissuer = "a"\n'
    )
    environ = {"CODEAPI_JWT_ISSUER": "b", "CLOCHE_LIBRECHAT_JWT_ISSUER": "c", "CLOCHE_LIBRECHAT_MAX_FILES": "11"}
    settings = config.load_config("named.toml", environ).librechat
    assert (settings.jwt.issuer, settings.max_files, settings.file_bytes) == ("c", 11, 1 << 20)
    assert config.load_config("named.toml", {"CODEAPI_JWT_ISSUER": "b"}).librechat.jwt.issuer == "b"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"CODEAPI_JWT_PUBLIC_KEY": "/key.pem"}, r"key_id.*CODEAPI_JWT_KID.*\(environment variable CODEAPI_JWT_PUB"),
        ({"CODEAPI_JWT_ALLOWED_ALGS": "none"}, "algorithms.*'none'.*CODEAPI_JWT_ALLOWED_ALGS"),
        ({"CODEAPI_JWT_ALLOWED_ALGS": "HS256"}, "hs256_secret"),
        ({"CODEAPI_JWT_HS256_SECRET": SECRET}, "HS256"),
        ({"CODEAPI_JWT_HS256_SECRET": "t00-brief", "CODEAPI_JWT_ALLOWED_ALGS": "HS256"}, "32 bytes"),
        ({"CODEAPI_JWT_MAX_TTL_SECONDS": "3600"}, "between 1 and 300.*CODEAPI_JWT_MAX_TTL_SECONDS"),
        ({"CODEAPI_JWT_CLOCK_SKEW_SECONDS": "-1"}, "between 0 and 30.*CODEAPI_JWT_CLOCK_SKEW_SECONDS"),
        ({"CODEAPI_TENANT_ISOLATION_STRICT": "maybe"}, "CODEAPI_TENANT_ISOLATION_STRICT"),
        ({"CLOCHE_LIBRECHAT_JWT_OWNER": "two words"}, "owner.*CLOCHE_LIBRECHAT_JWT_OWNER"),
        ({"CLOCHE_LIBRECHAT_TIMEOUT_SECONDS": "500"}, "max_timeout_seconds"),
        ({"CLOCHE_LIBRECHAT_MAX_FILES": "0"}, "max_files must be a positive number.*CLOCHE_LIBRECHAT_MAX_FILES"),
        ({"CLOCHE_LIBRECHAT_EXEC_PER_MINUTE": "-1"}, "exec_per_minute"),
        ({"CLOCHE_LIBRECHAT_OUTPUT_BYTES": "1"}, "output_bytes"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_invalid_settings_are_reported_with_their_source(environ, said):
    with pytest.raises(errors.InvalidConfig, match=said) as refused:
        config.load_config(environ=environ)
    assert SECRET not in str(refused.value) and "t00-brief" not in str(refused.value)


def test_a_file_that_merely_lies_there_cannot_say_whose_tokens_are_accepted(tmp_path):
    (tmp_path / "cloche.toml").write_text("[librechat]\nmax_files = 10\n")
    assert config.load_config(environ={}).librechat.max_files == 10
    (tmp_path / "cloche.toml").write_text('[librechat.jwt]\njwks = "/tmp/mine.json"\n')
    with pytest.raises(errors.InvalidConfig, match=r"librechat\.jwt\.jwks, which sets the tokens that"):
        config.load_config(environ={})


def test_the_configuration_is_printed_without_secrets(monkeypatch):
    monkeypatch.setenv("CODEAPI_JWT_HS256_SECRET", SECRET)
    monkeypatch.setenv("CODEAPI_JWT_ALLOWED_ALGS", "EdDSA,HS256")
    monkeypatch.setenv("CODEAPI_JWT_JWKS_JSON", json.dumps({"keys": [{**jwk(new_ed25519()), "d": "private"}]}))
    printed = CliRunner().invoke(cli.main, ["config"]).output
    assert SECRET not in printed and "private" not in printed
    assert re.search(r'^librechat\.jwt\.hs256_secret += "\*\*\*"', printed, re.MULTILINE)


def test_a_server_does_not_start_with_keys_that_it_cannot_use(monkeypatch, tmp_path):
    monkeypatch.setenv("CLOCHE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("CODEAPI_JWT_JWKS_JSON", "[]")
    started = CliRunner().invoke(cli.main, ["serve", "--port", "0"])
    assert isinstance(started.exception, (errors.InvalidConfig, SystemExit)) and started.exit_code
    said = f"{started.output}{started.exception}"
    assert "librechat.jwt.jwks" in said and "CODEAPI_JWT_JWKS_JSON" in said


def test_every_setting_is_documented_with_its_default(tmp_path):
    listed = {row[0].strip("`"): row[1].replace("`", "") for row in rows(PAGE) if row[0].startswith("`librechat.")}
    for key in (key for key in config.CONFIG_KEYS if key.startswith("librechat.")):
        assert plain(listed[key]) == plain(said_of(key)), key


def said_of(key: str) -> str:
    value = next(value for each, value, _ in config.load_config(environ={}).items() if each == key)
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def plain(text: str) -> str:
    size = config.parse_bytes(text.removesuffix(".0"))
    return text.lower().replace("none", "") if size is None else str(size)


def test_the_example_of_the_page_can_be_loaded(tmp_path):
    (example,) = blocks(PAGE, "toml")
    (tmp_path / "named.toml").write_text(example)
    assert config.load_config("named.toml", {}).librechat.jwt.enabled


def test_every_variable_of_librechats_own_server_is_documented():
    text = PAGE.read_text("utf-8")
    assert [name for name in librechat.CODEAPI_VARIABLES if name not in text and name != "CODEAPI_JWT_KEY_ID"] == []
