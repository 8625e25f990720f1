"""Templates built over the API, as E2B's SDK builds them."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from e2b import Template, wait_for_port
from e2b.exceptions import BuildException, SandboxException, TemplateException
from e2b_code_interpreter import Sandbox
from tests.conftest import RunningServer, serving, wait_until


@pytest.fixture(scope="module")
def api(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{server.url}/e2b", headers={"X-API-Key": server.key}) as client:
        yield client


@pytest.fixture
def name(api: httpx.Client) -> Iterator[str]:
    """That of a template that nobody has; what is built under it goes afterwards."""
    name = f"built-{uuid.uuid4().hex[:12]}"
    yield name
    api.delete(f"/templates/{name}")


@pytest.fixture
def built(server: RunningServer):
    """Builds a template; the lines of its log."""

    def build(template, name: str, **wishes) -> list[str]:
        lines: list[str] = []
        access = {"api_key": server.key, "api_url": f"{server.url}/e2b"}
        Template.build(template, name, on_build_logs=lambda entry: lines.append(entry.message), **access, **wishes)
        return lines

    return build


@pytest.fixture
def create(server: RunningServer) -> Iterator[Callable[..., Sandbox]]:
    made: list[Sandbox] = []

    def make(template: str, **wishes) -> Sandbox:
        made.append(Sandbox.create(template, **server.e2b, **wishes))
        return made[-1]

    yield make
    for each in made:
        each.kill()


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """A directory with files for a template."""
    (tmp_path / "app/deep").mkdir(parents=True)
    (tmp_path / "app/main.py").write_text("print('main')\n")
    (tmp_path / "app/deep/data.txt").write_text("deep\n")
    (tmp_path / "app/link.py").symlink_to("main.py")
    return tmp_path


# -- what is built


def test_a_sandbox_has_the_results_of_every_kind_of_step(built, create, name, context, single):
    template = (
        Template(file_context_path=context)
        .from_image("python:3.12")
        .copy("app", "/app/")
        .copy("app/*", "flat", user="root", mode=0o700)
        .copy("app/main.py", "one.py")
        .set_envs({"GREETING": "hello there", "PATH": "/app/bin:$PATH", "PRICE": "5$"})
        .run_cmd(["mkdir -p /app/bin", "echo $GREETING > greeting", "id -un >> greeting"])
        .run_cmd("id -un > /root/who", user="root")
        .make_symlink("/app/main.py", "main-link")
        .set_user("root")
        .set_workdir("/app/work")
        .run_cmd("pwd > here; id -un >> here")
        .set_start_cmd("python3 -m http.server 7777 --directory /app", wait_for_port(7777))
    )
    lines = built(template, name, cpu_count=1, memory_mb=300)
    assert any(line.startswith("[base] FROM python@") and "python:3.12" in line for line in lines)
    assert "the template is ready" in lines
    box = create(name)
    assert box.commands.run("cat here").stdout == "/app/work\nroot\n"  # there, as root, by default
    assert box.commands.run("id -un", user="user").stdout == "user\n"
    assert box.commands.run("cat /home/user/greeting /root/who").stdout == "hello there\nuser\nroot\n"
    assert box.commands.run("cat /app/deep/data.txt; python3 /app/link.py").stdout == "deep\nmain\n"
    owner = "root" if single else "user"  # to the root who asks, where both are one
    assert box.commands.run("stat -c '%U %a %F' /home/user/flat/main.py /home/user/one.py").stdout == (
        f"root 700 regular file\n{owner} 644 regular file\n"
    )
    assert box.commands.run("readlink /home/user/main-link").stdout == "/app/main.py\n"
    assert box.commands.run('echo "$GREETING|$PRICE|${PATH%%:*}"').stdout == "hello there|5$|/app/bin\n"
    assert "main.py" in box.commands.run("curl -s http://127.0.0.1:7777/").stdout  # it was ready when we came
    assert box.run_code("import os; (os.getcwd(), os.environ['GREETING'])").text == "('/app/work', 'hello there')"
    info = box.get_info()
    assert (info.cpu_count, info.memory_mb, info.name) == (1, 300, name)
    assert info.template_id == box.commands.run("echo $E2B_TEMPLATE_ID").stdout.strip() != ""
    assert create(info.template_id).commands.run("cat here").stdout == "/app/work\nroot\n"  # it can be given again


def test_a_template_is_built_from_one_that_was_built(built, create, name, api):
    first, second = Template().from_template("base"), Template().from_template(name)
    built(first.set_envs({"A": "1"}).run_cmd("echo first > file").set_workdir("/home/user/there"), name)
    try:
        built(second.set_envs({"B": "2"}).run_cmd("cp ../file copy; echo $A$B >> copy"), f"{name}-2")
        box = create(f"{name}-2")
        assert box.commands.run("cat copy; echo $A $B").stdout == "first\n12\n1 2\n"
    finally:
        api.delete(f"/templates/{name}-2")


def test_the_library_makes_sandboxes_of_it_too(server, built, name):
    import cloche

    built(Template().from_base_image().set_workdir("/app").run_cmd("echo kept > kept"), f"{name}:v1")
    with cloche.Sandbox(f"{name}:v1", url=server.url, api_key=server.key) as box:
        assert box.run("open('kept').read()").text == "'kept\\n'"


def test_a_failing_build_leaves_the_old_version_in_use(built, create, name):
    built(Template().from_base_image().run_cmd("echo old > version"), name)
    with pytest.raises(BuildException, match=r"failed to run command 'echo new > version; exit 3': exit status 3"):
        built(Template().from_base_image().run_cmd("echo new > version; exit 3"), name)
    assert create(name).commands.run("cat version").stdout == "old\n"
    built(Template().from_base_image().run_cmd("echo new > version"), name)
    assert create(name).commands.run("cat version").stdout == "new\n"


def test_the_same_is_not_built_twice_unless_it_is_asked_for(built, name, create):
    template = Template().from_base_image().run_cmd("cat /proc/sys/kernel/random/uuid > id")
    built(template, f"{name}:a")
    assert "all steps are cached: the same was built before" in built(template, f"{name}:b")
    built(template, f"{name}:c", skip_cache=True)
    a, b, c = (create(f"{name}:{tag}").commands.run("cat id").stdout for tag in "abc")
    assert a == b != c


@pytest.mark.long
def test_slow_steps_that_are_the_same_are_not_done_again(built, create, name):
    """Also after a build that failed behind them."""
    slow = "sleep 2.1; cat /proc/sys/kernel/random/uuid > slow"
    common = lambda: Template().from_base_image().set_envs({"A": name}).set_workdir("/app/w").run_cmd(slow)  # noqa: E731
    with pytest.raises(BuildException):
        built(common().run_cmd("exit 1"), f"{name}:1")
    lines = built(common().run_cmd("echo $A > after; pwd >> after"), f"{name}:2", memory_mb=400)
    assert [line.endswith("(cached)") for line in lines if line.startswith("[") and "/4]" in line] == [True] * 3 + [
        False
    ]
    assert "all steps are cached: the same was built before" not in lines
    built(
        common().run_cmd("echo $A > after; pwd >> after").run_cmd("echo more > more"), f"{name}:3"
    )  # a build is one, too
    built(common().skip_cache().run_cmd("echo fresh"), f"{name}:4")
    built(
        Template().from_base_image().set_envs({"A": name}).skip_cache().set_workdir("/app/w").run_cmd(slow), f"{name}:5"
    )
    second, third, fourth, fifth = (create(f"{name}:{tag}").commands.run for tag in "2345")
    assert second("cat after; echo $A").stdout == f"{name}\n/app/w\n{name}\n"
    assert third("cat after more").stdout == f"{name}\n/app/w\nmore\n"
    ids = [run("cat slow").stdout for run in (second, third, fourth, fifth)]
    assert ids[0] == ids[1] == ids[2] != ids[3]


# -- what is refused


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (Template().from_image("debian:12"), "ubuntu:"),
        (Template().from_template("nobodys"), "there is no template 'nobodys'"),
        (Template().from_base_image().set_workdir("/nowhere"), "/app, /tmp"),
        (Template().from_base_image().set_user("bob"), "users user and root"),
        (Template().from_base_image().run_cmd("whoami", user="bob"), "unauthenticated: invalid username: 'bob'"),
        (Template().from_base_image().run_cmd("kill -9 $$"), "killed by signal 9"),
    ],
)
def test_a_build_that_fails_says_why(built, name, api, steps, said):
    with pytest.raises(BuildException) as caught:
        built(steps, name)
    assert said in str(caught.value)
    (build,) = api.get(f"/templates/{name}").json()["builds"]
    assert build["status"] == "error"
    assert api.post("/v2/sandboxes", json={"templateID": name}).status_code == 404


def test_more_than_the_host_allows_is_refused_by_name(api, name):
    for body, what in (
        ({"memoryMB": 1 << 20}, "memory_bytes"),
        ({"cpuCount": 1000}, "cpus"),
        ({"cpuCount": 0}, "cpus"),
        ({"cpuCount": 10**400}, "cpuCount"),
        ({"memoryMB": -1}, "memoryMB"),
    ):
        refused = api.post("/v3/templates", json={"name": name, **body})
        assert refused.status_code == 400 and what in refused.json()["message"]


@pytest.mark.parametrize(
    "bad", ["", "-x", "a b", "a:b:c", "a:", ":b", "base", "python", "ubuntu", "e2bdev/own", "../x", "ä"]
)
def test_a_name_that_none_can_have_is_refused(api, bad):
    assert api.post("/v3/templates", json={"name": bad}).status_code == 400


def requested(api: httpx.Client, name: str) -> tuple[str, str]:
    answer = api.post("/v3/templates", json={"name": name})
    assert answer.status_code == 202, answer.text
    return answer.json()["templateID"], answer.json()["buildID"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"fromImage": "base", "fromTemplate": "base"},
        {"fromTemplate": "base", "steps": [{"type": "EXPOSE", "args": ["80"]}]},
        {"fromTemplate": "base", "steps": [{"type": "RUN", "args": []}]},
        {"fromTemplate": "base", "steps": [{"type": "ENV", "args": ["A"]}]},
        {"fromTemplate": "base", "steps": [{"type": "RUN", "args": ["a\0b"]}]},
        {"fromTemplate": "base", "steps": [{"type": "COPY", "args": ["a", "b"]}]},
        {"fromTemplate": "base", "steps": [{"type": "COPY", "args": ["a", "b"], "filesHash": "../x"}]},
        {"fromTemplate": "base", "steps": [{"type": "RUN", "args": ["true"]}] * 501},
        {"fromTemplate": "base", "steps": "none"},
        {"fromTemplate": "base", "steps": [{"type": "RUN", "args": ["x" * (128 << 10)]}]},
        {"fromTemplate": "base", "steps": [{"type": "ENV", "args": ["A", "x" * (128 << 10)]}]},
        {"fromTemplate": "base", "steps": [{"type": "WORKDIR", "args": ["x" * 4097]}]},
        {"fromTemplate": "base", "steps": [{"type": "USER", "args": ["x" * 257]}]},
        {"fromTemplate": "base", "startCmd": "x" * (128 << 10)},
        {"fromTemplate": "base", "readyCmd": "a\0b"},
        {"fromTemplate": "x" * 257},
    ],
)
def test_a_plan_that_makes_no_sense_is_refused_and_the_build_still_waits(api, name, body):
    template, build = requested(api, name)
    path = f"/v2/templates/{template}/builds/{build}"
    assert api.post(path, json=body).status_code == 400
    assert api.get(f"/templates/{template}/builds/{build}/status").json()["status"] == "waiting"
    assert api.post(path, json={"fromTemplate": "base"}).status_code == 202
    again = api.post(path, json={"fromTemplate": "base"})
    assert again.status_code == 400 and "started before" in again.json()["message"]


def test_images_of_registries_are_not_supported(api, name):
    template, build = requested(api, name)
    body = {"fromImage": "python:3", "fromImageRegistry": {"type": "registry", "username": "u", "password": "p"}}
    assert api.post(f"/v2/templates/{template}/builds/{build}", json=body).status_code == 501


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ({"type": "ENV", "args": ["B", "$A" * 10_000]}, "has more than 131072 bytes once its variables have"),
        ({"type": "WORKDIR", "args": ["/tmp/${A}"]}, "has more than 4096 bytes once its variables have"),
        ({"type": "ENV", "args": ["B", "$A", "C", "${A}"]}, "variables of 262144 bytes together"),
        ({"type": "ENV", "args": [text for n in range(1000) for text in (f"N{n}", "")]}, "can have 1000 variables"),
    ],
)
def test_variable_expansion_is_bounded(api, name, step, said):
    template, build = requested(api, name)
    steps = [{"type": "ENV", "args": ["A", "x" * 120_000]}, step]
    assert api.post(
        f"/v2/templates/{template}/builds/{build}", json={"fromTemplate": "base", "steps": steps}
    ).is_success
    done = finished(api, template, build)
    assert (done["status"], done["reason"]["step"]) == ("error", "2")
    assert said in done["reason"]["message"] and len(done["reason"]["message"]) < 1000


def test_a_directory_that_grows_with_every_step_is_bounded(api, name):
    template, build = requested(api, name)
    steps = [{"type": "WORKDIR", "args": ["/".join(["x" * 200] * 15)]}] * 2
    api.post(f"/v2/templates/{template}/builds/{build}", json={"fromTemplate": "base", "steps": steps})
    done = finished(api, template, build)
    assert done["reason"]["step"] == "2" and "more than 4096 bytes" in done["reason"]["message"]


# -- files


def packed(**contents: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def finished(api: httpx.Client, template: str, build: str) -> dict:
    path = f"/templates/{template}/builds/{build}/status"
    wait_until(lambda: api.get(path).json()["status"] in ("ready", "error"))
    return api.get(path).json()


def test_an_address_for_an_upload_is_for_these_files_and_an_hour(api, name):
    template, _ = requested(api, name)
    digest = hashlib.sha256(name.encode()).hexdigest()
    link = api.get(f"/templates/{template}/files/{digest}")
    assert link.status_code == 201 and link.json()["present"] is False
    url = link.json()["url"]
    assert httpx.put(url.replace(digest, "0" * 64), content=b"x").status_code == 401
    assert httpx.put(url.replace("expires=1", "expires=2"), content=b"x").status_code == 401
    assert httpx.put(url.partition("?")[0], content=b"x").status_code == 401
    assert httpx.put(url, content=packed(a=b"1")).status_code == 200
    assert api.get(f"/templates/{template}/files/{digest}").json()["present"] is True
    assert api.get(f"/templates/{template}/files/nothing").status_code == 400
    assert api.get(f"/templates/{template}/files/..%2Fx").status_code == 404


@pytest.mark.parametrize(
    "content", [b"", b"no archive", packed(a=b"1" * 100_000)[:100]], ids=["empty", "text", "cut off"]
)
def test_files_that_are_no_archive_fail_the_build_and_nothing_else(api, name, content):
    template, build = requested(api, name)
    digest = hashlib.sha256(name.encode()).hexdigest()
    assert httpx.put(api.get(f"/templates/{template}/files/{digest}").json()["url"], content=content).status_code == 200
    steps = [{"type": "COPY", "args": ["a", "b", "", ""], "filesHash": digest}]
    api.post(f"/v2/templates/{template}/builds/{build}", json={"fromTemplate": "base", "steps": steps})
    done = finished(api, template, build)
    assert (done["status"], done["reason"]["step"]) == ("error", "1")
    assert "failed to copy 'a' to '/home/user/b'" in done["reason"]["message"]


def test_files_that_were_never_uploaded_fail_the_build(api, name):
    template, build = requested(api, name)
    steps = [{"type": "COPY", "args": ["a", "b"], "filesHash": uuid.uuid4().hex * 2}]
    api.post(f"/v2/templates/{template}/builds/{build}", json={"fromTemplate": "base", "steps": steps})
    assert "not uploaded" in finished(api, template, build)["reason"]["message"]


# -- logs


def test_logs_come_in_pages_and_by_level(api, name):
    template, build = requested(api, name)
    steps = [{"type": "RUN", "args": ["seq 250; printf '\\033[31mred\\033[0m\\n' >&2"]}]
    api.post(f"/v2/templates/{template}/builds/{build}", json={"fromTemplate": "base", "steps": steps})
    assert finished(api, template, build)["status"] == "ready"
    path, lines = f"/templates/{template}/builds/{build}/status", []
    while page := api.get(path, params={"logsOffset": len(lines)}).json()["logEntries"]:
        assert len(page) <= 100
        lines += page
    out = [each["message"] for each in lines if each["message"].startswith("[stdout]")]
    assert out == [f"[stdout]: {number}" for number in range(1, 251)]
    (warning,) = api.get(path, params={"level": "warn"}).json()["logEntries"]
    assert (warning["message"], warning["step"]) == ("[stderr]: red", "1")
    assert len(api.get(f"/templates/{template}/builds/{build}/logs").json()["logs"]) == len(lines)


def test_output_without_end_is_bounded_and_the_build_goes_on(api, name):
    template, build = requested(api, name)
    steps = [{"type": "RUN", "args": ["head -c 30000000 /dev/zero | tr '\\0' '\\n'; head -c 3000000 /dev/zero"]}]
    api.post(f"/v2/templates/{template}/builds/{build}", json={"fromTemplate": "base", "steps": steps})
    assert finished(api, template, build)["status"] == "ready"
    last = api.get(f"/templates/{template}/builds/{build}/logs").json()["logs"]
    assert any("the rest is left out" in each["message"] for each in last)


# -- tags and owners


def test_a_tag_means_a_build_until_it_is_moved(server, built, create, name):
    access = {"api_key": server.key, "api_url": f"{server.url}/e2b"}
    built(Template().from_base_image().run_cmd("echo 1 > version"), f"{name}:v1", tags=["stable"])
    built(Template().from_base_image().run_cmd("echo 2 > version"), f"{name}:v2")
    assert Template.assign_tags(f"{name}:v2", ["latest", f"{name}:stable"], **access).tags == ["latest", "stable"]
    tags = {each.tag: each.build_id for each in Template.get_tags(name, **access)}
    assert tags["stable"] == tags["latest"] == tags["v2"] != tags["v1"] and len(tags) == 4
    assert create(f"{name}:stable").commands.run("cat version").stdout == "2\n"
    assert create(f"{name}:v1").commands.run("cat version").stdout == "1\n"
    Template.remove_tags(name, ["stable", "v2"], **access)
    assert {each.tag for each in Template.get_tags(name, **access)} == {"v1", "latest"}
    assert Template.exists(f"{name}:v1", **access) and not Template.exists(f"{name}:v2", **access)
    with pytest.raises(SandboxException, match=f"the template '{name}' has no tag 'default': it has latest, v1"):
        create(name)
    for tag in ("other:tag", ":tag", f"{name}:", "a b"):
        with pytest.raises(TemplateException):
            Template.assign_tags(f"{name}:v1", tag, **access)
    with pytest.raises(TemplateException, match="it has latest, v1"):
        Template.assign_tags(f"{name}:gone", "x", **access)


def test_a_request_has_a_hundred_tags_at_most(api, name):
    many = [f"t{number}" for number in range(101)]
    refused = api.post("/v3/templates", json={"name": name, "tags": many})
    assert refused.status_code == 400 and "can have 100, not 101" in refused.json()["message"]
    template, build = requested(api, name)
    api.post(f"/v2/templates/{template}/builds/{build}", json={"fromTemplate": "base"})
    assert finished(api, template, build)["status"] == "ready"
    assert api.post("/templates/tags", json={"target": name, "tags": many}).status_code == 400
    assert api.post("/templates/tags", json={"target": name, "tags": ["x" * 300]}).status_code == 400
    assert api.post("/templates/tags", json={"target": "x" * 300, "tags": ["x"]}).status_code == 400
    assert api.request("DELETE", "/templates/tags", json={"name": name, "tags": many}).status_code == 400
    assert api.post("/templates/tags", json={"target": name, "tags": many[:100]}).status_code == 201
    assert len(api.get(f"/templates/{name}/tags").json()) == 101
    told = api.get(f"/templates/aliases/{name}:gone").json()["message"]
    assert api.get(f"/templates/aliases/{name}:t7").status_code == 200 and "no tag 'gone'" in told


def test_a_template_of_another_owner_does_not_exist(server, api, built, name):
    built(Template().from_base_image(), name)
    id = api.get(f"/templates/{name}").json()["templateID"]
    build = api.get(f"/templates/{name}/tags").json()[0]["buildID"]
    admin = {"Authorization": f"Bearer {server.key}"}
    made = httpx.post(f"{server.url}/admin/keys", headers=admin, json={"owner": "stranger"}).json()
    with httpx.Client(base_url=f"{server.url}/e2b", headers={"X-API-Key": made["key"]}) as stranger:
        for ref in (name, id):
            paths = (ref, f"{ref}/tags", f"aliases/{ref}", f"{ref}/builds/{build}/status", f"{ref}/files/{'0' * 64}")
            assert [stranger.get(f"/templates/{path}").status_code for path in paths] == [404] * 5
            assert stranger.post("/v2/sandboxes", json={"templateID": ref}).status_code == 404
            assert stranger.post(f"/v2/templates/{ref}/builds/{build}", json={}).status_code == 404
            assert stranger.delete(f"/templates/{ref}").status_code == 404
        listed = [each["templateID"] for each in stranger.get("/templates").json()]
        assert id not in listed and listed
        own = stranger.post("/v3/templates", json={"name": name})  # the name is free to others
        assert own.status_code == 202 and stranger.delete(f"/templates/{name}").status_code == 204
    assert id in [each["templateID"] for each in api.get("/templates").json()]


def test_a_deleted_template_is_gone_and_its_sandboxes_stay(api, built, create, name):
    built(Template().from_base_image().run_cmd("echo kept > kept"), name)
    box = create(name)
    assert api.get("/snapshots").json() == [] or name not in str(api.get("/snapshots").json())
    assert api.delete(f"/templates/{name}").status_code == 204
    assert api.get(f"/templates/aliases/{name}").status_code == 404
    assert api.post("/v2/sandboxes", json={"templateID": name}).status_code == 404
    assert api.delete(f"/templates/{name}").status_code == 404
    assert box.commands.run("cat kept").stdout == "kept\n"


def test_at_most_four_of_an_owner_go_on_at_once_and_deleting_ends_them(api, name):
    builds = []
    for number in range(5):
        template, build = requested(api, f"{name}-{number}")
        steps = [{"type": "RUN", "args": ["sleep 1000"]}]
        api.post(f"/v2/templates/{template}/builds/{build}", json={"fromTemplate": "base", "steps": steps})
        builds.append(f"/templates/{template}/builds/{build}/status")
    wait_until(lambda: all("RUN sleep" in str(api.get(path).json()["logs"]) for path in builds[:4]))
    assert "waiting" in str(api.get(builds[4]).json()["logs"])
    assert api.delete(f"/templates/{name}-0").status_code == 204
    wait_until(lambda: "RUN sleep" in str(api.get(builds[4]).json()["logs"]))
    for number in range(1, 5):
        assert api.delete(f"/templates/{name}-{number}").status_code == 204


# -- a server that is killed


@pytest.mark.long
def test_a_build_that_was_killed_with_its_server_has_failed_and_left_nothing(bare_dir, tmp_path):
    place = tmp_path / "data"
    place.mkdir()
    (place / "templates").symlink_to(Path(bare_dir, "templates"))
    with serving(place) as first:
        headers = {"X-API-Key": first.key}
        with httpx.Client(base_url=f"{first.url}/e2b", headers=headers) as api:
            whole, _ = requested(api, "whole")
            build = api.get(f"/templates/{whole}").json()["builds"][0]["buildID"]
            api.post(f"/v2/templates/{whole}/builds/{build}", json={"fromTemplate": "base"})
            assert finished(api, whole, build)["status"] == "ready"
            template, build = requested(api, "whole")
            steps = [{"type": "RUN", "args": ["head -c 1000000 /dev/urandom > big; echo here; sleep 1000"]}]
            api.post(f"/v2/templates/{template}/builds/{build}", json={"fromTemplate": "base", "steps": steps})
            status = f"/templates/{template}/builds/{build}/status"
            wait_until(lambda: "here" in str(api.get(status).json()["logs"]))
        first.process.kill()
        first.process.wait()
    again = serving(place, env={"CLOCHE_API_KEY": first.key})
    with again as second, httpx.Client(base_url=f"{second.url}/e2b", headers={"X-API-Key": first.key}) as api:
        failed = api.get(status).json()
        assert (failed["status"], failed["reason"]["message"]) == ("error", "the server was restarted")
        assert api.get("/v2/sandboxes").json() == [] and api.get("/snapshots").json() == []
        made = api.post("/v2/sandboxes", json={"templateID": "whole"})
        assert made.status_code == 201  # the version before is in use
        assert len(os.listdir(place / "images")) == 1
        assert api.delete("/templates/whole").status_code == 204
        assert os.listdir(place / "images") == []


def test_builds_that_no_tag_means_any_more_are_kept_but_not_without_end(api, name):
    for number in range(13):
        template, build = requested(api, name)
        plan = {"fromTemplate": "base", "force": True, "steps": [{"type": "ENV", "args": ["N", str(number)]}]}
        api.post(f"/v2/templates/{template}/builds/{build}", json=plan)
        assert finished(api, template, build)["status"] == "ready"
    builds = api.get(f"/templates/{name}").json()["builds"]
    assert len(builds) == 11 and builds[0]["buildID"] == build
    assert [each["buildID"] for each in api.get(f"/templates/{name}/tags").json()] == [build]
