"""One of everything that an owner can have on a server, and who has it."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import secrets
from typing import Any

from tests.conftest import wait_until
from tests.librechat.minting import claims, mint
from tests.tenants.wire import Wire, form

from cloche.api.e2b.registry import sign_file_url

DOMAIN = "cells.test"
PATIENCE = {"CLOCHE_GATEWAY_EXECUTION_SECONDS": "3600"}  # what goes on must not end by itself meanwhile
ECHO = "cloche/echo"
TOOL = {
    "name": "double",
    "description": "Twice that",
    "parameters": {"type": "object", "properties": {"n": {"type": "string"}}, "required": ["n"]},
}
SLEEP = "print('begun', flush=True)\nimport time\nwhile True: time.sleep(1)"


class Belongings:
    """`ids` has what things are called by; `mark` is in all that they hold, and in nothing else."""

    def __init__(self, url: str, key: str, owner: str, signing_key: Any):
        self.owner = owner
        self.key = key
        self.mark = f"mark-of-{owner}"
        self.wire = Wire(url, {"x-api-key": key})
        self.ids: dict[str, str] = {"owner": owner}
        self.signing_key = signing_key
        self._held: list[Any] = []

    def user(self, name: str, tenant: str) -> dict[str, str]:
        """The header of one whom LibreChat vouches for."""
        return {"x-api-key": "", "authorization": f"Bearer {mint(self.signing_key, claims(name, tenant_id=tenant))}"}

    def close(self) -> None:
        for each in self._held:
            each.close()
        self.wire.close()

    def gather(self) -> Belongings:
        self._console()
        self._native()
        self._ended()
        self._e2b()
        self._templates()
        self._openai()
        self._opensandbox()
        self._jupyter()
        self._aca()
        self._open_terminal()
        self._librechat()
        self._mcp()
        return self

    # -- MCP

    def _mcp(self) -> None:
        """A session with a sandbox."""
        about = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "a", "version": "1"}}
        begun = self.wire.ask("POST", "/mcp", {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": about})
        self.ids["mcp_session"] = begun.header("mcp-session-id")
        call = {"name": "run_code", "arguments": {"code": f"open('f.txt', 'w').write({self.mark!r})"}}
        asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
        self.wire.made("POST", "/mcp", asked, {"mcp-session-id": self.ids["mcp_session"]})

    # -- our own dialect

    def _native(self) -> None:
        make, ids = self.wire.made, self.ids
        ids["volume_name"] = f"vol-{self.owner}"
        ids["volume"] = make("POST", "/api/v1/volumes", {"name": ids["volume_name"]})["id"]
        ids["running"] = self._sandbox(volumes={"/mnt/v": ids["volume"]}, env={"MARK": self.mark})
        box = f"/api/v1/sandboxes/{ids['running']}"
        make("PUT", f"{box}/files/content?path=/mnt/data/f.txt", self.mark.encode())
        make("PUT", f"{box}/files/content?path=/mnt/v/f.txt", self.mark.encode())
        make("POST", f"{box}/run", {"code": f"x = {self.mark!r}; x"})
        ids["context"] = make("POST", f"{box}/contexts", {})["id"]
        one = f"{box}/contexts/{ids['context']}"
        make("POST", f"{box}/run", {"code": f"y = {self.mark!r}", "context": ids["context"]})
        ids["checkpoint"] = make("POST", f"{one}/checkpoints", {})["id"]
        ids["process"] = str(make("POST", f"{box}/processes", {"command": "cat", "stdin": True})["id"])
        terminal = {"command": "cat", "terminal": {"rows": 5, "columns": 20}}
        ids["terminal"] = str(make("POST", f"{box}/processes", terminal)["id"])
        ids["run"] = make("POST", f"{box}/runs", {"code": SLEEP, "timeout_seconds": 3600})["id"]
        ids["snapshot_name"] = f"snap-{self.owner}"
        made = make("POST", f"{box}/snapshots", {"name": ids["snapshot_name"]})
        ids["snapshot"] = made["id"]

    def _sandbox(self, **asked: Any) -> str:
        body = {"metadata": {"mark": self.mark}, **asked}
        return str(self.wire.made("POST", "/api/v1/sandboxes", body)["id"])

    def _ended(self) -> None:
        """Those that are paused, and those that were."""
        ids = self.ids
        for name, asked in {"paused": True, "asleep": False}.items():
            ids[name] = self._sandbox(auto_resume=True)
            self.wire.made("POST", f"/api/v1/sandboxes/{ids[name]}/pause", {"memory": asked})
        ids["killed"] = self._sandbox()
        self.wire.made("DELETE", f"/api/v1/sandboxes/{ids['killed']}")
        ids["expired"] = self._sandbox(timeout_seconds=0.05)
        path = f"/api/v1/sandboxes/{ids['expired']}"
        wait_until(lambda: bool(self.wire.made("GET", path)["state"] == "ended"))

    # -- E2B

    def _e2b(self) -> None:
        """One whose ports are closed to strangers: of the others, anybody who knows the address is let in."""
        ids = self.ids
        asked = {
            "templateID": "base",
            "timeout": 600,
            "secure": True,
            "metadata": {"mark": self.mark},
            "network": {"allowPublicTraffic": False},
        }
        made = self.wire.made("POST", "/e2b/v2/sandboxes", asked)
        ids["private"], ids["access_token"] = made["sandboxID"], made["envdAccessToken"]
        ids["traffic_token"] = made["trafficAccessToken"]
        named = {
            "e2b-sandbox-id": ids["private"],
            "e2b-sandbox-port": "49983",
            "x-access-token": ids["access_token"],
            "x-api-key": "",
        }
        content, header = form({}, "g.txt", self.mark.encode())
        self.wire.made("POST", "/e2b/files?path=/home/user/g.txt", content, {**named, **header})
        watching = {"path": "/home/user", "recursive": False}
        ids["watcher"] = self.wire.made("POST", "/e2b/filesystem.Filesystem/CreateWatcher", watching, named)[
            "watcherId"
        ]
        ids["kernel"] = self.wire.made("POST", "/e2b/contexts", {}, {**named, "e2b-sandbox-port": "49999"})["id"]
        ids["signature"] = sign_file_url("/home/user/g.txt", "read", "", ids["access_token"])
        ids["volume_token"] = self.wire.made("GET", f"/e2b/volumes/{ids['volume']}")["token"]

    def _templates(self) -> None:
        ids, make = self.ids, self.wire.made
        ids["template_name"] = f"built-{self.owner}"
        made = make("POST", "/e2b/v3/templates", {"name": ids["template_name"], "tags": ["mine"]})
        ids["template"], ids["build"] = made["templateID"], made["buildID"]
        ids["hash"] = hashlib.sha256(self.mark.encode()).hexdigest()
        link = make("GET", f"/e2b/templates/{ids['template']}/files/{ids['hash']}")
        path = link["url"].partition(self.wire.place)[2]
        ids["upload_query"] = path.partition("?")[2]
        make("PUT", path, self.mark.encode(), {"x-api-key": ""})
        ids["template_tag"] = f"{ids['template_name']}:mine"

    # -- OpenAI

    def _openai(self) -> None:
        ids, make = self.ids, self.wire.made
        content, header = form({"purpose": "user_data"}, f"{self.mark}.txt", self.mark.encode())
        ids["file"] = make("POST", "/v1/files", content, header)["id"]
        for name in ("container", "expired_container"):
            ids[name] = make("POST", "/v1/containers", {"name": self.mark})["id"]
            content, header = form({}, f"{self.mark}.txt", self.mark.encode())
            files = f"/v1/containers/{ids[name]}/files"
            ids[f"file_of_{name}"] = make("POST", files, content, header)["id"]
        gone = f"/api/v1/sandboxes/{ids['expired_container'].removeprefix('cntr_')}"
        make("POST", f"{gone}/renew", {"seconds": 0.01})
        wait_until(lambda: bool(make("GET", gone)["state"] == "ended"))
        ids["conversation"] = make("POST", "/v1/conversations", {"metadata": {"mark": self.mark}})["id"]
        items = {"items": [{"type": "message", "role": "user", "content": self.mark}]}
        ids["conversation_item"] = make("POST", f"/v1/conversations/{ids['conversation']}/items", items)["data"][0][
            "id"
        ]
        done = make("POST", "/v1/responses", self._asked(f"print({self.mark!r})"))
        ids["response"], ids["item"] = done["id"], done["output"][0]["id"]
        ids["call"] = next(each["id"] for each in done["output"] if each["type"] == "code_interpreter_call")
        ids["background"] = make("POST", "/v1/responses", {**self._asked(SLEEP), "background": True})["id"]
        ids["streaming"] = self._streaming()

    def _asked(self, code: str) -> dict[str, Any]:
        tool = {"type": "code_interpreter", "container": self.ids["container"]}
        return {"model": ECHO, "input": f"```python\n{code}\n```", "tools": [tool]}

    def _streaming(self) -> str:
        """The id of one that is being sent while the matrix is tried."""
        connection = http.client.HTTPConnection(self.wire.place, timeout=60)
        self._held.append(connection)
        asked = self._asked(SLEEP)
        asked["tools"] = [{"type": "code_interpreter", "container": {"type": "auto"}}]
        headers = {"x-api-key": self.key, "content-type": "application/json"}
        connection.request("POST", "/v1/responses", json.dumps({**asked, "stream": True}), headers)
        stream = connection.getresponse()
        self._held.append(stream)
        while not (line := stream.readline()).startswith(b"data: "):
            assert line
        return str(json.loads(line[6:])["response"]["id"])

    # -- OpenSandbox

    def _jupyter(self) -> None:
        made = self.wire.made("POST", "/jupyter/api/sessions", {"path": self.mark, "env": {"MARK": self.mark}})
        self.ids["jupyter_session"], self.ids["jupyter_kernel"] = made["id"], made["kernel"]["id"]

    def _aca(self) -> None:
        self.ids["aca_session"], self.ids["aca_file"] = secrets.token_hex(12), f"{secrets.token_hex(12)}.txt"
        body, header = form({}, self.ids["aca_file"], self.mark.encode())
        headers = {**header, "x-api-key": self.key}
        made = self.wire.ask("POST", f"/aca/files?identifier={self.ids['aca_session']}", body, headers)
        assert made.status == 200, made.text

    def _open_terminal(self) -> None:
        """A workspace, with a file, a command, a terminal and a notebook."""
        base = "/open-terminal"
        self.wire.made("POST", f"{base}/files/write", {"path": "f.txt", "content": self.mark})
        cell = {"cell_type": "code", "id": "a", "metadata": {}, "source": "1", "outputs": [], "execution_count": None}
        content = json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [cell]})
        self.wire.made("POST", f"{base}/files/write", {"path": "n.ipynb", "content": content})
        command = {"command": f"echo {self.mark}; sleep 1000"}
        self.ids["terminal_process"] = self.wire.made("POST", f"{base}/execute", command)["id"]
        self.ids["terminal_session"] = self.wire.made("POST", f"{base}/api/terminals")["id"]
        self.ids["terminal_notebook"] = self.wire.made("POST", f"{base}/notebooks", {"path": "n.ipynb"})["id"]

    def _opensandbox(self) -> None:
        ids, make = self.ids, self.wire.made
        asked = {
            "image": {"uri": "python:3.12"},
            "timeout": 600,
            "resourceLimits": {"cpu": "1", "memory": "512Mi"},
            "entrypoint": ["tail", "-f", "/dev/null"],
            "metadata": {"mark": self.mark},
            "networkPolicy": {"defaultAction": "deny", "egress": [{"action": "allow", "target": "api.example.com"}]},
        }
        ids["cell"] = make("POST", "/opensandbox/v1/sandboxes", asked)["id"]
        for name, port in {"execd_token": 44772, "egress_token": 18080, "port_token": 8000}.items():
            told = make("GET", f"/opensandbox/v1/sandboxes/{ids['cell']}/endpoints/{port}")
            ids[name] = next(iter(told["headers"].values()))
            header = next(iter(told["headers"]))
            self.ids[f"{name}_header"] = header
        cell, held = f"/opensandbox/v1/sandboxes/{ids['cell']}/proxy/44772", {"x-api-key": ""}
        held[ids["execd_token_header"]] = ids["execd_token"]
        ids["bash_session"] = make("POST", f"{cell}/session", {}, held)["session_id"]
        started = self.wire.ask("POST", f"{cell}/command", {"command": "sleep 600", "background": True}, held).text
        ids["command"] = json.loads(started.partition("data: ")[2].partition("\n")[0])["text"]
        vault = {
            "credentials": [{"name": f"key-{self.owner}", "source": {"value": self.mark}}],
            "bindings": [
                {
                    "name": f"binding-{self.owner}",
                    "match": {"hosts": ["api.example.com"]},
                    "auth": {"type": "bearer", "credential": f"key-{self.owner}"},
                }
            ],
        }
        path = f"/opensandbox/v1/sandboxes/{ids['cell']}/proxy/18080/credential-vault"
        make("POST", path, vault, {"x-api-key": "", ids["egress_token_header"]: ids["egress_token"]})
        ids["credential"] = f"key-{self.owner}"
        ids["picture"] = make("POST", f"/opensandbox/v1/sandboxes/{ids['cell']}/snapshots", {})["id"]

    # -- LibreChat

    def _librechat(self) -> None:
        ids, make = self.ids, self.wire.made
        content, header = form({}, f"{self.mark}.txt", self.mark.encode())
        made = make("POST", "/librechat/v1/upload", content, header)
        ids["session"], ids["object"] = made["session_id"], made["files"][0]["fileId"]
        user = self.user(f"ann-{self.owner}", f"tenant-{self.owner}")
        made = make("POST", "/librechat/v1/upload", content, {**header, **user})
        ids["users_session"], ids["users_object"] = made["session_id"], made["files"][0]["fileId"]
        content, header = form({"kind": "agent", "id": f"agent-{self.owner}"}, f"{self.mark}.txt", self.mark.encode())
        made = make("POST", "/librechat/v1/upload", content, header)
        ids["agents_session"], ids["agents_object"] = made["session_id"], made["files"][0]["fileId"]
        ids["agent"] = f"agent-{self.owner}"
        ids["hint"] = f"hint-{self.owner}"
        code = f"open('/mnt/data/out.txt', 'w').write({self.mark!r})"
        ran = {"lang": "py", "code": code, "runtime_session_hint": ids["hint"]}
        made = make("POST", "/librechat/v1/exec", ran)
        ids["exec_session"], ids["exec_object"] = made["session_id"], made["files"][0]["id"]
        told = make(
            "POST",
            "/librechat/v1/exec/programmatic",
            {"code": f"print(await double(n={self.mark!r}))", "tools": [TOOL], "timeout": 60_000},
        )
        ids["continuation"] = told["continuation_token"]
        self.call_id = told["tool_calls"][0]["id"]

    # -- the console

    def _console(self) -> None:
        """A session, and what a page of it sends."""
        ids, origin = self.ids, f"http://{self.wire.place}"
        asked = f"key={self.key}".encode()
        entered = self.wire.ask("POST", "/ui/login", asked, {"origin": origin})
        ids["console_session"] = entered.header("set-cookie").partition(";")[0]
        page = self.wire.ask("GET", "/ui/", headers={"cookie": ids["console_session"]})
        ids["csrf"], ids["origin"] = re.findall('name="csrf" content="([^"]+)"', page.text)[0], origin
