"""Takes from OpenAI's published OpenAPI document the schemas of what we serve, for the tests.

    python tools/openai_schemas.py path/to/checkout-of-openai-openapi [--commit REVISION]

writes `tests/openai/schemas/openai.json` and the document's licence beside it. Only what is referenced is kept, and of
that only what constrains a value: descriptions and examples stay out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "tests/openai/schemas"
SERVED = """
Response ResponseStreamEvent ResponseItemList ContainerResource ContainerListResource ContainerFileResource
ContainerFileListResource OpenAIFile ListFilesResponse DeleteFileResponse CreateChatCompletionResponse
CreateChatCompletionStreamResponse ConversationResource DeletedConversationResource ConversationItem
ConversationItemList ListModelsResponse Model ErrorResponse TokenCountsResource
""".split()
SAYS_NOTHING = {"description", "example", "examples", "title", "default", "deprecated", "discriminator"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", help="a clone of https://github.com/openai/openai-openapi, bare or not")
    parser.add_argument("--commit", default="HEAD")
    given = parser.parse_args()
    commit = git(given.checkout, "rev-parse", given.commit).strip()
    document = json.loads(git(given.checkout, "show", f"{commit}:openapi.json"))
    schemas = document["components"]["schemas"]
    kept = {name: constraints(schemas[name], name) for name in sorted(reachable(schemas))}
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "openai.json").write_text(written(commit, document["info"]["version"], kept))
    (OUT / "LICENSE").write_text(git(given.checkout, "show", f"{commit}:LICENSE"))
    print(f"{len(kept)} schemas of {commit}")


def git(checkout: str, *words: str) -> str:
    place = Path(checkout)
    where = ["--git-dir", checkout] if (place / "HEAD").exists() else ["-C", checkout]
    return subprocess.run(["git", *where, *words], check=True, capture_output=True, text=True).stdout


def reachable(schemas: dict[str, Any]) -> set[str]:
    """The names of what we serve, and of all that these refer to."""
    found: set[str] = set()
    todo = list(SERVED)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += references(constraints(schemas[name], name))
    return found


def references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"].rpartition("/")[2]
        for value in schema.values():
            yield from references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from references(value)


def constraints(schema: Any, name: str) -> Any:
    """The schema without what only people read, in JSON Schema's own words."""
    if isinstance(schema, list):
        return [constraints(each, name) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: keyword(key, value, name) for key, value in schema.items() if not ignored(key)}
    if kept.pop("$recursiveRef", None):
        kept["$ref"] = f"#/$defs/{name}"
    if kept.pop("nullable", False):
        return {"anyOf": [kept, {"type": "null"}]}
    return kept


def ignored(key: str) -> bool:
    return key in SAYS_NOTHING or key.startswith("x-") or key == "$recursiveAnchor"


def keyword(key: str, value: Any, name: str) -> Any:
    if key == "properties":  # its keys are names, not keywords
        return {each: constraints(schema, name) for each, schema in value.items()}
    if key == "$ref":
        return value.replace("#/components/schemas/", "#/$defs/")
    return value if key in ("enum", "required") else constraints(value, name)


def written(commit: str, version: str, schemas: dict[str, Any]) -> str:
    """One schema in a line, so that a change can be read."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(schema)}" for name, schema in schemas.items())
    source = json.dumps({"repository": "openai/openai-openapi", "commit": commit, "version": version, "license": "MIT"})
    return f'{{"source": {source},\n"$defs": {{\n{lines}\n}}}}\n'


if __name__ == "__main__":
    main()
