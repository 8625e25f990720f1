from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from cloche import cli, config, errors
from cloche.model import GIB, MIB, Limits


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_without_any_source_every_value_is_the_default():
    loaded = config.load_config(environ={"HOME": "/home/ada"})
    assert loaded.backend == "namespaces"
    assert loaded.pool.ready == 2
    assert loaded.limits.default == Limits()
    assert loaded.lifetime.max_seconds == 86400
    assert {origin for _, _, origin in loaded.items()} == {"default"}


def test_flags_beat_variables_beat_the_file_beat_defaults(tmp_path):
    (tmp_path / "cloche.toml").write_text("[pool]\nready = 3\n[lifetime]\nmax_seconds = 60\n")
    environ = {"CLOCHE_DATA_DIR": "/variable", "CLOCHE_POOL_READY": "4"}
    loaded = config.load_config(environ=environ, flags={"data_dir": "/flag", "backend": None})
    assert (loaded.data_dir, loaded.pool.ready, loaded.lifetime.max_seconds) == ("/flag", 4, 60)
    assert loaded.origins["data_dir"] == "flag --data-dir"
    assert loaded.origins["pool.ready"] == "environment variable CLOCHE_POOL_READY"
    assert loaded.origins["lifetime.max_seconds"] == "file ./cloche.toml"
    assert "backend" not in loaded.origins


def test_a_named_file_is_used_instead_of_the_one_that_lies_there(tmp_path):
    (tmp_path / "cloche.toml").write_text("[pool]\nready = 3\n")
    (tmp_path / "other.toml").write_text("[pool]\nready = 5\n")
    (tmp_path / "third.toml").write_text("[pool]\nready = 6\n")
    assert config.load_config(environ={"CLOCHE_CONFIG": "other.toml"}).pool.ready == 5
    assert config.load_config("third.toml", environ={"CLOCHE_CONFIG": "other.toml"}).pool.ready == 6


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_DATA_HOME": "/xdg", "HOME": "/home/ada"}, "/xdg/cloche"),
        ({"HOME": "/home/ada"}, "/home/ada/.local/share/cloche"),
    ],
)
def test_the_data_directory_of_an_ordinary_user_is_below_their_data_home(environ, expected, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert config.load_config(environ=environ).data_dir == expected


def test_the_data_directory_of_root_is_the_systems(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert config.load_config(environ={"XDG_DATA_HOME": "/xdg"}).data_dir == "/var/lib/cloche"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("dat_dir = '/x'", ["dat_dir", "did you mean data_dir?", "cloche.toml"]),
        ("[limits.default]\nmemory = 5", ["limits.default.memory", "did you mean limits.default.memory_bytes?"]),
        ("[pool]\nready = 'many'", ["pool.ready", "'many'", "file ./cloche.toml"]),
        ("[pool]\nready = '2'", ["pool.ready", "'2'"]),
        ("[pool]\nready = -1", ["pool.ready", "-1"]),
        ("pool = 3", ["unknown key pool", "pool.ready"]),
        ("backend = 'docker'", ["backend", "docker"]),
        ("[limits.default]\nmemory_bytes = '2 parsecs'", ["memory_bytes", "parsecs", "2GiB"]),
        ("[limits.default]\nmemory_bytes = 1", ["memory_bytes", "16 MiB"]),
        ("[limits.default]\ncpus = 1000", ["cpus", "maximum", "limits.maximum.cpus"]),
        ("[lifetime]\nmax_seconds = 0", ["lifetime.max_seconds"]),
        ("a = ", ["not TOML"]),
    ],
)
def test_a_bad_file_is_refused_with_the_key_and_a_remedy(tmp_path, text, parts):
    (tmp_path / "cloche.toml").write_text(text)
    with pytest.raises(errors.InvalidConfig) as caught:
        config.load_config(environ={})
    for part in parts:
        assert part in str(caught.value)


def test_an_unknown_variable_is_refused_with_the_nearest_one():
    with pytest.raises(errors.InvalidConfig, match=r"CLOCHE_DATADIR.*did you mean CLOCHE_DATA_DIR\?"):
        config.load_config(environ={"CLOCHE_DATADIR": "/x"})


def test_a_missing_named_file_is_an_error():
    with pytest.raises(errors.InvalidConfig, match="nowhere"):
        config.load_config("nowhere.toml", environ={})


def test_a_file_that_merely_lies_there_cannot_turn_isolation_off(tmp_path):
    (tmp_path / "cloche.toml").write_text("backend = 'plain-unsafe'")
    with pytest.raises(errors.InvalidConfig, match="isolation"):
        config.load_config(environ={})
    assert config.load_config("cloche.toml", environ={}).backend == "plain-unsafe"


def test_a_file_that_merely_lies_there_cannot_say_where_templates_come_from(tmp_path):
    (tmp_path / "cloche.toml").write_text("data_dir = './data'")
    with pytest.raises(errors.InvalidConfig, match=r"data_dir.*--data-dir.*--config"):
        config.load_config(environ={})
    assert config.load_config("cloche.toml", environ={}).data_dir == str(tmp_path / "data")


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"open_files": 63}, "open_files must be at least 64, not 63"),
        ({"processes": 7}, "processes must be at least 8"),
        ({"space_bytes": 1000}, "space_bytes must be at least 1 MiB"),
        ({"cpus": 0.001}, "cpus must be at least 0.01"),
        ({"memory_bytes": 1}, "memory_bytes must be at least 16 MiB"),
        ({"processes": 10.5}, "processes must be a whole number"),
        ({"processes": True}, "processes must be a positive number"),
    ],
)
def test_a_limit_with_which_nothing_works_is_refused(limits, said):
    with pytest.raises(errors.InvalidRequest, match=said):
        Limits(**limits)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_configuration_file_of_another_user_is_refused(tmp_path):
    (tmp_path / "cloche.toml").write_text("[pool]\nready = 3\n")
    os.chown(tmp_path / "cloche.toml", 12345, 12345)
    with pytest.raises(errors.InvalidConfig, match="another user"):
        config.load_config(environ={})


def test_sizes_can_be_written_with_units():
    environ = {"CLOCHE_LIMITS_DEFAULT_MEMORY_BYTES": "512MiB", "CLOCHE_LIMITS_DEFAULT_SPACE_BYTES": "3g"}
    limits = config.load_config(environ=environ).limits.default
    assert (limits.memory_bytes, limits.space_bytes) == (512 * MIB, 3 * GIB)


def test_a_partial_maximum_keeps_the_other_maxima(tmp_path):
    (tmp_path / "cloche.toml").write_text("[limits.maximum]\nmemory_bytes = 4294967296\n")
    limits = config.load_config(environ={}).limits
    assert limits.maximum.memory_bytes == 4 * GIB
    assert limits.maximum.cpus > limits.default.cpus
    with pytest.raises(errors.InvalidRequest, match="memory_bytes"):
        limits.check(Limits(memory_bytes=5 * GIB))


def test_aliases_of_the_file_are_added_to_the_built_in_ones(tmp_path):
    (tmp_path / "cloche.toml").write_text('[aliases]\n"geo:*" = "geo"\n')
    aliases = config.load_config(environ={}).aliases
    assert aliases["geo:*"] == "geo"
    assert aliases["code-interpreter-v1"] == "python"


def test_cloche_config_prints_every_key_with_its_origin(tmp_path):
    done = CliRunner().invoke(cli.main, ["--data-dir", str(tmp_path), "config", "--json"])
    assert done.exit_code == 0
    printed = json.loads(done.stdout)
    assert printed["data_dir"] == {"value": str(tmp_path), "origin": "flag --data-dir"}
    assert printed.keys() == config.CONFIG_KEYS.keys()


def test_our_failures_exit_with_125_and_one_message():
    done = CliRunner().invoke(cli.main, ["--config", "nowhere.toml", "config"])
    assert done.exit_code == 125
    assert done.stderr.startswith("cloche: cannot read nowhere.toml")
    assert "Traceback" not in done.stderr


def test_help_imports_no_subcommand():
    program = (
        "import sys\nfrom click.testing import CliRunner\nfrom cloche import cli\n"
        "assert CliRunner().invoke(cli.main, ['--help']).exit_code == 0\n"
        "loaded = [name for name in cli.COMMANDS if 'cloche.cli.' + name in sys.modules]\n"
        "assert not loaded, loaded\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_as_a_library_only_warnings_are_logged_and_never_private_fields():
    program = (
        "from cloche import telemetry\n"
        "telemetry.log.info('pool.filled')\n"
        "telemetry.log.warning('nursery.failed', code='secret', template='python')\n"
        "telemetry.configure_logging('json', 'info')\n"
        "telemetry.log.info('sandbox.ended', sandbox='i1')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    first, second = done.stderr.splitlines()
    assert "nursery.failed" in first and "template=python" in first and "secret" not in first
    assert json.loads(second)["event"] == "sandbox.ended"
    assert done.stdout == ""


# -- upstreams


UPSTREAM = """
[[upstream]]
models = ["m*"]
base_url = "https://host/v1"
api_key = "sk-secret"
headers = {"api-key" = "hdr-secret", "x-other" = "env:OTHER"}

[[upstream]]
models = ["n*"]
base_url = "http://[::1]:8080/v1"
api_key = "env:NAME"
"""


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_the_configuration_is_printed_without_the_keys_of_upstreams(tmp_path, flags):
    (tmp_path / "cloche.toml").write_text(UPSTREAM)
    printed = CliRunner().invoke(cli.main, ["config", *flags])
    assert printed.exit_code == 0, printed.output
    assert "-secret" not in printed.output and "https://host/v1" in printed.output
    if flags:
        rows = json.loads(printed.output)["upstream"]["value"]
    else:
        line = next(each for each in printed.output.splitlines() if each.startswith("upstream "))
        rows = json.loads(line.partition(" = ")[2].partition("  #")[0])
    assert [row["api_key"] for row in rows] == ["***", "env:NAME"]
    assert rows[0]["headers"] == {"api-key": "***", "x-other": "env:OTHER"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[upstream]\nmodels = ["m"]\nbase_url = "http://x"\napi_key = "sk-secret"', r"\[\[upstream\]\]"),
        ('[[upstream]]\nmodels = ["m"]\nbase_url = "http://x"\napi_key = "sk-secret"\nunknown = 1', "unknown"),
        ('[[upstream]]\nmodels = "m"\nbase_url = "http://x"\napi_key = "sk-secret"', "models"),
        ('[[upstream]]\nmodels = ["m"]\nbase_url = "http://user:secret@x/v1"', "password"),
        ('[[upstream]]\nmodels = ["m"]\nbase_url = "http://x"\nheaders = {"a b" = "secret"}', "a b"),
        ('[[upstream]]\nmodels = ["m"]\nbase_url = "http://x"\nheaders = {"a" = "secret\\n"}', "'a'"),
        (
            '[[upstream]]\nmodels = ["m"]\nbase_url = "http://x"\nheaders = {"Content-Length" = "secret"}',
            "Content-Length",
        ),
        ('[[upstream]]\nmodels = ["m"]\nbase_url = "http://x"\nheaders = {"host" = "secret"}', "'host'"),
    ],
)
def test_upstream_errors_are_reported_without_its_secrets(tmp_path, text, said):
    (tmp_path / "cloche.toml").write_text(text)
    with pytest.raises(errors.InvalidConfig, match=said) as caught:
        config.load_config(environ={})
    assert "secret" not in str(caught.value) and "upstream" in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host/v1",
        "ftp://host/v1",
        "http://",
        "http:///v1",
        "http://host:0/v1",
        "http://host:99999/v1",
        "http://host:x/v1",
        "http://[::1/v1",
        "http://ho st/v1",
        "http://host/v1\n",
        "http://user@host/v1",
        "http://host/v1?api-version=1",
        "http://host/v1?",
        "http://host/v1#a",
    ],
)
def test_an_upstream_has_an_address_to_which_paths_can_be_added(url):
    with pytest.raises(errors.InvalidRequest, match=r"upstream\.base_url"):
        config.UpstreamConfig(models=("m",), base_url=url)


def test_a_password_in_an_indexs_url_is_not_repeated(tmp_path: Path):
    file = tmp_path / "cloche.toml"
    file.write_text('[packages]\npypi = "https://me:hush@index.example.com/simple"\n')
    with pytest.raises(errors.InvalidConfig, match=r"packages\.pypi.*write a list") as caught:
        config.load_config(file, environ={})
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("pool.ready", "1001", "pool.ready must be between 0 and 1000, not 1001"),
        ("server.port", "-1", "server.port must be between 0 and 65535, not -1"),
        ("lifetime.max_seconds", "inf", "lifetime.max_seconds must be a positive number, not inf"),
        ("lifetime.max_seconds", "nan", "lifetime.max_seconds must be a positive number, not nan"),
        ("capacity.queue_seconds", "-0.5", "capacity.queue_seconds must be 0 or more, not -0.5"),
        ("capacity.queued", "-1", "capacity.queued must be 0 or more, not -1"),
        ("audit.max_bytes", "5", "audit.max_bytes must be 1 MiB or more, not 5"),
        ("runs.events_bytes", "5", "runs.events_bytes must be 16 KiB or more, not 5"),
        ("librechat.exec_per_minute", "-1", "librechat.exec_per_minute must be 0 (no limit) or more, not -1"),
    ],
)
def test_a_number_beyond_its_bounds_is_refused_with_key_bound_and_origin(key, value, said):
    variable = config.environment_variable(key)
    with pytest.raises(errors.InvalidConfig) as caught:
        config.load_config(environ={variable: value})
    assert str(caught.value) == f"{said} (environment variable {variable})"


def test_a_section_made_in_python_has_the_same_bounds():
    for make in (
        lambda: config.LifetimeConfig(max_seconds=float("nan")),
        lambda: config.CapacityConfig(queued=-1),
        lambda: config.NetworkConfig(connections=0),
        lambda: msgspec.structs.replace(config.PoolConfig(), ready=1001),
    ):
        with pytest.raises(errors.InvalidRequest, match=r"must be .*, not"):
            make()
