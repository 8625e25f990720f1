"""Files of the sandbox as resources, and prompts."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest
from mcp.client.client import Client
from mcp.client.subscriptions import ResourcesListChanged, ResourceUpdated
from mcp.shared.exceptions import MCPError
from tests.mcp.conftest import Connecting


async def test_files_are_resources_and_prompts_are_filled(connecting: Connecting):
    async with connecting() as client:
        for claim in (
            files_are_resources,
            many_files_come_in_pages,
            a_resource_that_is_not_there_is_named,
            prompts_are_filled,
        ):
            await claim(client)


async def files_are_resources(client: Client) -> None:
    assert (await client.list_resources()).resources == []  # nothing was used yet, and nothing is made for it
    ran = await client.call_tool("run_code", {"code": "open('a b.csv', 'w').write('n\\n1\\n')"})
    link = next(each for each in ran.content if each.type == "resource_link")
    assert link.uri == "sandbox:///mnt/data/a%20b.csv" and link.mime_type == "text/csv"
    await client.call_tool("run_code", {"code": "open('raw.bin', 'wb').write(bytes(range(256)))"})
    listed = (await client.list_resources()).resources
    assert [(each.name, each.size) for each in listed] == [("a b.csv", 4), ("raw.bin", 256)]
    text = (await client.read_resource(link.uri)).contents[0]
    assert (text.text, text.mime_type) == ("n\n1\n", "text/csv")
    blob = (await client.read_resource("sandbox:///mnt/data/raw.bin")).contents[0]
    assert base64.b64decode(blob.blob) == bytes(range(256))
    assert (await client.list_resource_templates()).resource_templates[0].uri_template == "sandbox://{+path}"


async def many_files_come_in_pages(client: Client) -> None:
    await client.call_tool("new_sandbox", {})
    await client.call_tool("run_code", {"code": "for i in range(450): open(f'{i:04}', 'w').close()"})
    names, cursor = [], None
    while True:
        page = await client.list_resources(cursor=cursor)
        assert len(page.resources) <= 200
        names += [each.name for each in page.resources]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert sorted(names) == [f"{i:04}" for i in range(450)]
    with pytest.raises(MCPError, match="is not a cursor"):
        await client.list_resources(cursor="evil")


async def a_resource_that_is_not_there_is_named(client: Client) -> None:
    for uri, said in (("sandbox:///mnt/data/none", "none"), ("file:///etc/passwd", "names no file of a sandbox")):
        with pytest.raises(MCPError, match=said):
            await client.read_resource(uri)
    with pytest.raises(MCPError, match="more than the"):
        await client.call_tool("run_command", {"command": "truncate -s 100M large"})
        await client.read_resource("sandbox:///mnt/data/large")


@pytest.mark.filterwarnings("ignore::mcp.MCPDeprecationWarning")
async def test_changes_are_told_as_older_versions_have_it(connecting: Connecting):
    heard: asyncio.Queue[Any] = asyncio.Queue()

    async def on_message(message: Any) -> None:
        await heard.put(getattr(message, "root", message))

    async with connecting(mode="legacy", message_handler=on_message) as client:
        assert client.server_capabilities.resources.subscribe
        await client.call_tool("write_file", {"path": "a.txt", "text": "1"})
        await client.subscribe_resource("sandbox:///mnt/data/a.txt")
        await client.call_tool("run_code", {"code": "open('a.txt', 'w').write('2')"})
        methods: set[str] = set()
        async with asyncio.timeout(60):
            while not {"notifications/resources/updated", "notifications/resources/list_changed"} <= methods:
                methods.add((await heard.get()).method)
        await client.unsubscribe_resource("sandbox:///mnt/data/a.txt")


async def test_changes_are_told_as_the_newest_version_has_it(connecting: Connecting, transport: str):
    if transport == "http":
        return  # that one has no sessions there, so it is not spoken
    async with connecting() as client:
        await client.call_tool("write_file", {"path": "a.txt", "text": "1"})
        uri = "sandbox:///mnt/data/a.txt"
        async with client.listen(resources_list_changed=True, resource_subscriptions=[uri]) as listening:
            await client.call_tool("run_code", {"code": "open('a.txt', 'w').write('2')"})
            kinds: set[type] = set()
            async with asyncio.timeout(60):
                async for event in listening:
                    kinds.add(type(event))
                    if kinds >= {ResourceUpdated, ResourcesListChanged}:
                        break
        assert kinds == {ResourceUpdated, ResourcesListChanged}


async def prompts_are_filled(client: Client) -> None:
    names = [each.name for each in (await client.list_prompts()).prompts]
    filled = await client.get_prompt("analyse_file", {"path": "a.csv", "question": "Why?"})
    assert "analyse_file" in names and "a.csv" in filled.messages[0].content.text
    with pytest.raises(MCPError, match="needs path"):
        await client.get_prompt("analyse_file", {})
