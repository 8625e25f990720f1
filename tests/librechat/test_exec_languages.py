"""Programs of all languages that this host has, and what is said of those that it has not."""

from __future__ import annotations

import shutil

import httpx2
import pytest
from tests.librechat.programs import names, run

from cloche.api.programs import LANGUAGES, language_of

HELLO = {
    "bash": 'echo "hello $1"; echo made > made.txt; exit 7',
    "py": "import sys\nprint('hello', sys.argv[1])\nopen('made.txt', 'w').write('made')\nsys.exit(7)",
    "js": "const fs = require('fs'); console.log('hello', process.argv[2]); fs.writeFileSync('made.txt', 'made');"
    " process.exit(7)",
    "ts": "import * as fs from 'node:fs'; enum Word { Made = 'made' }\nconst name: string = process.argv[2];\n"
    "console.log('hello', name); await fs.promises.writeFile('made.txt', Word.Made); process.exit(7)",
    "c": '#include <stdio.h>\nint main(int n, char **v) { printf("hello %s\\n", v[1]);'
    ' fputs("made", fopen("made.txt", "w")); return 7; }',
    "cpp": "#include <fstream>\n#include <iostream>\nint main(int n, char **v) {"
    ' std::cout << "hello " << v[1] << "\\n"; std::ofstream("made.txt") << "made"; return 7; }',
    "java": "import java.nio.file.*;\nclass Any { public static void main(String[] a) throws Exception {"
    ' System.out.println("hello " + a[0]); Files.writeString(Path.of("made.txt"), "made"); System.exit(7); } }',
    "go": 'package main\nimport ("fmt"; "os")\nfunc main() { fmt.Println("hello", os.Args[1]);'
    ' os.WriteFile("made.txt", []byte("made"), 0o644); os.Exit(7) }',
    "rs": 'fn main() { println!("hello {}", std::env::args().nth(1).unwrap());'
    ' std::fs::write("made.txt", "made").unwrap(); std::process::exit(7) }',
    "php": '<?php echo "hello $argv[1]\\n"; file_put_contents("made.txt", "made"); exit(7);',
    "r": 'cat("hello", commandArgs(TRUE)[1]); cat("\\n"); writeLines("made", "made.txt"); quit(status = 7)',
    "d": 'import std; int main(string[] a) { writeln("hello ", a[1]); std.file.write("made.txt", "made"); return 7; }',
    "f90": "program p\ncharacter(9) :: a\ncall get_command_argument(1, a)\nprint '(a)', 'hello '//trim(a)\n"
    "open(1, file='made.txt')\nwrite(1, *) 'made'\nclose(1)\nstop 7\nend program",
}


def is_here(name: str) -> bool:
    """Sandboxes see this host's /usr."""
    language = language_of(name)
    assert language is not None
    return not language.needs or any(shutil.which(each, path="/usr/local/bin:/usr/bin:/bin") for each in language.needs)


@pytest.mark.parametrize("language", [each.name for each in LANGUAGES])
def test_a_program_has_its_arguments_and_leaves_a_file_and_a_code(client: httpx2.Client, language: str) -> None:
    answer = run(client, language, HELLO[language], args=["you"])
    if not is_here(language):
        assert answer["code"] == 1 and answer["stdout"] == ""
        assert f"no language '{language}'" in answer["stderr"] and "py (Python)" in answer["stderr"]
        return
    assert (answer["stdout"], answer["code"]) == ("hello you\n", 7), answer["stderr"]
    assert names(answer) == ["made.txt"]  # and nothing of what its making took


@pytest.mark.parametrize("alias", ["PY", "Python", "bash", "sh", "javascript", "Node", "bun", "typescript", "C++"])
def test_languages_have_many_names(alias: str) -> None:
    assert language_of(alias) is not None


def test_an_unavailable_language_lists_the_available_ones(client: httpx2.Client) -> None:
    answer = run(client, "brainfuck", "+")
    assert answer["code"] == 1
    assert "bash (Bash), py (Python), js (JavaScript), ts (TypeScript)" in answer["stderr"]


def test_compile_errors_are_on_stderr(client: httpx2.Client) -> None:
    if not is_here("c"):
        pytest.skip("this host has no compiler of C")
    answer = run(client, "c", "int main( {")
    assert answer["code"] == 1 and "main.c:1" in answer["stderr"] and answer["stdout"] == ""


def test_main_of_java_may_be_in_any_class(client: httpx2.Client) -> None:
    if not is_here("java"):
        pytest.skip("this host has no Java")
    code = """
record Point(int x) {}
class Other { int x; }
public class App {
    public static void main(String[] args) { System.out.println(new Point(3).x() + args[0]); System.exit(4); }
}
"""
    answer = run(client, "java", code, args=["a b"])
    assert (answer["stdout"], answer["code"], answer["files"]) == ("3a b\n", 4, []), answer["stderr"]


def test_javascript_may_be_a_script_a_module_or_both(client: httpx2.Client) -> None:
    for code in ("console.log(require('os').EOL === '\\n')", "import os from 'os'; console.log(os.EOL === '\\n')"):
        assert run(client, "js", code)["stdout"] == "true\n"
    mixed = "const os = require('os'); console.log(await Promise.resolve(os.EOL === '\\n'))"
    assert run(client, "js", mixed)["stdout"] == "true\n"
    assert "boo" in run(client, "js", "throw new Error('boo')")["stderr"]


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("js", "if (require.main === module) console.log(__filename, process.argv[1], __dirname)"),
        ("ts", "const f: string = __filename; if (require.main === module) console.log(f, process.argv[1], __dirname)"),
    ],
)
def test_a_script_of_javascript_is_the_main_program(client: httpx2.Client, language: str, code: str) -> None:
    answer = run(client, language, code)
    assert answer["stdout"] == "/mnt/data/main.js /mnt/data/main.js /mnt/data\n", answer["stderr"]


def test_a_module_of_javascript_is_the_main_program(client: httpx2.Client) -> None:
    code = """
import { fileURLToPath } from 'url';
console.log(import.meta.url === `file://${process.argv[1]}`, fileURLToPath(import.meta.url) === process.argv[1]);
console.log(require.main === module, process.argv.slice(2));
"""
    assert run(client, "js", code, args=["a"])["stdout"] == "true true\ntrue [ 'a' ]\n"


def test_a_program_is_not_in_the_way_of_the_users_files(client: httpx2.Client) -> None:
    code = "open('main.py', 'w').write('mine = 1'); import main; print(main.mine, __name__)"
    answer = run(client, "py", code)
    assert (answer["stdout"], names(answer)) == ("1 __main__\n", ["main.py"]), answer["stderr"]


def test_bash_takes_programs_of_any_length(client: httpx2.Client) -> None:
    heredoc = "x" * 400_000
    answer = run(client, "bash", f"cat > long.txt <<'END'\n{heredoc}\nEND\nwc -c < long.txt; echo \"$1\"", args=["one"])
    assert (answer["stdout"], answer["stderr"]) == ("400001\none\n", "")
    assert run(client, "bash", "echo a\0b")["stdout"] == "ab\n"


def test_librechats_own_helper_programs_run(client: httpx2.Client) -> None:
    write = "python3 - <<'PY'\nimport base64\nopen('/mnt/data/a b.txt','w').write('text')\nprint('WROTE 4 bytes')\nPY"
    wrote = run(client, "bash", write)
    assert wrote["stdout"] == "WROTE 4 bytes\n" and names(wrote) == ["a b.txt"]
    assert run(client, "bash", "cat '/mnt/data/missing'")["stderr"] != ""
