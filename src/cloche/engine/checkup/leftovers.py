"""What `cloche doctor` says of processes that died: what of theirs is left until Cloche is started again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cloche.config import Config
from cloche.isolation.base import Check

SHOWN = 5  # of each kind


def checks(config: Config) -> Iterable[Check]:
    """Only looks."""
    found = [part for part in (_cgroups(config), _instances(config), _images(config), _templates(config)) if part]
    if not found:
        yield Check(name="leftovers", state="enforced", detail="nothing of processes that died")
        return
    advice = "whatever starts Cloche next (`cloche serve`, `cloche run`) removes it"
    yield Check(name="leftovers", state="best effort", detail="; ".join(found), advice=advice)


def _instances(config: Config) -> str:
    from cloche.engine.instance import dead_instances

    return _some("directories of", dead_instances(Path(config.data_dir, "run")))


def _cgroups(config: Config) -> str:
    """Perhaps with processes in them that are frozen, and could not die with the one that froze them."""
    from cloche.linux.cgroups import probe

    return _some("cgroups of", probe().dead()) if config.backend == "namespaces" else ""


def _images(config: Config) -> str:
    from cloche.engine.instance import Instance
    from cloche.store.images import abandoned_drafts

    is_live = Instance(Path(config.data_dir, "run")).is_live
    return _some("half-written images", abandoned_drafts(Path(config.data_dir, "images"), is_live))


def _templates(config: Config) -> str:
    from cloche.templates import Catalogue

    found = [f"{path.parent.name}/{path.name}" for path in Catalogue(config.data_dir, config.aliases).abandoned()]
    return _some("half-built templates", found)


def _some(what: str, names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{what} {', '.join(names[:SHOWN])}{more}" if names else ""
