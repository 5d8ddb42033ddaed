"""Breaks of the measures in SECURITY.md: each switches one off, by an edit of the source as it is imported, upon which the test
that the table names must fail. `tests/test_security.py` runs them.

    python -m tests.planted_breaks TEST        runs one test with its break
"""

import importlib.machinery
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Break(NamedTuple):
    file: str
    old: str
    new: str


def plant(test: str) -> None:
    """The break of this test, in this process, which has not imported the file yet; also for those who read it as text."""
    planted, loader = BREAKS[test], importlib.machinery.SourceFileLoader
    path, get_code, read_text = ROOT / planted.file, loader.get_code, Path.read_text

    def edited(self: Path, *how: Any, **more: Any) -> str:
        text = read_text(self, *how, **more)
        if self != path:
            return text
        assert planted.old in text, f"{planted.file} has no {planted.old!r}"
        return text.replace(planted.old, planted.new)

    def code(self: Any, fullname: str) -> Any:
        if self.path != str(path):
            return get_code(self, fullname)
        return compile(edited(path, "utf-8"), path, "exec")

    loader.get_code = code  # type: ignore[method-assign]
    Path.read_text = edited  # type: ignore[method-assign]


def run(test: str) -> int:
    """pytest's exit status for this test, with its break in this process and in those that it starts."""
    import pytest

    plant(test)
    with tempfile.TemporaryDirectory() as folder:
        site = (
            f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom tests.planted_breaks import plant\nplant({test!r})\n"
        )
        (Path(folder) / "sitecustomize.py").write_text(site)
        os.environ["PYTHONPATH"] = folder
        return int(pytest.main([test, "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]))


HABITS = "tests/gateway/test_client_habits.py::"
CURVE, LINK, TCP = "tests/runtime/test_curve.py::", "tests/runtime/test_link.py::", "tests/kvtransfer/test_tcp.py::"
STRANGERS, RECORDS = "tests/kvtransfer/test_tcp_strangers.py::", "tests/kvtransfer/test_tcp_records.py::"
TENANCY, SLOW, REACH = (
    "tests/gateway/test_tenancy.py::",
    "tests/gateway/test_slow_clients.py::",
    "tests/gateway/test_reach.py::",
)
JWT = "tests/gateway/test_jwt.py::"
TLS = "tests/runtime/test_tls.py::"
METRICS, TENANTS = "tests/runtime/test_metrics_server.py::", "tests/runtime/test_tenants_file.py::"
TRACES = "tests/gateway/test_traces.py::"
DASHBOARD = "tests/coordinator/test_dashboard.py::"
RESPONSES, REPLAY = "tests/gateway/test_responses.py::", "tests/coordinator/test_replay.py::"
BATCHES = "tests/gateway/test_batch_bounds.py::"
HASHES, NOTIFY = "tests/coordinator/test_hash_key.py::", "tests/launcher/test_notify_listener.py::"
CLEAR, CALLS = "tests/kvtransfer/test_encryption_options.py::", "tests/test_dangerous_calls.py::"

BREAKS: Final[dict[str, Break]] = {
    JWT + "test_bad_token_is_refused": Break(
        "gateway/jwt_tokens.py", '"enforce_minimum_key_length": True', '"verify_signature": False'
    ),
    JWT + "test_unknown_keys_never_flood_the_issuer": Break(
        "gateway/jwt_tenants.py", "clock.now() < self._read_at + UNKNOWN_KEY_S", "False"
    ),
    JWT + "test_tokens_and_keys_work_together": Break("gateway/jwt_tenants.py", "str(error), code", "token, code"),
    TRACES + "test_bad_traceparent_is_ignored": Break(
        "gateway/tracing/context.py",
        "_TRACEPARENT.fullmatch(values[0]) if len(values) == 1 else None",
        "_TRACEPARENT.search(values[0]) if values else None",
    ),
    TRACES + "test_hanging_collector_delays_nothing": Break(
        "gateway/tracing/export.py",
        "BatchSpanProcessor(exporter, max_queue_size=QUEUED_MAX)",
        'getattr(__import__("opentelemetry.sdk.trace.export", fromlist=["export"]), "SimpleSpanProcessor")(exporter)',
    ),
    "tests/coordinator/test_ledger.py::test_locked_ledger_is_waited_for": Break(
        "coordinator/accounting/sqlite_store.py",
        "(StorageUnavailable if _may_pass(error) else StorageError)",
        "StorageError",
    ),
    "tests/coordinator/test_leader_lock.py::test_locked_ledger_delays_the_start": Break(
        "coordinator/accounting/sqlite_store.py",
        "(StorageUnavailable if is_passing(error) else StorageError)",
        "StorageError",
    ),
    "tests/runtime/test_database_option.py::test_bad_database_option_is_refused": Break(
        "runtime/settings/addresses.py", "if parts.password or any(", "if any("
    ),
    "tests/coordinator/test_policy.py::test_policy_without_tenants_is_refused": Break(
        "coordinator/policy_versions.py", "if old and not old & new:", "if False:"
    ),
    "tests/coordinator/test_ledger.py::test_refusals_pass_what_waits": Break(
        "coordinator/outbox.py", "return isinstance(send.message, _APART) and (", "return False and ("
    ),
    "tests/coordinator/test_sessions.py::test_session_end_reaches_its_workers": Break(
        "scheduler/kv_admission/sessions.py",
        "named = self._by_name.get((tenant, name), {})",
        "named = next((found for (_, other), found in self._by_name.items() if other == name), {})",
    ),
    "tests/coordinator/test_sessions.py::test_leases_delay_no_request": Break(
        "engine/kv/allocator.py",
        "return min(left, len(self.pool.free) + len(self._prefixes.idle))",
        "return min(left, len(self.pool.free))",
    ),
    "tests/gateway/test_heavy_bodies.py::test_every_request_field_is_bounded": Break(
        "gateway/openai/request_types.py", "    arguments: Text", "    arguments: str"
    ),
    "tests/test_regular_expressions.py::test_expressions_take_linear_time": Break(
        "gateway/structured/user_grammar.py", r"^[ \t\r\f\v]*start[ \t\r\f\v]*:", r"^\s*start\s*:"
    ),
    "tests/gateway/test_schemas.py::test_answers_are_checked_against_schema": Break(
        "gateway/structured/compile_process.py", "        validator.validate(value)", "        pass"
    ),
    "tests/coordinator/test_checked.py::test_bug_in_check_ends_link": Break(
        "coordinator/core.py",
        "        except Exception as error:  # noqa: BLE001 -- nothing",
        "        except OSError as error:  # nothing",
    ),
    "tests/coordinator/test_checked.py::test_empty_model_is_forgotten": Break(
        "coordinator/recovery/processes.py", "if since + EMPTY_POOL_S_MAX > state.now:", "if True:"
    ),
    "tests/coordinator/test_checked.py::test_retry_may_not_change_request": Break(
        "coordinator/core.py",
        "        return ProtocolViolation(incarnation, fault) if fault else None",
        "        return None",
    ),
    "tests/coordinator/test_ledger.py::test_odd_row_is_skipped_with_warning": Break(
        "coordinator/accounting/past.py", "            except msgspec.ValidationError:", "            except OSError:"
    ),
    "tests/coordinator/test_ledger.py::test_ledger_files_are_private": Break(
        "runtime/storage/private_file.py", "each.chmod(0o600)", "each.chmod(0o644)"
    ),
    BATCHES + "test_files_and_batches_are_tenant_private": Break(
        "gateway/batches/files.py", 'AND tenant = ? AND is_ready", (file_id, tenant)', 'AND is_ready", (file_id,)'
    ),
    BATCHES + "test_tenant_storage_is_bounded": Break(
        "gateway/batches/files.py", "if held_bytes(db, tenant) + more > most:", "if False:"
    ),
    BATCHES + "test_store_files_are_private": Break(
        "runtime/storage/private_file.py", "each.chmod(0o600)", "each.chmod(0o644)"
    ),
    "tests/engine/test_cpu_kernels.py::test_fallback_kernel_folder_is_private": Break(
        "engine/cpu/library.py", "folder.mkdir(mode=0o700,", "folder.mkdir(mode=0o755,"
    ),
    "tests/gateway/test_grammar_checker.py::test_killed_grammar_delays_its_organisation": Break(
        "gateway/structured/checker.py", "PENALTY: Final = 10.0", "PENALTY: Final = 0.0"
    ),
    "tests/gateway/test_grammar_checker.py::test_crash_is_not_the_clients_fault": Break(
        "gateway/structured/checker.py", "if status in _AT_A_LIMIT:", "if True:"
    ),
    "tests/gateway/test_schemas.py::test_reference_into_a_value_is_refused": Break(
        "gateway/structured/schema.py", 'return kind == "value"', "return False"
    ),
    HABITS + "test_metrics_are_on_the_apis_port": Break(
        "gateway/openai/routes_info.py", "len(gateway.keys.tenants.policies) > 1", "False"
    ),
    HABITS + "test_compressed_body_is_refused_by_name": Break(
        "gateway/http/body.py", 'not in ("", "identity")', "is None"
    ),
    "tests/gateway/test_grammar_checker.py::test_verdicts_are_kept_per_cache_group": Break(
        "gateway/structured/checker.py", "key = (cache_group, ", 'key = ("", '
    ),
    "tests/launcher/test_models.py::test_hub_revision_can_be_named": Break(
        "launcher/models/hub.py", "revision=revision or None,", "revision=None,"
    ),
    "tests/runtime/test_hostile_links.py::test_long_message_loses_no_peer": Break(
        "runtime/link/server.py", "if self._socket.is_draining:", "if False:"
    ),
    "tests/gateway/test_slow_clients.py::test_hostile_cookies_cost_nothing": Break(
        "gateway/openai/call.py", 'if self.needs_key else ""', 'if self.needs_key else "".join(request.cookies)'
    ),
    "tests/gateway/test_batch_bounds.py::test_locked_store_refuses_soon": Break(
        "gateway/batches/sqlite_store.py", "clock.now() + SOON_S)", "None)"
    ),
    "tests/gateway/test_batches.py::test_clock_jump_deletes_and_expires_nothing": Break(
        "runtime/process/clock.py", "SETTLE_S: Final = 900.0", "SETTLE_S: Final = 0.0"
    ),
    "tests/runtime/test_background_writer.py::test_full_log_pipe_blocks_nothing": Break(
        "runtime/process/log.py", "self._writer.put(self.format(record)", "_write(self.format(record)"
    ),
    "tests/launcher/test_childlog.py::test_hanging_disk_only_delays_the_file": Break(
        "runtime/storage/background_writer.py", "self._waiting_bytes > WAITING_BYTES_MAX", "False"
    ),
    "tests/runtime/test_hostile_links.py::test_excess_frames_are_dropped": Break(
        "runtime/process/loop_socket.py", "frames_max: int = MAX_FRAMES + 2", "frames_max: int = 1 << 30"
    ),
    CURVE + "test_refused_connections_are_counted": Break(
        "runtime/link/curve.py", "if self._keys.listed(key) is not None:", "if True:"
    ),
    CURVE + "test_routing_id_is_no_identity": Break(
        "runtime/link/server.py", "elif peer.user_id != user_id:", "elif False:"
    ),
    CURVE + "test_incarnation_is_no_identity": Break(
        "runtime/link/curve.py", "and peer.user_id != user_id for peer", "and False for peer"
    ),
    CURVE + "test_keyless_bind_needs_loopback": Break(
        "runtime/link/keys.py", "if not (is_loopback(address) or insecure):", "if False:"
    ),
    CURVE + "test_keys_are_rotated_on_sighup": Break(
        "runtime/link/server.py", "if not self._gate.is_listed(peer.user_id):", "if False:"
    ),
    CURVE + "test_removed_server_key_ends_its_links": Break(
        "runtime/link/client.py", "self._server_key not in keys.of(self._to)", "False"
    ),
    CURVE + "test_only_own_secret_is_read": Break(
        "runtime/link/keys.py", 'return f"Keys({str(self.folder)!r}, {self.name!r})"', "return str(self.secret)"
    ),
    CURVE + "test_faulty_key_folder_is_refused": Break(
        "runtime/link/keys.py", "if (mode := path.stat().st_mode) & _OTHERS_MAY:", "if (mode := 0):"
    ),
    CURVE + "test_server_key_is_found_by_trying": Break(
        "runtime/link/curve.py", "theirs[attempt % len(theirs)]", "theirs[0]"
    ),
    CURVE + "test_key_files_are_private_and_kept": Break(
        "runtime/link/keys.py", "os.O_NOFOLLOW, 0o600)", "os.O_NOFOLLOW, 0o644)"
    ),
    "tests/runtime/test_driver.py::test_role_memory_is_private": Break(
        "runtime/process/driver.py", "prctl(_PR_SET_DUMPABLE, 0,", "prctl(_PR_SET_DUMPABLE, 1,"
    ),
    "tests/runtime/test_driver.py::test_role_raises_open_file_limit": Break(
        "runtime/process/driver.py", "    raise_descriptor_limit()\n", ""
    ),
    NOTIFY + "test_only_child_processes_are_heard": Break(
        "launcher/local/notify_listener.py", "if sender == pid:", "if True:"
    ),
    NOTIFY + "test_other_users_are_not_heard": Break(
        "launcher/local/notify_listener.py", "if uid != os.getuid():", "if False:"
    ),
    "tests/proto/test_fuzz.py::test_almost_messages_are_refused": Break(
        "proto/codec.py", "    check_frames(frames)\n", ""
    ),
    "tests/coordinator/test_flips.py::test_flips_and_policy_need_operator_tool": Break(
        "coordinator/core.py", "drain.FlipRequest: Handler(_OBSERVER,", "drain.FlipRequest: Handler(tuple(Role),"
    ),
    LINK + "test_protocol_error_ends_one_link_only": Break(
        "runtime/link/server.py", 'self._turn_out(routing_id, peer, f"protocol error: {error}")', "pass"
    ),
    "tests/runtime/test_link_versions.py::test_other_versions_are_refused": Break(
        "proto/versions.py", "if lowest <= theirs <= highest:", "if True:"
    ),
    "tests/proto/test_versions.py::test_mutated_future_frames_are_refused": Break(
        "proto/codec.py", "(msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError)", "(KeyError,)"
    ),
    LINK + "test_stalled_handshake_is_closed": Break(
        "runtime/process/zmq_sockets.py", "socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)", "pass"
    ),
    "tests/runtime/test_rate_limited_log.py::test_log_flood_is_limited_and_counted": Break(
        "runtime/process/rate_limited_log.py", "if self._tokens < 1:", "if False:"
    ),
    "tests/kvtransfer/test_driver_refusals.py::test_bad_pools_and_hosts_are_refused": Break(
        "kvtransfer/receiver.py", 'if listen_host in ("", "*", "0.0.0.0", "::"):', "if False:"
    ),
    STRANGERS + "test_silent_stranger_is_closed": Break(
        "kvtransfer/transports/tcp/listener.py", "(now + HELLO_TIMEOUT_S, bytearray())", "(now + 1e9, bytearray())"
    ),
    TCP + "test_keyless_listener_gets_nothing": Break(
        "kvtransfer/transports/tcp/handshake.py",
        'if not hmac.compare_digest(proof, _proof(key, b"receiver", token, sender_nonce, nonce)):',
        "if False:",
    ),
    TCP + "test_overheard_hello_is_refused": Break(
        "kvtransfer/transports/tcp/listener.py",
        "self._expected.pop(hello.token, None)",
        "self._expected.get(hello.token)",
    ),
    TCP + "test_encrypted_kv_cannot_be_read": Break(
        "kvtransfer/receiver.py", "self._settings.encrypt or message.encrypt", "False"
    ),
    RECORDS + "test_repeated_record_is_refused": Break(
        "kvtransfer/transports/tcp/stream.py", "self._received += 1", "pass"
    ),
    RECORDS + "test_unexpected_record_ends_connection": Break(
        "kvtransfer/transports/tcp/stream.py",
        "if _HEADER.unpack(self._header) != (sequence, number, len(target)):",
        "if False:",
    ),
    STRANGERS + "test_strangers_cost_no_transfer": Break(
        "kvtransfer/transports/tcp/listener.py", "self._on_stranger(reason)", "pass"
    ),
    "tests/kvtransfer/test_shm.py::test_another_user_is_refused": Break(
        "kvtransfer/transports/unix_socket.py", "return bool(uid == os.geteuid())", "return True"
    ),
    "tests/kvtransfer/test_digests.py::test_changed_kv_is_refused": Break(
        "kvtransfer/memory/digests.py",
        "if found := self.known(block_ids):",
        "self.make(block_ids)\n        if found := self.known(block_ids):",
    ),
    TCP + "test_either_end_can_demand_encryption": Break(
        "kvtransfer/receiver.py", "self._settings.encrypt or message.encrypt", "self._settings.encrypt"
    ),
    TCP + "test_cleartext_transport_is_refused": Break(
        "kvtransfer/transports/registry.py", "if TRANSPORTS[name].confidential)", ")"
    ),
    CLEAR + "test_keys_forbid_unencrypted_transports": Break(
        "runtime/settings/workers.py", ' or (self.encrypts_transfers and self.kv_transport == "auto")', ""
    ),
    CLEAR + "test_start_logs_unencrypted_transports": Break("worker/process.py", "    if clear:", "    if False:"),
    TENANCY + "test_open_keyless_port_is_warned_about": Break(
        "gateway/main.py", "if not (gateway.keys.needed or", "if not (True or"
    ),
    "tests/engine/test_cpu_kernels.py::test_foreign_kernels_are_not_run": Break(
        "engine/cpu/library.py", "and not path.is_symlink()", ""
    ),
    TENANCY + "test_key_is_never_shown": Break(
        "gateway/openai/call.py", '"The API key is not valid."', 'f"The API key {key} is not valid."'
    ),
    TENANCY + "test_keys_are_never_compared_directly": Break(
        "gateway/tenancy.py", "return hashlib.blake2b(digest, key=self._secret).digest()", "return digest"
    ),
    TENANCY + "test_removing_all_keys_stays_closed": Break(
        "gateway/tenancy.py", "self.needed = self.needed or bool", "self.needed = bool"
    ),
    TENANTS + "test_broken_file_ends_no_process": Break(
        "runtime/tenancy/tenants.py", "except (ValueError, RecursionError)", "except tomllib.TOMLDecodeError"
    ),
    TENANTS + "test_misplaced_key_is_not_logged": Break(
        "runtime/tenancy/faults.py", 'else f"a {given}"', "else repr(value)"
    ),
    "tests/deploy/test_kubernetes.py::test_api_key_is_required": Break(
        "deploy/kubernetes.yaml", "CROSSDOCK_TENANTS: /tenants/tenants.toml", 'CROSSDOCK_TENANTS: ""'
    ),
    REACH + "test_only_trusted_proxy_names_the_client": Break(
        "gateway/http/reach.py",
        "if client is None or not any(client in proxy for proxy in self._proxies):",
        "if False:",
    ),
    REACH + "test_foreign_origins_are_refused": Break("gateway/http/reach.py", "or _is_own(origin, asked)", "or True"),
    REACH + "test_keyless_gateway_checks_host_names": Break(
        "gateway/http/reach.py", "if not (self._any_host or", "if not (True or"
    ),
    METRICS + "test_foreign_host_header_is_refused": Break(
        "runtime/metrics/server.py", "allowed = (not self._loopback_only or", "allowed = (True or"
    ),
    TLS + "test_http_is_served_over_tls": Break(
        "gateway/http/server.py", "if self.tls is None or sockets is None:", "if True:"
    ),
    TLS + "test_client_without_certificate_is_refused": Break(
        "runtime/link/tls.py", "ssl.CERT_REQUIRED if clients_need_certificate else ", ""
    ),
    TLS + "test_metrics_need_a_certificate": Break(
        "runtime/metrics/server.py", 'return scope["path"] in PROBES or', "return True or"
    ),
    TLS + "test_silent_strangers_keep_nobody_out": Break(
        "runtime/link/tls.py", "if len(self._handshakes) > HANDSHAKES_MAX:", "if False:"
    ),
    TLS + "test_changed_certificate_is_served": Break("runtime/link/tls.py", "if stamps == self._seen:", "if True:"),
    CALLS + "test_no_pattern_ends_with_a_dollar": Break("proto/versions.py", "{1,32}\\Z", "{1,32}$"),
    CALLS + "test_transformers_never_runs_model_code": Break("worker/grammars.py", ", trust_remote_code=False", ""),
    "tests/gateway/test_request_ids.py": Break(
        "gateway/http/request_log.py", "return value if _CLIENT_ID.fullmatch(value) else", "return value if value else"
    ),
    "tests/runtime/test_log.py::test_tracebacks_hide_variable_values": Break(
        "runtime/process/log.py", ", exception_formatter=structlog.dev.plain_traceback", ""
    ),
    REPLAY + "test_hashes_of_keys_are_not_written": Break(
        "coordinator/event_log/format.py", "keys={}, policies=policies", "policies=policies"
    ),
    REPLAY + "test_grammars_are_not_written": Break(
        "coordinator/event_log/format.py", 'structs.replace(message.sampling, grammar="")', "message.sampling"
    ),
    SLOW + "test_slow_senders_are_cut_off": Break(
        "gateway/http/server.py", "self._timer = self.loop.call_later(self.timeout_s, self._too_slow)", "pass"
    ),
    SLOW + "test_oversized_or_invalid_head_is_refused": Break(
        "gateway/http/server.py", "if size > HEADER_BYTES_MAX or len(self.headers) > HEADERS_MAX:", "if False:"
    ),
    SLOW + "test_connections_are_bounded": Break(
        "gateway/http/server.py", "if len(self.connections) > self.connections_max:", "if False:"
    ),
    SLOW + "test_idle_connections_make_room": Break(
        "gateway/http/server.py", "self.without_request.popitem(last=False)", "self.without_request.popitem()"
    ),
    DASHBOARD + "test_orders_need_the_admin_key": Break(
        "coordinator/dashboard/site.py", 'hmac.compare_digest(given[0], b"Bearer " + key)', "True"
    ),
    DASHBOARD + "test_pages_allow_no_foreign_content": Break(
        "coordinator/dashboard/site.py", "frame-ancestors 'none'", "frame-ancestors *"
    ),
    DASHBOARD + "test_viewers_are_bounded": Break(
        "coordinator/dashboard/site.py", "if self._viewers >= VIEWERS_MAX:", "if False:"
    ),
    METRICS + "test_excess_connection_replaces_oldest": Break(
        "runtime/metrics/http.py", "self.oldest_first.popitem(last=False)", "self.oldest_first.popitem()"
    ),
    METRICS + "test_slow_connections_are_cut_off": Break(
        "runtime/metrics/http.py", "self.loop.call_later(EXCHANGE_S,", "self.loop.call_later(1e6,"
    ),
    METRICS + "test_metrics_address_is_checked": Break(
        "runtime/settings/addresses.py", 'full = f"127.0.0.1:{value}"', 'full = f"0.0.0.0:{value}"'
    ),
    "tests/gateway/test_served.py::test_too_large_body_is_refused": Break(
        "gateway/http/body.py", "if held + len(part) > self.body_bytes_max:", "if False:"
    ),
    "tests/gateway/test_tenant_slots.py": Break(
        "gateway/shares.py", "if held + amount > min(room, self._tenant_max):", "if amount > room:"
    ),
    "tests/gateway/test_fair_queue.py": Break("gateway/shares.py", "if organisation.credit >= job.cost:", "if True:"),
    "tests/gateway/test_templates.py::test_template_output_is_bounded": Break(
        "gateway/text/tokenizer.py", "if len(text) > _TEMPLATE_CHARS_MAX:", "if False:"
    ),
    "tests/gateway/test_templates.py::test_bad_template_is_a_template_error": Break(
        "gateway/text/tokenizer.py", "except (JinjaError, *_OF_TEMPLATES)", "except KeyboardInterrupt"
    ),
    "tests/engine/test_refusals.py::test_missing_or_broken_folder_is_refused": Break(
        "engine/model/loader.py", "has no safetensors weights; other", "has other"
    ),
    RESPONSES + "test_other_tenants_cannot_read_responses": Break(
        "gateway/response_store.py",
        "self._kept.get((tenant, response_id))",
        "next((kept for key, kept in self._kept.items() if key[1] == response_id), None)",
    ),
    RESPONSES + "test_kept_responses_are_bounded": Break(
        "gateway/response_store.py", "while not self.share.take(tenant, kept.cost_bytes):", "while False:"
    ),
    "tests/gateway/test_block_hashes.py": Break(
        "gateway/text/block_hashes.py", 'f"{block_size}:{cache_group}"', 'f"{block_size}"'
    ),
    "tests/workers/test_ended.py::test_other_tenant_finds_no_answer": Break(
        "gateway/text/block_hashes.py", 'f"{block_size}:{cache_group}"', 'f"{block_size}"'
    ),
    "tests/workers/test_ended.py::test_untrusted_answer_names_are_ignored": Break(
        "decode_worker/ended.py", "kept.gateway_incarnation != gateway_incarnation", "False"
    ),
    HASHES + "test_gateways_share_lasting_hash_key": Break(
        "coordinator/main.py", "self.hash_key or peer.hello.hash_key or secrets", "self.hash_key or secrets"
    ),
    HASHES + "test_hashes_reveal_nothing_without_key": Break(
        "gateway/text/block_hashes.py", "digest_size=32, key=cluster_key,", "digest_size=32,"
    ),
}
"""By the name of the test in SECURITY.md."""

if __name__ == "__main__":
    sys.exit(run(sys.argv[1]))
