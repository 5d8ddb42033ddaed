"""SECURITY.md promises nothing that no test shows, and the tests that it names fail when what they test is switched off."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planted_breaks import BREAKS

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
PARAGRAPHS = {
    "Clients of the HTTP API": "test_a_port_that_is_open_to_everyone_is_said test_only_a_trusted_proxy_says",
    "Web pages": "test_where_no_key_is_needed_only test_pages_of_other_origins_may_not_call",
    "Other hosts of the network": "test_who_is_turned_away_is_counted test_without_keys_only_loopback_is_bound",
    "Strangers who connect without a key": "test_a_connection_that_does_not_get_on test_connections_without_a_request"
    " test_one_connection_too_many test_a_role_opens_as_many_files",
    "Processes with a listed key": "test_protocol_error_ends_one_peer_only test_frames_that_are_almost_messages_of_the_next",
    "Other users of the same host": "test_only_a_child_and_those_it_started test_other_users_are_not_heard",
    "Other processes of the same user": "test_no_other_process_of_the_user",
    "Metrics ports": "test_where_it_listens test_no_web_page_reads_a_port test_no_prompt_no_key_and_no_secret",
    "The model": "test_remote_code_is_never_run test_a_template_that_reaches_out test_code_of_models_is_refused",
    "The KV data plane": "test_bad_pools_and_hosts_are_refused",
    "Hashes of KV blocks": "test_gateways_share_one_random_key test_hashes_say_nothing_without_the_key",
    "Logs": "test_no_traceback_shows test_no_key_in_a_wrong_place test_no_prompt_no_key_and_no_secret",
    "`tcp`": "test_who_listens_without_the_key test_a_hello_that_was_overheard test_who_says_nothing_is_closed"
    " test_what_crosses_can_be_read test_a_record_that_was_not_agreed_on",
    "Without `--keys`": "test_what_crosses_can_be_read",
    "With `--keys`": "test_with_keys_nothing_crosses_in_the_clear test_the_start_says_what_may_cross"
    " test_what_must_not_cross_in_the_clear",
    "`nccl`": "test_with_keys_nothing_crosses_in_the_clear test_the_store_of_an_nccl_pair",
    "`shm` and `cuda_ipc`": "test_another_user_is_not_let_in test_a_sender_maps_its_window",
    "Digests.": "test_kv_that_changed_between tests/kvtransfer/test_faults.py",
}
"""Bold beginnings of the page's paragraphs, each with beginnings of the tests, or the files, that show what it promises."""
CLUSTER = "needs a cluster of processes"
EVERYWHERE = "test_unknown_keys_plain_clients_and_impostors_are_turned_away_at_every_port_and_counted"
BACKLOG = "test_who_fills_a_receivers_backlog_holds_the_sender_up_no_longer_than_its_limit"
WITHOUT_BREAK = {
    "tests/runtime/test_curve.py::test_a_server_without_the_right_key_is_not_believed": "the measure is libzmq's",
    f"tests/e2e/test_secured.py::{EVERYWHERE}": CLUSTER,
    "tests/e2e/test_serve.py::test_keys_from_the_environment_are_those_of_every_process": CLUSTER,
    "tests/e2e/test_hostile.py::test_ten_thousand_hostile_connections_at_each_port": CLUSTER,
    "tests/e2e/test_fuzz.py::test_a_hundred_thousand_frames_at_each_port": CLUSTER,
    "tests/e2e/test_secured.py::test_no_prompt_no_key_and_no_secret_of_a_tenant_is_written_anywhere": CLUSTER,
    "tests/kvtransfer/test_faults.py": CLUSTER,
    "tests/kvtransfer/test_tcp.py::test_a_byte_changed_on_its_way_ends_the_pair_and_is_not_committed": "two measures refuse it",
    "tests/kvtransfer/test_tcp_strangers.py::test_a_process_that_runs_out_of_descriptors_goes_on": "takes minutes to fail",
    "tests/kvtransfer/test_shm.py::test_a_sender_maps_its_window_and_nothing_of_the_pool": "no single line",
    "tests/gateway/test_slow_clients.py::test_a_client_that_does_not_read_is_cut_off_and_its_request_cancelled": "two measures",
    "tests/gateway/test_bad_requests.py::test_bad_request": "each of its rows is a measure of its own",
    "tests/gateway/test_openapi.py::test_requests_made_of_the_description_never_make_the_server_fail": "no single measure",
    "tests/test_fuzz_cores.py::test_no_valid_message_makes_a_core_fail": "tests/simulation/ breaks the cores",
    "tests/gateway/test_heavy_bodies.py::test_no_body_holds_the_loop": "takes minutes",
    "tests/launcher/test_env_script.py::test_without_a_terminal_each_phase_is_a_line": "a script, which a break cannot edit",
    "tests/coordinator/test_checked.py::test_what_a_lying_worker_says_leaves_a_report_that_can_be_read": "no single line",
    f"tests/kvtransfer/test_shm.py::{BACKLOG}": "hangs",
    "tests/runtime/test_hostile_links.py::test_silent_connections_count_by_their_key_and_for_its_bound": "no single line",
    "tests/runtime/test_hostile_links.py::test_a_message_that_does_not_end_is_cut_off_before_a_link_and_on_one": "slow",
    "tests/gateway/test_heavy_bodies.py::test_a_body_that_waits_is_its_bytes_and_a_refused_one_is_gone": "no single line",
    "tests/runtime/test_grammars.py::test_a_hostile_grammar_costs_little_at_each_token": "the measure is llguidance's",
    "tests/coordinator/test_victim.py": "takes minutes; tests/simulation/ breaks the fair queue",
    "tests/engine/test_refusals.py::test_remote_code_is_never_run": "without the option transformers asks, and gets no answer",
    "tests/gateway/test_batches.py::test_no_file_holds_the_loop": "no single line",
    "tests/kvtransfer/test_rendezvous.py::test_the_store_of_an_nccl_pair_does_not_hold_the_secret_of_its_line": "NCCL is faked",
}
"""Tests that the page names and no break is planted for, and why."""
SAMPLE = (
    "tests/gateway/test_tenancy.py::test_a_file_without_keys_does_not_open_the_door",
    "tests/runtime/test_rate_limited_log.py::test_a_flood_of_lines_becomes_few_and_is_counted",
)
"""Breaks that are tried in every run of the suite."""


def named() -> dict[str, str]:
    """What the page's table names: the test, or the file → the row."""
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")][1:]
    found = [(row, re.fullmatch(r"\|.+\|.+\| `(tests/[^:`]+(?:::\w+)?)` \|", row)) for row in rows]
    assert len(found) > 20 and all(match for _, match in found), [row for row, match in found if not match]
    return {match[1]: row for row, match in found if match is not None}


def _tests(name: str) -> dict[str, ast.FunctionDef]:
    path = ROOT / name.partition("::")[0]
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
    return {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name.startswith("test_")}


def test_every_threat_names_a_test_that_exists() -> None:
    assert not [name for name in named() if not _tests(name) or name.partition("::")[2] not in ("", *_tests(name))]


def test_tests_that_are_named_run_everywhere() -> None:
    """On a machine without a GPU as well."""
    for name in named():
        for test in [_tests(name)[name.partition("::")[2]]] if "::" in name else []:
            marks = " ".join(map(ast.unparse, test.decorator_list))
            assert "skip" not in marks, name
        text = (ROOT / name.partition("::")[0]).read_text(encoding="utf-8")
        skips = re.findall(r"^pytestmark = .*?skipif\((.*?),|importorskip\(\"(\w+)\"", text, re.MULTILINE)
        assert not any("cuda" in "".join(skip) for skip in skips) and not name.startswith("tests/gpu"), name


def test_every_paragraph_has_rows_in_the_table() -> None:
    prose = PAGE.partition("## Who is trusted")[2].partition("## Keys")[0]
    assert set(re.findall(r"^- \*\*(.+?)\*\*", prose, re.MULTILINE)) == set(PARAGRAPHS)
    for paragraph, tests in PARAGRAPHS.items():
        for beginning in tests.split():
            assert any(beginning in name for name in named()), (paragraph, beginning)


def test_the_table_of_breaks_is_that_of_the_page() -> None:
    assert set(named()) == set(BREAKS) | set(WITHOUT_BREAK) and not set(BREAKS) & set(WITHOUT_BREAK)
    assert len(BREAKS) > 3 * len(WITHOUT_BREAK) and set(SAMPLE) <= set(BREAKS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SAMPLE else [pytest.mark.long]) for name in BREAKS]
)
def test_a_test_fails_when_its_measure_is_switched_off(name: str) -> None:
    command = [sys.executable, "-m", "tests.planted_breaks", name]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=500)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout[-3000:] + done.stderr[-1000:]
    assert "has no '" not in done.stdout, done.stdout[-3000:]
