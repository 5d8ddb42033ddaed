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
    "Clients of the HTTP API": "test_open_keyless_port_is_warned_about test_only_trusted_proxy_names_the_client"
    " test_bad_token_is_refused"
    " test_http_is_served_over_tls test_client_without_certificate_is_refused test_changed_certificate_is_served",
    "Web pages": "test_keyless_gateway_checks_host_names test_foreign_origins_are_refused",
    "Other hosts of the network": "test_refused_connections_are_counted test_keyless_bind_needs_loopback",
    "Strangers who connect without a key": "test_stalled_handshake_is_closed test_idle_connections_make_room"
    " test_silent_strangers_keep_nobody_out test_excess_connection_replaces_oldest test_role_raises_open_file_limit",
    "Processes with a listed key": "test_protocol_error_ends_one_link_only test_mutated_future_frames_are_refused",
    "Other users of the same host": "test_only_child_processes_are_heard test_other_users_are_not_heard",
    "Other processes of the same user": "test_role_memory_is_private",
    "Metrics ports": "test_metrics_address_is_checked test_metrics_are_on_the_apis_port"
    " test_metrics_need_a_certificate test_foreign_host_header_is_refused test_no_secret_is_written_anywhere"
    " test_orders_need_the_admin_key",
    "The model": "test_remote_code_is_never_run test_bad_template_is_a_template_error test_transformers_never_runs_model_code",
    "The KV data plane": "test_bad_pools_and_hosts_are_refused",
    "Hashes of KV blocks": "test_gateways_share_lasting_hash_key test_hashes_reveal_nothing_without_key",
    "The database": "test_bad_database_option_is_refused",
    "Logs": "test_tracebacks_hide_variable_values test_misplaced_key_is_not_logged test_no_secret_is_written_anywhere",
    "`tcp`": "test_keyless_listener_gets_nothing test_overheard_hello_is_refused test_silent_stranger_is_closed"
    " test_encrypted_kv_cannot_be_read test_unexpected_record_ends_connection",
    "Without `--keys`": "test_encrypted_kv_cannot_be_read",
    "With `--keys`": "test_keys_forbid_unencrypted_transports test_start_logs_unencrypted_transports"
    " test_cleartext_transport_is_refused",
    "`nccl`": "test_keys_forbid_unencrypted_transports test_nccl_store_hides_line_secret",
    "`shm` and `cuda_ipc`": "test_another_user_is_refused test_sender_maps_only_its_window",
    "Digests.": "test_changed_kv_is_refused tests/kvtransfer/test_faults.py",
}
"""Bold beginnings of the page's paragraphs, each with beginnings of the tests, or the files, that show what it promises."""
CLUSTER = "needs a cluster of processes"
EVERYWHERE = "test_intruders_are_turned_away_everywhere"
BACKLOG = "test_full_backlog_times_out"
WITHOUT_BREAK = {
    "tests/runtime/test_curve.py::test_server_with_wrong_key_is_refused": "the measure is libzmq's",
    f"tests/e2e/test_secured.py::{EVERYWHERE}": CLUSTER,
    "tests/e2e/test_serve.py::test_environment_keys_reach_every_process": CLUSTER,
    "tests/e2e/test_hostile.py::test_ports_survive_many_hostile_connections": CLUSTER,
    "tests/e2e/test_fuzz.py::test_ports_survive_random_frames": CLUSTER,
    "tests/e2e/test_secured.py::test_no_secret_is_written_anywhere": CLUSTER,
    "tests/kvtransfer/test_faults.py": CLUSTER,
    "tests/kvtransfer/test_tcp.py::test_changed_byte_ends_the_pair": "two measures refuse it",
    "tests/kvtransfer/test_tcp_strangers.py::test_descriptor_shortage_is_survived": "takes minutes to fail",
    "tests/kvtransfer/test_shm.py::test_sender_maps_only_its_window": "no single line",
    "tests/gateway/test_slow_clients.py::test_unread_answer_cancels_its_request": "two measures",
    "tests/gateway/test_bad_requests.py::test_bad_request_gets_its_error": "each of its rows is a measure of its own",
    "tests/gateway/test_openapi.py::test_generated_requests_never_fail_the_server": "no single measure",
    "tests/test_fuzz_cores.py::test_valid_messages_never_break_a_core": "tests/world/ breaks the cores",
    "tests/gateway/test_heavy_bodies.py::test_heavy_body_never_blocks_the_loop": "takes minutes",
    "tests/launcher/test_env_script.py::test_install_phases_are_plain_lines": "a script, which a break cannot edit",
    "tests/coordinator/test_checked.py::test_lying_worker_leaves_readable_report": "no single line",
    f"tests/kvtransfer/test_shm.py::{BACKLOG}": "hangs",
    "tests/runtime/test_hostile_links.py::test_silent_connections_count_by_key": "no single line",
    "tests/runtime/test_hostile_links.py::test_endless_message_is_cut_off": "slow",
    "tests/gateway/test_heavy_bodies.py::test_waiting_body_is_kept_as_bytes": "no single line",
    "tests/runtime/test_grammars.py::test_hostile_grammar_costs_little": "the measure is llguidance's",
    "tests/coordinator/test_victim.py": "takes minutes; tests/world/ breaks the fair queue",
    "tests/engine/test_refusals.py::test_remote_code_is_never_run": "without the option transformers asks, and gets no answer",
    "tests/gateway/test_batch_bounds.py::test_large_file_never_blocks_the_loop": "no single line",
    "tests/gateway/test_batch_bounds.py::test_odd_forms_leave_the_loop_free": "two measures, either suffices",
    "tests/kvtransfer/test_rendezvous.py::test_nccl_store_hides_line_secret": "NCCL is faked",
}
"""Tests that the page names and no break is planted for, and why."""
SAMPLE = (
    "tests/gateway/test_tenancy.py::test_removing_all_keys_stays_closed",
    "tests/runtime/test_rate_limited_log.py::test_log_flood_is_limited_and_counted",
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


def test_every_threat_names_existing_tests() -> None:
    assert not [name for name in named() if not _tests(name) or name.partition("::")[2] not in ("", *_tests(name))]


def test_named_tests_run_everywhere() -> None:
    """On a machine without a GPU as well."""
    for name in named():
        for test in [_tests(name)[name.partition("::")[2]]] if "::" in name else []:
            marks = " ".join(map(ast.unparse, test.decorator_list))
            assert "skip" not in marks, name
        text = (ROOT / name.partition("::")[0]).read_text(encoding="utf-8")
        skips = re.findall(r"^pytestmark = .*?skipif\((.*?),|importorskip\(\"(\w+)\"", text, re.MULTILINE)
        assert not any("cuda" in "".join(skip) for skip in skips) and not name.startswith("tests/gpu"), name


def test_every_paragraph_has_table_rows() -> None:
    """Each paragraph of the security page on trust has tests in the page's table."""
    prose = PAGE.partition("## Who is trusted")[2].partition("## Keys")[0]
    assert set(re.findall(r"^- \*\*(.+?)\*\*", prose, re.MULTILINE)) == set(PARAGRAPHS)
    for paragraph, tests in PARAGRAPHS.items():
        for beginning in tests.split():
            assert any(beginning in name for name in named()), (paragraph, beginning)


def test_planted_breaks_match_the_page() -> None:
    """The tests that the security page names are exactly those with a planted break and the listed exceptions."""
    assert set(named()) == set(BREAKS) | set(WITHOUT_BREAK) and not set(BREAKS) & set(WITHOUT_BREAK)
    assert len(BREAKS) > 3 * len(WITHOUT_BREAK) and set(SAMPLE) <= set(BREAKS)


@pytest.mark.parametrize("name", BREAKS)
def test_planted_break_still_applies(name: str) -> None:
    """The code that a break replaces is still written as it says."""
    planted = BREAKS[name]
    assert planted.old in (ROOT / planted.file).read_text(encoding="utf-8"), planted


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SAMPLE else [pytest.mark.long]) for name in BREAKS]
)
def test_disabled_measure_fails_its_test(name: str) -> None:
    """A security test fails if the measure that it covers is switched off."""
    command = [sys.executable, "-m", "tests.planted_breaks", name]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=500)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout[-3000:] + done.stderr[-1000:]
    assert "has no '" not in done.stdout, done.stdout[-3000:]
