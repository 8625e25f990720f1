"""git inside a sandbox, by E2B's Python SDK. It is the host's."""

from __future__ import annotations

import shutil

import pytest
from e2b_code_interpreter import Sandbox

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="this host has no git")


def test_a_repository_is_made_changed_and_read(box: Sandbox):
    box.git.init("/home/user/repo", initial_branch="main")
    box.git.configure_user("Sandbox Bot", "bot@example.com")
    box.commands.run("echo hello > repo/README.md")
    box.git.add("/home/user/repo", all=True)
    box.git.commit("/home/user/repo", message="First")
    status = box.git.status("/home/user/repo")
    assert (status.current_branch, status.is_clean) == ("main", True)
    box.git.create_branch("/home/user/repo", "side")
    assert set(box.git.branches("/home/user/repo").branches) == {"main", "side"}
    assert box.commands.run("git log --format='%an %s'", cwd="/home/user/repo").stdout == "Sandbox Bot First\n"


def test_a_clone_over_git_s_own_protocol(box: Sandbox):
    box.commands.run("git init -q --bare -b main remote.git && git init -q -b main one")
    box.commands.run(
        "cd one && git -c user.name=a -c user.email=b commit -q --allow-empty -m x && git push -q ../remote.git main"
    )
    daemon = box.commands.run(
        "git daemon --verbose --base-path=/home/user --export-all --listen=127.0.0.1 --port=9418", background=True
    )
    cloned = box.commands.run(
        "for _ in $(seq 100); do git clone -q git://127.0.0.1/remote.git two 2>err && break; sleep 0.1; done;"
        "cat err; git -C two log --format=%s"
    )
    assert cloned.stdout == "x\n"
    daemon.kill()


def test_root_s_repositories_can_be_read_by_root(box: Sandbox):
    done = box.commands.run("git init -q /root/r && git -C /root/r status", user="root")
    assert done.exit_code == 0 and "No commits yet" in done.stdout
