"""Commands are tried with a server and without one (`command_line`)."""

from __future__ import annotations

import pytest

# Most of what a command does is the same in both worlds. `make test` has all of it with a server, where a sandbox is
# there sooner, and these without one; `make test-all` has everything in both.
ALSO_ALONE = {
    "test_a_message_is_answered_on_stdout_and_its_code_shown_on_stderr",
    "test_a_second_ctrl_c_kills_a_program_that_does_not_stop",
    "test_a_time_out_is_124",
    "test_bash_is_a_real_terminal_that_follows_the_users_size",
    "test_out_of_memory_is_137",
    "test_out_receives_images_and_new_and_changed_files_only",
    "test_output_and_the_last_expression_are_printed",
    "test_output_comes_while_the_program_runs_and_ctrl_c_interrupts_it",
    "test_piped_python_runs_cell_by_cell_and_feeds_input",
    "test_sigterm_ends_it_with_143",
    "test_stdin_feeds_input_and_ends_where_it_ends",
    "test_a_programs_run_is_saved",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        given = getattr(item, "callspec", None)
        if given is None or given.params.get("command_line") != "alone":
            continue
        if getattr(item, "originalname", item.name) not in ALSO_ALONE:
            item.add_marker(pytest.mark.long)
