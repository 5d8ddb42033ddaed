"""What `crossdock status` and the metrics say of processes that are down or were restarted."""

from pathlib import Path

from prometheus_client import generate_latest

from launcher.local import process_states, supervisor_metrics
from launcher.local.process_states import WINDOW_S, ProcessState, ProcessStates, lines
from runtime.process import clock

NOW = 1_000_000.0
FINE = ProcessState("gateway-0", 5, True, 3, (NOW - 2 * WINDOW_S,), None, "was killed by SIGKILL", -9)
DOWN = ProcessState("decode-0", 0, False, 7, (NOW - 60, NOW - 5), NOW + 12.4, "ended with status 1", 1)
BACK = ProcessState("prefill-0", 6, True, 1, (NOW - 3,), None, "was killed by SIGSEGV", -11)


def test_down_and_restarted_processes_are_listed() -> None:
    """Processes that are down or were restarted lately are listed with the reason."""
    assert lines([FINE, DOWN, BACK], NOW) == [
        "decode-0: restarting in 12 s; it ended with status 1; 2 restarts in the last 10 min",
        "prefill-0: 1 restart in the last 10 min, the last after it was killed by SIGSEGV",
    ]


def test_state_file_round_trips(tmp_path: Path) -> None:
    """Written states are read back; a missing, broken or unwritable file is harmless."""
    assert process_states.read(tmp_path) == ProcessStates()
    states = ProcessStates((FINE, DOWN, BACK), "127.0.0.1:9404")
    process_states.write(tmp_path, states)
    assert process_states.read(tmp_path) == states
    (tmp_path / process_states.FILE).write_text("half")
    assert process_states.read(tmp_path) == ProcessStates()
    process_states.write(tmp_path / "gone", states)  # nothing is raised


def test_supervisor_metrics_match_the_states() -> None:
    """The supervisor's metrics give the same facts as the process states."""
    soon = ProcessState("decode-0", 0, False, 7, (), clock.unix_time() + 30, "ended with status 1", 1)
    text = generate_latest(supervisor_metrics.registry_of(lambda: [soon, BACK])).decode()
    for line in (
        'crossdock_supervisor_process_up{process="decode-0"} 0.0',
        'crossdock_supervisor_process_up{process="prefill-0"} 1.0',
        'crossdock_supervisor_process_ready{process="prefill-0"} 1.0',
        'crossdock_supervisor_restarts_total{process="decode-0"} 7.0',
        'crossdock_supervisor_last_exit_status{process="decode-0"} 1.0',
        'crossdock_supervisor_last_exit_status{process="prefill-0"} -11.0',
    ):
        assert line in text, text
    assert 'crossdock_supervisor_next_start_seconds{process="decode-0"}' in text
    assert 'crossdock_supervisor_next_start_seconds{process="prefill-0"}' not in text
