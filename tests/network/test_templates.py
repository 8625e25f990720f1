"""`[network]` of a template.toml: what it says, that it is part of the version, and who bounds it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.conftest import with_template
from tests.network.neighbour import Neighbour, living_next_door

import cloche
from cloche import errors
from cloche.config import Config, PoolConfig
from cloche.model import Template
from cloche.network_policy import NetworkPolicy, NetworkRule
from cloche.sdk import embedded
from cloche.templates import catalogue, recipe
from cloche.templates.build import PackageLock, describe_template
from cloche.templates.pythons import Interpreter

GEO = 'name = "geo"\n'


@pytest.fixture(scope="module")
def there() -> Iterator[Neighbour]:
    with living_next_door() as neighbour:
        yield neighbour


@pytest.fixture(scope="module", autouse=True)
def _library(template: Template, there: Neighbour, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A host with a template that may reach two names, of which its operator allows one."""
    place = with_template(tmp_path_factory.mktemp("templates") / "data", template)
    root = place / "templates/python" / template.version
    network = NetworkPolicy(allow=(there.at("api.test"), there.at("other.test")))
    catalogue.write_template(msgspec.structs.replace(template, imports=(), network=network), root)
    settings = Config(
        data_dir=str(place),
        pool=PoolConfig(ready=0),
        network=there.settings(there.at("*.api.test"), there.at("api.test")),
        origins={"network.allow": "test"},
    )
    own = embedded.EmbeddedEngine(settings)
    own.open()
    with embedded.use_engine(own):
        yield
    own.close()


def test_a_sandbox_that_asks_for_nothing_has_its_templates_network_within_the_operators(there: Neighbour):
    with cloche.Sandbox() as box:
        assert box.run(there.fetch("api.test") + there.fetch("other.test")).stdout == "hellorefused"
        assert [each.verdict for each in box.network.log()] == ["allowed", "denied"]


def test_a_sandbox_that_asks_has_that_and_nothing_of_the_templates(there: Neighbour):
    with cloche.Sandbox(network={"allow": [there.at("www.api.test")]}) as box:
        assert box.run(there.fetch("www.api.test") + there.fetch("api.test")).stdout == "hellorefused"
    with cloche.Sandbox(network=False) as box:
        assert box.run(there.fetch("api.test")).stdout == "refused"


def test_a_recipe_sets_the_allowed_hosts():
    text = GEO + '[network]\nallow = ["b.test", "a.test"]\n[[network.rules]]\naction = "deny"\nhost = "x.a.test"\n'
    read = recipe.parse_recipe(text)
    rule = NetworkRule(action="deny", host="x.a.test")
    assert read.network == NetworkPolicy(allow=("b.test", "a.test"), rules=(rule,))
    again = recipe.parse_recipe(recipe.canonical_text(read))
    assert recipe.canonical_text(again) == recipe.canonical_text(read) and again.network.rules == (rule,)


def test_a_recipe_without_one_has_the_text_that_it_had_before_there_were_any():
    assert "[network]" not in recipe.canonical_text(recipe.parse_recipe(GEO))
    with_none, with_empty = recipe.parse_recipe(GEO), recipe.parse_recipe(GEO + "[network]\n")
    assert recipe.canonical_text(with_none) != recipe.canonical_text(with_empty)


def test_it_reaches_the_built_template(template: Template, tmp_path: Path):
    read = recipe.parse_recipe(GEO + '[network]\nallow = ["a.test"]\n')
    interpreter = Interpreter(
        path=template.python, version=template.python_version, prefix=template.python_prefix, platform="x"
    )
    described = describe_template(read, interpreter, PackageLock(text="", packages=()), "0" * 64, tmp_path, 1)
    assert described.network == read.network
    tmp_path.joinpath("x").mkdir()
    catalogue.write_template(described, tmp_path / "x")
    assert catalogue._read_template(tmp_path / "x" / "template.json").network == read.network


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[network]\nalow = []", r"network\.alow; did you mean network\.allow"),
        ('[network]\nallow = ["http://x"]', "no scheme"),
        ('[[network.rules]]\naction = "deny"\nhots = "x"', r"network\.rules\.hots"),
        ('[[network.secrets]]\ndomain = "x"\nvalue = "hush"', "a template has no secrets"),
        ("network = 3", "network"),
    ],
)
def test_invalid_network_settings_are_reported(text: str, said: str):
    with pytest.raises(errors.InvalidConfig, match=said) as refused:
        recipe.parse_recipe(f"{GEO}{text}\n")
    assert "hush" not in str(refused.value)
