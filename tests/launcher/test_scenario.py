"""The file of `crossdock simulate load`: what it may say, what becomes of it, and what is wrong with it."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lab.cluster.workload import Goal, PlannedFailure, Workload
from lab.commands.simulate import read
from runtime.settings.options import SettingsError

WORKERS = '[[workers]]\nrole = "prefill"\n[[workers]]\nrole = "decode"\n'
TRAFFIC = "[[traffic]]\n"


def made(folder: Path, text: str, seed: int = -1) -> Workload:
    (folder / "scenario.toml").write_text(text)
    return read(str(folder / "scenario.toml"), seed)


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(SettingsError) as error:
        made(folder, text)
    name = f"SCENARIO: {folder}/scenario.toml: "
    lines = str(error.value).splitlines()
    assert all(line.startswith(name) for line in lines), lines
    return "\n".join(line.removeprefix(name) for line in lines)


def traffic(folder: Path, keys: str) -> Workload:
    return made(folder, f"duration_s = 100.0\n{WORKERS}{TRAFFIC}{keys}")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("colour = 1\n" + WORKERS + TRAFFIC, "colour"),
        (WORKERS + "speed = 2\n" + TRAFFIC, "workers.1.speed"),
        (WORKERS + TRAFFIC + "rate = 2\n", "traffic.0.rate"),
        (WORKERS + TRAFFIC + "[[failures]]\nat_s = 1\nkind = 'lost'\nworker = 'prefill-0'\nwhy = ''", "failures.0.why"),
        (WORKERS + TRAFFIC + "[coordinator]\nsteps = 1", "coordinator.steps"),
        (WORKERS + TRAFFIC + "[coordinator]\nusage_db = 'x'", "coordinator.usage_db"),
        (WORKERS + TRAFFIC + "[tenants.acme]\nwait = 1", "tenants.acme.wait"),
        (WORKERS + TRAFFIC + "[priority_classes.fast]\nweight = 1\nwait = 1", "priority_classes.fast.wait"),
    ],
)
def test_unknown_key_is_refused_by_path(tmp_path: Path, text: str, path: str) -> None:
    """An unknown key is refused in one line that begins with its path."""
    said = refusal(tmp_path, text)
    assert said.startswith(f"{path}: there is no such ") and "\n" not in said, said


HUGE = "9" * 400
NUMBERS: dict[str, str] = {
    "duration_s": "0 -1 86401 nan inf '1' true",
    "settle_s": "-1 86401 nan",
    "seed": f"-1 1.5 {HUGE} true",
    "hand_over_ms": "[1] [1,2,3] [-1,2] [2,1] [nan,1] 3",
    "workers.count": "0 -1 4097 1.5 true '1'",
    "workers.prefill_tokens_per_s": "0 -1 1e10 nan inf",
    "workers.prefill_step_ms": "-1 nan 3600001",
    "workers.step_tokens": "0 65537 1.0",
    "workers.kv_tokens": "0 63 4294967297",
    "workers.sequences_max": "0 65537",
    "workers.block_size": "0 4097",
    "workers.role": "'gateway' 1 ''",
    "traffic.rate_per_s": "0 -1 nan inf 1e7 '3'",
    "traffic.from_s": "-1 nan 86401",
    "traffic.until_s": "0 -1 nan 86401",
    "traffic.prompt_tokens": "0 -1 '0' 'uniform:9-3' 'x' '' 1048577 1.5 'lognormal:0,1' 'lognormal:5,9' [1]",
    "traffic.output_tokens": "0 'uniform:0-3'",
    "traffic.max_tokens": "0 -1 1048577 1.5",
    "traffic.deadline_ms": "-1 nan 3600001",
    "traffic.ttft_ms": "-1 nan",
    "traffic.tpot_ms": "-1 nan",
    "traffic.users": "-1 10001 0.5",
    "traffic.retries": "-1 1001 0.5",
    "traffic.arrivals": "'bursts' 3",
    "traffic.name": "'\\u0007' 3",
    "coordinator.kv_overcommit": "0.5 1025.0 nan '2'",
    "coordinator.queue_requests_max": "0 -1 1.5 true",
}


@pytest.mark.parametrize(
    ("path", "value"), [(path, value) for path, text in NUMBERS.items() for value in text.split(" ")]
)
def test_bad_value_is_refused_before_simulation(tmp_path: Path, path: str, value: str) -> None:
    """A bad value of any key is refused before anything is simulated."""
    table, _, key = path.rpartition(".")
    value = value.replace("'", '"')
    line = f"{key} = {value}\n" if table == "workers" else ""
    text = WORKERS.replace('role = "prefill"\n', f'role = "prefill"\n{line}')
    if path == "workers.role":
        text = f"[[workers]]\nrole = {value}\n"
    text = f"{key} = {value}\n{text}" if not table else text
    text += TRAFFIC + (f"{key} = {value}\n" if table == "traffic" else "")
    text += f"[coordinator]\n{key} = {value}\n" if table == "coordinator" else ""
    said = refusal(tmp_path, text)
    where = {"workers": "workers.0.", "traffic": "traffic.0.", "coordinator": "coordinator.", "": ""}[table] + key
    assert said.splitlines()[0].startswith(where) or key in said, said
    assert "is not valid" not in said, said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "workers: is needed\ntraffic: is needed"),
        (WORKERS, "traffic: is needed"),
        ("workers = []\ntraffic = []", "workers: must not be empty\ntraffic: must not be empty"),
        ("workers = 3\n" + TRAFFIC, "workers: must be a list, not 3"),
        ("[[workers]]\n" + TRAFFIC, "workers.0.role: is needed"),
        (WORKERS + "[traffic]\nrate_per_s = 1", "traffic: must be a list, not a table"),
        (WORKERS + TRAFFIC + "prompt_tokens = 512.0",
         "traffic.0.prompt_tokens: is not a length like 128, uniform:64-512 or lognormal:200,0.8"),
        (WORKERS.replace("decode", "prefill") + TRAFFIC, "workers: there is no decode worker"),
        (WORKERS.replace("prefill", "decode") + TRAFFIC, "workers: there is no prefill worker"),
        (WORKERS + "decode_step_ms = 1\nprefill_step_ms = 1\n" + TRAFFIC,
         "workers.1: prefill_step_ms has no effect with role = 'decode'"),
        (WORKERS + "kv_tokens = 100\nblock_size = 64\n" + TRAFFIC,
         "workers.1: kv_tokens = 100 is less than four blocks of 64 tokens"),
        (WORKERS + "count = 4096\n" + TRAFFIC, "workers: more than 4,096"),
        (WORKERS + "kv_tokens = 4294967296\n" + TRAFFIC,
         "workers: more than 16,777,216 KV blocks; give them fewer kv_tokens or larger blocks"),
        (WORKERS + TRAFFIC + "cv = 2.0", "traffic.0: cv has no effect with arrivals = 'poisson'"),
        (WORKERS + TRAFFIC + 'arrivals = "closed"\nrate_per_s = 1',
         "traffic.0: rate_per_s has no effect with arrivals = 'closed'"),
        (WORKERS + TRAFFIC + 'arrivals = "trace"', "traffic.0: arrivals = 'trace' needs a file in trace"),
        (WORKERS + TRAFFIC + 'arrivals = "trace"\ntrace = "none.csv"',
         "traffic.0.trace: cannot read {folder}/none.csv: No such file or directory"),
        (WORKERS + TRAFFIC + "from_s = 5\nuntil_s = 5", "traffic.0: until_s = 5 is not after from_s = 5"),
        (WORKERS + TRAFFIC + "from_s = 60", "traffic.0.from_s: is not before the scenario's end, 60"),
        (WORKERS + TRAFFIC * 2 + "rate_per_s = 1e6", "traffic: about 60,000,060 requests, more than 1,000,000"),
        (WORKERS + (TRAFFIC + 'arrivals = "closed"\nclients = 60_000\n') * 2,
         "traffic: 120,000 clients, more than 100,000"),
        (WORKERS + TRAFFIC + 'tenant = "b"\n[tenants.acme]', "traffic.0.tenant: there is no 'b' in [tenants]"),
        (WORKERS + TRAFFIC + 'users = 3', "traffic.0.users: there is no organisation 'default' in [tenants]"),
        (WORKERS + TRAFFIC + 'priority_class = "x"',
         "traffic.0.priority_class: tenant 'default' may use batch, interactive, standard, not 'x'"),
        (WORKERS + TRAFFIC + '[[failures]]\nat_s = 1\nkind = "lost"\nworker = "decode-1"',
         "failures.0.worker: there is no 'decode-1'; there are prefill-0, decode-0"),
        (WORKERS + TRAFFIC + '[[failures]]\nat_s = 1\nkind = "hung"\nworker = "decode-0"',
         "failures.0.kind: must be 'slow', 'failing', 'lost', 'drained' or 'flipped'"),
        (WORKERS + TRAFFIC + '[[failures]]\nat_s = 1\nkind = "flipped"\nworker = "decode-0"',
         "failures.0: kind = 'flipped' needs a role"),
        (WORKERS.replace("decode", "mixed") + TRAFFIC +
         '[[failures]]\nat_s = 1\nkind = "flipped"\nrole = "decode"\nworker = "mixed-0"',
         "failures.0.worker: mixed-0 is a mixed worker, which cannot be flipped here"),
        (WORKERS + TRAFFIC + '[[failures]]\nat_s = 1\nkind = "lost"\nworker = "decode-0"\nfactor = 2',
         "failures.0: factor has no effect with kind = 'lost'"),
        ("a = [\n", "is not TOML: Invalid value (at end of document)"),
        (f"seed = {'9' * 5000}", "is not TOML: Exceeds the limit"),
        ("x = " + "[" * 5000, "is not TOML: "),
        ("# " + "x" * (1 << 20), "is larger than 1048576 bytes"),
    ],
)  # fmt: skip
def test_contradictory_keys_are_named(tmp_path: Path, text: str, said: str) -> None:
    """Keys that do not fit together are refused with a message that names them."""
    assert refusal(tmp_path, text).startswith(said.format(folder=tmp_path))


def test_missing_scenario_file_is_refused(tmp_path: Path) -> None:
    """A scenario file that is missing, a folder or too large is refused."""
    for path, why in ((tmp_path / "none", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(SettingsError, match=why):
            read(str(path))
    with pytest.raises(SettingsError, match="is larger than"):
        read("/dev/zero")


def test_binary_scenario_file_is_refused(tmp_path: Path) -> None:
    """A scenario file that is not text is refused."""
    (tmp_path / "scenario.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="is not TOML"):
        read(str(tmp_path / "scenario.toml"))


def gaps(workload: Workload) -> list[float]:
    times = [at_s for at_s, _ in workload.arrivals]
    assert times == sorted(times) and times[0] >= 0 and times[-1] < workload.duration_s
    return [later - at_s for at_s, later in pairwise(times)]


def variation(values: list[float]) -> float:
    """Coefficient of variation."""
    mean = sum(values) / len(values)
    return float((sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5 / mean)


def test_arrivals_have_rate_and_bursts(tmp_path: Path) -> None:
    """Arrivals have the rate and the burstiness of their kind: poisson, constant or gamma."""
    poisson = gaps(traffic(tmp_path, "rate_per_s = 20"))
    assert 1800 < len(poisson) < 2200 and 0.9 < variation(poisson) < 1.1
    constant = gaps(traffic(tmp_path, 'arrivals = "constant"\nrate_per_s = 20'))
    assert len(constant) in (1998, 1999) and variation(constant) < 1e-6
    bursts = gaps(traffic(tmp_path, 'arrivals = "gamma"\ncv = 4.0\nrate_per_s = 20'))
    assert 1000 < len(bursts) < 3000 and 3 < variation(bursts) < 5


def test_traffic_keeps_its_time_window(tmp_path: Path) -> None:
    """Traffic with from_s and until_s arrives within that time only."""
    times = [at_s for at_s, _ in traffic(tmp_path, "rate_per_s = 20\nfrom_s = 10\nuntil_s = 20").arrivals]
    assert 10 <= min(times) < 11 and 19 < max(times) < 20
    assert len(traffic(tmp_path, "from_s = 90\nuntil_s = 5000\nrate_per_s = 20").arrivals) < 300


def test_trace_gives_times_and_lengths(tmp_path: Path) -> None:
    """A trace gives times and lengths, cut and sped up; a bad row is refused with its line."""
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,100,5\n10,200,0\n10,300,7\n90,1,1\n")
    found = traffic(tmp_path, 'arrivals = "trace"\ntrace = "t.csv"\nfrom_s = 5\nuntil_s = 45\nspeed = 2').arrivals
    assert [ask.prompt_tokens for _, ask in found] == [100, 200, 300]
    assert [ask.output_tokens for _, ask in found] == [5, 1, 7]
    assert found[0][0] == 5 and all(10 <= at_s < 45 for at_s, _ in found[1:])
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,-5,5\n")
    said = refusal(tmp_path, WORKERS + TRAFFIC + 'arrivals = "trace"\ntrace = "t.csv"')
    assert said == f"traffic.0.trace: {tmp_path}/t.csv, line 2: -5 and 5 tokens are not in 1 to 1048576"


def test_closed_loop_has_clients(tmp_path: Path) -> None:
    """A closed loop has one loop per client, with staggered starts."""
    loops = traffic(tmp_path, 'arrivals = "closed"\nclients = 4\nthink_s = 0.5\nfrom_s = 2\nuntil_s = 50').loops
    assert [(loop.from_s, loop.until_s, loop.think_s) for loop in loops] == [
        (2.0, 50.0, 0.5), (2.25, 50.0, 0.5), (2.5, 50.0, 0.5), (2.75, 50.0, 0.5),
    ]  # fmt: skip
    assert all(loop.asks for loop in loops)


def test_lengths_limits_and_goals_are_applied(tmp_path: Path) -> None:
    """Requests get the lengths, limits, deadlines, retries and goals of their traffic."""
    keys = 'rate_per_s = 10\nprompt_tokens = "uniform:10-20"\noutput_tokens = "lognormal:50,0.5"\n'
    asks = [ask for _, ask in traffic(tmp_path, keys).arrivals]
    assert {ask.prompt_tokens for ask in asks} == set(range(10, 21))
    assert 40 < sorted(ask.output_tokens for ask in asks)[len(asks) // 2] < 60
    assert all(ask.max_tokens == ask.output_tokens for ask in asks)
    assert asks[0].goal == Goal() and asks[0].retries == 0
    keys = "prompt_tokens = 7\nmax_tokens = 4096\ndeadline_ms = 900\ntpot_ms = 50\nretries = 3"
    (_, ask), *_ = traffic(tmp_path, keys).arrivals
    assert (ask.prompt_tokens, ask.output_tokens, ask.max_tokens, ask.deadline_ms) == (7, 128, 4096, 900.0)
    assert (ask.goal, ask.retries) == (Goal(900.0, 50.0), 3)
    (_, ask), *_ = traffic(tmp_path, "deadline_ms = 900\nttft_ms = 400").arrivals
    assert ask.goal == Goal(400.0)


def test_goal_defaults_to_the_priority_class(tmp_path: Path) -> None:
    """A stream without goals of its own takes those of its priority class."""
    text = f"""{WORKERS}
[[traffic]]
name = "both"
[[traffic]]
name = "a deadline"
deadline_ms = 900
[[traffic]]
name = "own"
ttft_ms = 100
tpot_ms = 20
[[traffic]]
name = "other"
priority_class = "batch"
[tenants.default]
priority_classes = ["standard", "batch"]
[priority_classes.standard]
weight = 4
ttft_ms = 1500
tpot_ms = 40
percentile = 0.95
[priority_classes.batch]
weight = 1
"""
    assert {ask.stream: ask.goal for _, ask in made(tmp_path, text).arrivals} == {
        "both": Goal(1500.0, 40.0), "a deadline": Goal(900.0, 40.0), "own": Goal(100.0, 20.0), "other": Goal(),
    }  # fmt: skip
    wrong = refusal(tmp_path, text.replace("tpot_ms = 40", "tpot_ms = 0"))
    assert wrong.startswith("priority_classes.standard.tpot_ms: "), wrong


def test_workers_are_built_for_each_role(tmp_path: Path) -> None:
    """Worker tables give workers of each role with their speeds and capacities."""
    text = """
[[workers]]
role = "prefill"
count = 2
prefill_tokens_per_s = 1000
prefill_step_ms = 3
step_tokens = 512
[[workers]]
role = "decode"
decode_step_ms = 10
decode_ms_per_sequence = 0.5
kv_tokens = 3200
sequences_max = 9
block_size = 32
[[workers]]
role = "mixed"
[[workers]]
role = "prefill"
"""
    fast, _, decode, mixed, other = made(tmp_path, text + TRAFFIC).workers
    assert [fast.name, decode.name, mixed.name, other.name] == ["prefill-0", "decode-0", "mixed-0", "prefill-2"]
    assert (fast.roles, decode.roles, mixed.roles) == (("prefill",), ("decode",), ("prefill", "decode"))
    assert fast.times.prefill_s(500) == pytest.approx(0.503) and fast.capacity.step_tokens == 512
    assert decode.times.decode_s(4) == pytest.approx(0.012)
    capacity = decode.capacity
    assert (capacity.kv_blocks, capacity.block_size, capacity.max_seqs) == (100, 32, 9)


def test_tenants_and_failures_are_read(tmp_path: Path) -> None:
    """Tenants, priority classes, coordinator options and failures are read from the file."""
    text = f"""{WORKERS}
[[traffic]]
name = "chat"
tenant = "acme/ann"
[[traffic]]
tenant = "acme"
priority_class = "later"
[coordinator]
kv_overcommit = 2
tenant_queue_max = 5
[priority_classes.first]
weight = 3
[priority_classes.later]
weight = 1
[tenants.acme]
priority_class = "first"
weight = 2
[tenants.acme.users.ann]
limits = {{ concurrency = 4 }}
[[failures]]
at_s = 1
worker = "prefill-0"
kind = "slow"
factor = 3
for_s = 7.5
"""
    workload = made(tmp_path, text)
    streams = {(ask.stream, ask.tenant, ask.priority_class) for _, ask in workload.arrivals}
    assert streams == {("chat", "acme/ann", "first"), ("acme", "acme", "later")}
    policy = workload.tenants.policy("acme/ann")
    assert policy is not None and policy.levels[0].limits.concurrency == 4 and policy.organisation_weight == 2
    assert workload.limits.kv_overcommit == 2 and workload.limits.tenant_queue_max == 5
    assert workload.failures == (PlannedFailure(1.0, "prefill-0", "slow", 3.0, for_s=7.5),)


def test_users_of_a_tenant_take_turns(tmp_path: Path) -> None:
    """Arrivals come from the tenant's users in turn, a client's turns from one user, and the tenants' table has each user."""
    tenants = "[tenants.acme]\nweight = 2\n[tenants.acme.users.user-2]\nweight = 3\n"
    arrivals = traffic(tmp_path, f'tenant = "acme"\nusers = 3\n{tenants}').arrivals
    assert [ask.user for _, ask in arrivals[:4]] == ["user-1", "user-2", "user-3", "user-1"]
    clients = traffic(tmp_path, f'tenant = "acme"\nusers = 3\narrivals = "closed"\nclients = 4\nturns = 2\n{tenants}')
    assert [{ask.user for ask in loop.asks} for loop in clients.loops] == [
        {"user-1"},
        {"user-2"},
        {"user-3"},
        {"user-1"},
    ]
    policies = [clients.tenants.policy(f"acme/user-{number}") for number in (1, 2, 3, 4)]
    assert [one and (one.organisation_weight, one.weight) for one in policies] == [(2, 1), (2, 3), (2, 1), None]


def test_seed_determines_the_arrivals(tmp_path: Path) -> None:
    """The same seed draws the same arrivals and another seed others."""
    text = f'seed = 7\n{WORKERS}{TRAFFIC}rate_per_s = 5\nprompt_tokens = "uniform:1-1000"\n'

    def drawn(seed: int = -1) -> tuple[Any, ...]:
        return made(tmp_path, text, seed).arrivals

    assert drawn() == drawn() == drawn(7) != drawn(8)
