"""Where packages come from: uv's own settings, else pip's.

Whoever has to use a mirror has told pip so, and uv reads none of pip's settings. Where uv was not told anything,
pip's answer is handed to it.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from pathlib import Path

_UV_OF_PIP = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS"}
_UV_OWN = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_CONFIG_FILE")


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for uv, with pip's registry settings where uv has none of its own."""
    result = dict(environ)
    if any(environ.get(name) for name in _UV_OWN) or _uv_config(environ).exists():
        return result
    settings = {**_from_files(environ), **_from_variables(environ)}
    for key, variable in _UV_OF_PIP.items():
        if value := settings.get(key):
            # pip separates by white space; so does uv, but for find-links
            result[variable] = ("," if variable == "UV_FIND_LINKS" else " ").join(value.split())
    if "UV_INDEX" in result:
        result.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")  # pip takes the best version of all indexes
    if cert := settings.get("cert"):
        result.setdefault("SSL_CERT_FILE", cert)
    return result


def _uv_config(environ: Mapping[str, str]) -> Path:
    return _config_home(environ) / "uv/uv.toml"


def _config_home(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or "/") / ".config")


def _from_variables(environ: Mapping[str, str]) -> dict[str, str]:
    names = {key: "PIP_" + key.upper().replace("-", "_") for key in (*_UV_OF_PIP, "cert")}
    return {key: environ[name] for key, name in names.items() if environ.get(name)}


def _from_files(environ: Mapping[str, str]) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    home = Path(environ.get("HOME") or "/")
    files = [Path("/etc/pip.conf"), home / ".pip/pip.conf", _config_home(environ) / "pip/pip.conf"]
    if own := environ.get("PIP_CONFIG_FILE"):
        files = [] if own == os.devnull else [*files, Path(own)]
    try:
        parser.read(files, "utf-8")
    except (configparser.Error, UnicodeDecodeError):
        return {}  # pip itself will complain; uv's default registry may still do
    return dict(parser["global"]) if "global" in parser else {}
