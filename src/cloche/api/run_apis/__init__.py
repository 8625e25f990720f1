"""Run APIs: one request runs one program in a fresh sandbox. See docs/dialects/run-apis.md.

runner.py          the run, and the context that the five dialects share
calls.py           code that defines `main`: RAGFlow's and FastGPT's
dify.py  ragflow.py  fastgpt.py  sandbox_fusion.py  piston.py
                   decode a request into a `RunRequest`, and encode its `RunOutcome`
"""

from __future__ import annotations

from starlette.types import ASGIApp

from cloche.api.auth import Gatekeeper
from cloche.api.run_apis.dify import DifyApi
from cloche.api.run_apis.fastgpt import FastGptApi
from cloche.api.run_apis.piston import PistonApi
from cloche.api.run_apis.ragflow import RagFlowApi
from cloche.api.run_apis.runner import ProgramRuns, RunApiApp
from cloche.api.run_apis.sandbox_fusion import SandboxFusionApi
from cloche.config import Config
from cloche.engine.engine import Engine

DIALECTS = (DifyApi, FastGptApi, PistonApi, RagFlowApi, SandboxFusionApi)


def make_run_apis(engine: Engine, gatekeeper: Gatekeeper, config: Config) -> dict[str, ASGIApp]:
    """The application of each run API, by its prefix."""
    runs = ProgramRuns(engine, config)
    return {each.prefix: RunApiApp(each(engine, gatekeeper, config, runs)) for each in DIALECTS}
