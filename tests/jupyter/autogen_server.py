"""A plugin for AutoGen's own tests: Cloche in the place of the container with a Kernel Gateway that they start."""

from __future__ import annotations

import os
from typing import Any

import docker
from autogen_ext.code_executors import docker_jupyter
from autogen_ext.code_executors.docker_jupyter._jupyter_server import JupyterConnectable, JupyterConnectionInfo


class ClocheServer(JupyterConnectable):
    def __init__(self, bind_dir: Any = None):
        self._bind_dir = bind_dir

    async def __aenter__(self) -> ClocheServer:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def stop(self) -> None: ...

    @property
    def connection_info(self) -> JupyterConnectionInfo:
        place, key = os.environ["CLOCHE_URL"].removeprefix("http://"), os.environ["CLOCHE_API_KEY"]
        return JupyterConnectionInfo(host=f"{place}/jupyter", use_https=False, port=None, token=key)


class ReachableDocker:
    """They ask whether Docker is there."""

    def ping(self) -> bool:
        return True


docker_jupyter.DockerJupyterServer = ClocheServer
docker.from_env = ReachableDocker
