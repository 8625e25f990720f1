"""`run_code(language=..)` of E2B's SDK: JavaScript, TypeScript and bash beside Python, in one sandbox."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from e2b import SandboxException
from e2b_code_interpreter import Sandbox

from cloche.guest.languages import languages


@pytest.fixture(scope="module")
def box(server) -> Iterator[Sandbox]:
    sandbox = Sandbox.create(envs={"OF_ALL": "of all"}, **server.e2b)
    yield sandbox
    sandbox.kill()


@pytest.mark.parametrize("language", ["js", "javascript", "ts", "typescript"])
def test_node_languages_keep_their_state_and_give_values(box: Sandbox, language: str):
    assert box.run_code(f"const of_{language} = await Promise.resolve('kept')", language=language).error is None
    assert box.run_code(f"of_{language}", language=language).text == "kept"
    assert box.run_code("process.cwd()", language=language).text == "/home/user"


@pytest.mark.parametrize(
    ("language", "show"),
    [
        ("js", "console.log(process.env.{} ?? 'unset')"),
        ("bash", "echo ${{{}-unset}}"),
        ("python", "!echo ${{{}-unset}}"),
    ],
)
def test_variables_of_the_sandbox_and_of_a_call(box: Sandbox, language: str, show: str):
    assert box.run_code(show.format("OF_ALL"), language=language).logs.stdout == ["of all\n"]
    own = box.run_code(show.format("OF_ALL"), language=language, envs={"OF_ALL": "it's mine"})
    assert own.logs.stdout == ["it's mine\n"]
    assert box.run_code(show.format("OF_CALL"), language=language, envs={"OF_CALL": "1"}).logs.stdout == ["1\n"]
    assert box.run_code(show.format("OF_CALL"), language=language).logs.stdout == ["unset\n"]
    assert box.run_code(show.format("OF_ALL"), language=language).logs.stdout == ["of all\n"]


@pytest.mark.skipif(shutil.which("R") is None, reason="there is no R on this host: apt-get install r-base-core")
def test_r_has_variables_of_the_sandbox_and_of_a_call(box: Sandbox):
    def value_of(name: str, **how) -> str | None:
        return box.run_code(f"Sys.getenv('{name}', unset = 'default')", language="R", **how).results[0].text

    assert value_of("OF_ALL") == '[1] "of all"'
    assert value_of("OF_ALL", envs={"OF_ALL": "mine"}) == '[1] "mine"'
    assert (value_of("OF_ALL"), value_of("OF_CALL")) == ('[1] "of all"', '[1] "default"')
    assert box.run_code("getwd()", language="r").results[0].text == '[1] "/home/user"'
    assert box.run_code("plot(1)", language="r").results[0].png is not None


@pytest.mark.skipif(languages.find_java() is None, reason="no JDK here: apt-get install openjdk-17-jdk-headless")
def test_java_has_variables_as_properties_and_lines_as_those_of_ijava(box: Sandbox):
    show = 'System.getProperty("{}", "default")'
    assert box.run_code(show.format("OF_ALL"), language="java").text == "of all"
    assert box.run_code(show.format("OF_ALL"), language="java", envs={"OF_ALL": "mine"}).text == "mine"
    assert box.run_code(show.format("OF_ALL"), language="java").text == "of all"
    assert box.run_code('System.out.println("line")', language="java").logs.stdout == ["line", "\n"]
    assert box.run_code('System.getProperty("user.dir")', language="java").text == "/home/user"


def test_bash_keeps_its_state(box: Sandbox):
    box.run_code('cd /tmp; greet() { echo "hello $1"; }', language="bash")
    assert box.run_code("greet you; pwd", language="bash").logs.stdout[0].startswith("hello you\n")


def test_a_context_of_a_language_is_listed_restarted_and_removed(box: Sandbox):
    context = box.create_code_context(language="typescript", cwd="/tmp")
    assert (context.language, context.cwd) == ("typescript", "/tmp")
    assert context.id in [each.id for each in box.list_code_contexts()]
    box.run_code("const there: number = 5", context=context)
    assert box.run_code("[there, process.cwd()]", context=context).text == "[ 5, '/tmp' ]"
    box.restart_code_context(context)
    assert box.run_code("typeof there", context=context).text == "undefined"
    box.remove_code_context(context)
    assert context.id not in [each.id for each in box.list_code_contexts()]


def test_an_error_of_javascript_is_an_error_of_the_execution(box: Sandbox):
    error = box.run_code("\nthrow new RangeError('too far')", language="js").error
    assert error is not None
    assert (error.name, error.value) == ("RangeError", "too far")
    assert ":2" in error.traceback


def test_a_rich_result_of_javascript(box: Sandbox):
    execution = box.run_code("$$.html('<b>hi</b>'); ({a: [1, 2]})", language="js")
    assert [result.html for result in execution.results] == ["<b>hi</b>", None]
    assert execution.results[1].json == {"a": [1, 2]}


def test_an_unknown_language_error_lists_the_known_ones(box: Sandbox):
    with pytest.raises(SandboxException, match="python, javascript, typescript, bash"):
        box.run_code("1", language="cobol")
    assert box.run_code("1").text == "1"
