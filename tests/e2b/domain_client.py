"""E2B's SDK as a program that knows a domain and a certificate only. Prints JSON.

Run by the interpreter of the SDK's release, with E2B_API_KEY, E2B_DOMAIN and SSL_CERT_FILE.
"""

import json

import httpx
from e2b_code_interpreter import Sandbox

SERVER = "python3 -m http.server 3000 --directory /workspace"

box = Sandbox.create()
said = {"text": box.run_code("6 * 7").text, "id": box.sandbox_id}
context = box.create_code_context()
box.run_code("x = 'of the context'", context=context)
said["context"] = box.run_code("x", context=context).text
box.files.write("/workspace/index.html", "page")
said["file"] = box.files.read("/workspace/index.html")
said["command"] = box.commands.run("id -un").stdout
box.commands.run(SERVER, background=True)
box.commands.run("for n in $(seq 200); do curl -sf localhost:3000 && exit; sleep 0.05; done; exit 1")
said["host"] = box.get_host(3000)
said["page"] = httpx.get(f"https://{box.get_host(3000)}/").text
said["killed"] = box.kill()
print(json.dumps(said))
