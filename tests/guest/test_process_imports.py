"""The modules of each process: every fork of a zygote has its memory, and every start of `python3` or `sudo` waits.

A module more in one of these lists is memory in every sandbox, or time at every start. Add one knowingly.
"""

from __future__ import annotations

import ast
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from tests.conftest import embedding

import cloche
from cloche.isolation import launch, rootfs

REPORT = "import sys; print((sorted(name for name in sys.modules if name.startswith('cloche.')), len(sys.modules)))"

INIT = """
guest: paths wire
guest.files: deep_walk directories files image image_format image_reader image_writer move ranges tree watch write
guest.init: caller_attributes certificates children defaults errors freeze identity init kernel_copies limits
guest.init: memory_watch ports processes programs service_sockets sessions sudo_server warm_python
guest.kernel: channel installed written_files
guest.languages: bash interpreter languages
guest.python: client script
guest.zygote: enclosure fork_server heap init_factory main rehearsal uv_warmup volumes write_trial zygote
linux: capabilities landlock memory_file memory_layout mounts namespaces seccomp syscalls
"""
KERNEL = f"""
{INIT}
guest.kernel: assistant display display_writer figures fork forkable import_hooks kernel
guest.kernel: notices pil_images plotly_figures proxies
guest.kernel: reseed safe_read shell threads tools tracebacks variables variables_tables
guest.python: command_line exit interpreter run spawn
guest.zygote: warmup
"""
FRESH_KERNEL = """
guest: wire
guest.init: limits
guest.kernel: assistant channel display display_writer figures fork forkable import_hooks installed kernel
guest.kernel: notices pil_images
guest.kernel: plotly_figures proxies reseed safe_read shell threads tools tracebacks variables variables_tables
guest.kernel: written_files
guest.languages: fresh_python
"""


class Loaded(NamedTuple):
    ours: list[str]
    count: int  # of all modules, the standard library's and IPython's too


def modules(text: str) -> list[str]:
    """Lines such as `guest.init: init limits`, as names of modules, with those of their packages."""
    found = set()
    for line in text.split("\n"):
        package, _, names = line.partition(":")
        parts = package.split(".") if package else []
        found |= {".".join(["cloche", *parts[: end + 1]]) for end in range(len(parts))}
        found |= {f"cloche.{package}.{name}" for name in names.split()}
    return sorted(found)


def loaded(stdout: str) -> Loaded:
    return Loaded(*ast.literal_eval(stdout))


@pytest.fixture(scope="module")
def box(bare_dir: str) -> Iterator[cloche.Sandbox]:
    with embedding(bare_dir), cloche.Sandbox() as sandbox:
        yield sandbox


def start(box: cloche.Sandbox, options: str, boot: str) -> Loaded:
    """The modules of a process that is started as `boot` says, at the moment when its `main` would be called."""
    program = boot.replace("main()", "").replace("main(3)", "").rstrip("; \n") + "\n" + REPORT
    ran = box.commands.run(f"/opt/cloche/env/bin/python {options} -c {shlex.quote(program)}")
    assert ran.exit_code == 0, ran.stderr
    return loaded(ran.stdout)


def test_the_first_process_of_a_nursery_has_only_the_heap(box: cloche.Sandbox):
    found = start(box, "-I", launch._BOOT)
    assert found.ours == modules("guest.zygote: heap main")
    assert found.count <= 80


def test_inits_and_bash_kernels_have_nothing_of_a_kernel(box: cloche.Sandbox):
    """They are forks of the init factory, which has what the zygote has before its imports."""
    found = start(box, "-I", f"{launch._BOOT}\nfrom cloche.guest.zygote import zygote")
    assert found.ours == modules(INIT)
    assert found.count <= 180


def test_a_kernel_and_one_by_the_fork_server(box: cloche.Sandbox):
    first, second = (loaded(context.run(REPORT).stdout) for context in (box.contexts.get(), box.contexts.create()))
    assert first.ours == modules(KERNEL)
    assert second == first
    assert first.count <= 420


def test_a_kernel_in_an_interpreter_of_its_own(box: cloche.Sandbox):
    """It is asked for where programs have replaced a package that the zygote has imported."""
    late = "from cloche.guest.kernel import figures, kernel, pil_images, plotly_figures"
    boot = "import sys; sys.path.insert(0, '/opt/cloche/lib'); from cloche.guest.languages.fresh_python import main"
    assert start(box, "-I", f"{boot}\n{late}").ours == modules(FRESH_KERNEL)


def test_sudo(box: cloche.Sandbox):
    found = start(box, "-IS", rootfs._SUDO)
    assert found.ours == modules("guest: wire\nguest.bin: sudo")
    assert found.count <= 90


def test_uv(box: cloche.Sandbox):
    found = start(box, "-IS", rootfs._OWN_UV)
    assert found.ours == modules("guest: paths\nguest.bin: uv\nguest.python: installers")
    assert found.count <= 45


def test_the_client_of_warm_python_imports_no_package_of_ours(box: cloche.Sandbox):
    found = start(box, "-IS", rootfs._WARM_PYTHON)
    assert found.ours == []
    assert found.count <= 30


def test_a_warm_program_sees_nothing_of_ours(box: cloche.Sandbox):
    assert loaded(box.commands.run(f"python3 -c {shlex.quote(REPORT)}").stdout).ours == []


def test_the_process_that_makes_a_nursery():
    found = on_host(f"from cloche.isolation.launch import main\n{REPORT}")
    assert found.ours == modules(
        "isolation: launch netlink_gate\nlinux: capabilities mounts namespaces seccomp seccomp_listener syscalls"
    )
    assert found.count <= 140


def test_help_of_run():
    """The same is in the way of every run."""
    program = "from cloche.cli import main\ntry: main(['run', '--help'])\nexcept SystemExit: pass"
    found = on_host(f"{program}\n{REPORT}")
    top = {f"cloche.{name}" for name in "errors model network_policy structs telemetry".split()}
    packages = modules("cli: network_options notebook run\nconfig: bounds librechat sections")
    assert found.ours == sorted({*top, *packages})
    assert found.count <= 230


def test_completion_of_a_command():
    """A shell waits for it at each press of the tab key."""
    program = "from cloche.cli import main\nimport os\ntry: main([], prog_name='cloche')\nexcept SystemExit: pass"
    asked = {"_CLOCHE_COMPLETE": "bash_complete", "COMP_WORDS": "cloche se", "COMP_CWORD": "1"}
    found = on_host(f"import os; os.environ.update({asked})\n{program}\n{REPORT}")
    assert not [name for name in found.ours if name.startswith("cloche.cli.")]


def on_host(program: str) -> Loaded:
    ran = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True)
    return loaded(ran.stdout.splitlines()[-1])
