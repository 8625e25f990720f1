"""What the owner of things sees of them: the same before and after somebody else has tried to get at them."""

from __future__ import annotations

from tests.tenants.belongings import Belongings


def witnessed(owner: Belongings) -> dict[str, str]:
    """By path. Nothing in it is a clock's; asking wakes, renews and uses nothing."""
    ids = owner.ids
    box, one = f"/api/v1/sandboxes/{ids['running']}", f"/api/v1/sandboxes/{ids['running']}/contexts/{ids['context']}"
    paths = [
        *(f"/api/v1/sandboxes/{ids[kind]}" for kind in ("running", "paused", "asleep", "killed", "expired", "private")),
        f"/api/v1/sandboxes/{ids['cell']}",
        *(f"{box}{rest}" for rest in ("/contexts", "/processes", "/history", "/files/list?path=/mnt/data")),
        f"{box}/files/content?path=/mnt/data/f.txt",
        f"{box}/files/content?path=/mnt/v/f.txt",
        f"{one}/checkpoints",
        f"{one}/variables",
        f"/api/v1/sandboxes/{ids['private']}/files/content?path=/home/user/g.txt",
        "/api/v1/snapshots",
        "/api/v1/volumes",
        "/api/v1/runs",
        "/e2b/v2/sandboxes",
        "/e2b/templates",
        f"/e2b/templates/{ids['template']}/builds/{ids['build']}/status",
        "/v1/files",
        f"/v1/files/{ids['file']}/content",
        f"/v1/containers/{ids['container']}/files",
        f"/v1/containers/{ids['expired_container']}/files",
        f"/v1/conversations/{ids['conversation']}/items",
        f"/v1/responses/{ids['response']}",
        f"/opensandbox/v1/sandboxes/{ids['cell']}/networkpolicy",
        f"/jupyter/api/kernels/{ids['jupyter_kernel']}",
        f"/jupyter/api/sessions/{ids['jupyter_session']}",
        f"/open-terminal/execute/{ids['terminal_process']}/status",
        f"/open-terminal/api/terminals/{ids['terminal_session']}",
        f"/open-terminal/notebooks/{ids['terminal_notebook']}",
        f"/librechat/v1/download/{ids['session']}/{ids['object']}",
        f"/librechat/v1/download/{ids['exec_session']}/{ids['exec_object']}",
    ]
    seen = {path: owner.wire.ask("GET", path).text for path in paths}
    background = owner.wire.made("GET", f"/v1/responses/{ids['background']}")
    header = {"x-api-key": "", ids["egress_token_header"]: ids["egress_token"]}
    vault = f"/opensandbox/v1/sandboxes/{ids['cell']}/proxy/18080/credential-vault"
    return {
        **seen,
        "background": background["status"],
        "vault": owner.wire.ask("GET", vault, headers=header).text,
    }
