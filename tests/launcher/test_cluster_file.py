"""`cluster.toml`: every mistake names its table and key, and what is right comes to the right processes."""

import re
from pathlib import Path, PurePosixPath

import pytest

from launcher.cluster.file import ClusterError, ClusterFile, incomplete, parse, travels
from launcher.cluster.plan import HostPlan, base_urls, check
from launcher.cluster.up import spec_of
from runtime.settings.options import load
from runtime.settings.roles import GatewaySettings
from runtime.settings.workers import WorkerSettings

ROOT = Path(__file__).parents[2]
HOST = '[hosts.a]\naddress = "127.0.0.1"\ncoordinator = true\n'
FRONT = HOST + 'gateways = 1\nworkers = "1P1D"\n'


def read(text: str) -> ClusterFile:
    return parse(text, PurePosixPath("/conf"))


def plans(text: str) -> dict[str, HostPlan]:
    return check(read(text))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[hosts", "not TOML"),
        ("", "hosts: needed"),
        (HOST + "gpu = [0]", "[hosts.a] gpu: no such key"),
        ("modle = 'x'\n" + FRONT, "modle: no such key"),
        ("[hosts.a]\ncoordinator = true", "[hosts.a] address: needed"),
        ('[hosts.a]\naddress = "0.0.0.0"\ncoordinator = true', "[hosts.a] address: '0.0.0.0' is every address"),
        ('[hosts.a]\naddress = "al pha"\ncoordinator = true', "[hosts.a] address: 'al pha' is neither"),
        ('[hosts."a/b"]\naddress = "127.0.0.1"\ncoordinator = true', "[hosts] a/b: "),
        (HOST + "gateways = 1.5", "[hosts.a] gateways: 1.5 input should be a valid integer"),
        (HOST + 'gateways = "1"', "[hosts.a] gateways: '1' input should be a valid integer"),
        (HOST + 'workers = "1D1P"', "[hosts.a] workers: '1D1P' is not a ratio like 2P1D"),
        (
            HOST + 'workers = "65P1D"',
            "[hosts.a] workers: '65P1D' is not a ratio like 2P1D, 3M or 1P1D+1M, of at most 64",
        ),
        (HOST + 'workers = "2M1P1D"', "[hosts.a] workers: '2M1P1D' is not a ratio like 2P1D"),
        (HOST + 'workers = "1P1D2M"', "[hosts.a] workers: '1P1D2M' is not a ratio like 2P1D"),
        (HOST + 'workers = "65M"', "[hosts.a] workers: '65M' is not a ratio like 2P1D"),
        (HOST + 'workers = ""', "[hosts.a] workers: '' is not a ratio like 2P1D"),
        (HOST + 'workers = "1P1D+1M"\ngpus = [0]', "[hosts.a] gpus: 1 for 3 workers"),
        (HOST + 'workers = "2P1D"\ngpus = [0]', "[hosts.a] gpus: 1 for 3 workers"),
        (HOST + 'workers = "0P1D"\ngpus = ["x;y"]', "[hosts.a] gpus[0]: has 'x;y', which is not the number"),
        (HOST + 'workers = "0P1D"\ngpus = [[]]', "[hosts.a] gpus[0]: has '', which is not the number of a GPU"),
        (HOST + 'workers = "0P1D"\ngpus = [[0, true]]', "[hosts.a] gpus[0]: has 'True', which is not the number"),
        (
            HOST + 'workers = "1P1D"\ngpus = [0, 1, 2, 3]',
            "[hosts.a] gpus: 4 for 2 workers; name one for each, or a list",
        ),
        (HOST + 'workers = "1P1D"\ngpus = [[0, 1], [1, 2]]', "[hosts.a] gpus: 1 is named twice"),
        (HOST + 'workers = "1P1D"\ngpus = [[0, 1], 0]', "[hosts.a] gpus: 0 is named twice"),
        (HOST + 'workers = "0P1D"\ngpus = [[2, 2]]', "[hosts.a] gpus: 2 is named twice"),
        (HOST + 'workers = "0P1D"\ngpus = [0]\ncores = "0-3"', "[hosts.a] cores: only for workers on the CPU"),
        (HOST + 'cores = "x"', "[hosts.a] cores: 'x' "),
        (HOST.replace("true", "false"), "hosts: none has coordinator = true"),
        (HOST + HOST.replace("hosts.a", "hosts.b"), "[hosts.b] coordinator: there is one already, on a"),
        (HOST + '[hosts.b]\naddress = "10.0.0.1"', "[hosts.a] address: 127.0.0.1 cannot be reached from the other"),
        (HOST.replace("127.0.0.1", "10.0.0.1"), "keys: needed, since [hosts.a] listens on 10.0.0.1"),
        (HOST + 'bind = "0.0.0.0"', "keys: needed, since [hosts.a] listens on 0.0.0.0"),
        (HOST.replace("127.0.0.1", "alpha"), "[hosts.a] bind: needed, since alpha is a name"),
        (
            "insecure = true\n" + FRONT.replace('"127.0.0.1"', '"alpha"\nbind = "0.0.0.0"'),
            "[hosts.a] interface: needed, since alpha is a name and 0.0.0.0 is every address",
        ),
        ('keys = "k"\ninsecure = true\n' + HOST, "insecure: says nothing beside keys"),
        (HOST + "[ports]\nhttp = 0", "[ports] http: 0 input should be greater than"),
    ],
)
def test_cluster_file_mistake_is_named(text: str, complaint: str) -> None:
    """A mistake in the cluster file is refused with a message that names it."""
    with pytest.raises(ClusterError, match=re.escape(complaint)):
        read(text)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (FRONT + "[worker]\nkv_gigs = 1", "[worker] kv_gigs: no such option of a prefill; see crossdock worker --help"),
        (FRONT + "[decode]\nkv_gib = 0", "[decode] kv_gib: 0 is not over 0"),
        (FRONT + "[hosts.a.prefill]\nblock_size = 'x'", "[hosts.a.prefill] block_size: x is not a whole number"),
        (FRONT + "[gateway]\nport = 80", "[gateway] port: follows from hosts, ports and the keys at the top"),
        (FRONT + "[common]\nheartbeat_ms = 1", "[common] heartbeat_ms: 1 is under 10"),
        (FRONT + '[hosts.b]\naddress = "127.0.0.1"\ngateways = 1', "both listen on 127.0.0.1 port 7100"),
        (FRONT + "[ports]\ncoordinator = 8000", "both listen on 127.0.0.1 port 8000"),
    ],
)
def test_role_option_mistake_is_named(text: str, complaint: str) -> None:
    """A wrong option of a role in the cluster file is refused with its section and key."""
    with pytest.raises(ClusterError, match=re.escape(complaint)):
        plans(text)


def test_all_mistakes_are_reported_together() -> None:
    """Two mistakes in a file give two lines in one error."""
    with pytest.raises(ClusterError) as caught:
        read(HOST + "gpu = 1\ncore = 1")
    assert len(str(caught.value).splitlines()) == 2


def test_more_specific_section_wins() -> None:
    """A role's option comes from the most specific section: host and role before role, worker and common."""
    text = FRONT + (
        "[common]\nheartbeat_ms = 300\n[worker]\nkv_gib = 1\nmax_seqs = 8\nheartbeat_ms = 400\n[decode]\nkv_gib = 2\n"
        "[hosts.a.worker]\nmax_seqs = 9\n[hosts.a.decode]\nkv_gib = 3\n"
    )
    found = {process.role: process.settings for process in plans(text)["a"].processes}
    prefill, decode = found["prefill"], found["decode"]
    assert isinstance(prefill, WorkerSettings) and isinstance(decode, WorkerSettings)
    assert (prefill.kv_gib, prefill.max_seqs, prefill.heartbeat_ms) == (1, 9, 400)
    assert (decode.kv_gib, decode.max_seqs) == (3, 9)
    assert getattr(found["gateway"], "heartbeat_ms") == 300  # noqa: B009


def test_workers_get_own_gpu_and_port() -> None:
    """Each worker sees its own GPU, gets a share of it, and decode workers get KV ports in turn."""
    text = HOST + 'workers = "1P2D"\ngpus = [3, "GPU-8a", "GPU-8a"]\n[ports]\nkv = 7300\n'
    workers = [process for process in plans(text)["a"].processes if process.role != "coordinator"]
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in workers] == ["3", "GPU-8a", "GPU-8a"]
    assert {one.environment["CUDA_DEVICE_ORDER"] for one in workers} == {"PCI_BUS_ID"}
    assert all(isinstance(one.settings, WorkerSettings) and one.settings.device == "cuda" for one in workers)
    shares = [one.settings.gpu_memory_share for one in workers if isinstance(one.settings, WorkerSettings)]
    assert shares == [0.9, 0.45, 0.45]
    binds = [one.settings.kv_bind for one in workers if isinstance(one.settings, WorkerSettings)]
    assert binds == ["tcp://127.0.0.1:0", "tcp://127.0.0.1:7300", "tcp://127.0.0.1:7301"]


@pytest.mark.parametrize(
    ("gpus", "args", "complaint"),
    [
        ("[[0, 1], [2, 3]]", "--tensor-parallel-size 2", ""),
        ("[[0, 1], [2, 3]]", "-tp=2 --enforce-eager", ""),
        ("[0, 0]", "", ""),
        ("[[0, 1], 2]", "--tensor_parallel_size=2", "decode-0 has 1 and uses 2"),
        ("[[0, 1, 2], [3, 4]]", "-tp 4 --tensor-parallel-size 2", "prefill-0 has 3 and uses 2"),
        ("[[0, 1], [2, 3]]", "", "prefill-0 has 2 and uses 1"),
    ],
)
def test_vllm_workers_may_have_several_gpus(gpus: str, args: str, complaint: str) -> None:
    """A worker with vLLM sees as many GPUs as it computes on, or the file is refused."""
    text = HOST + f'workers = "1P1D"\ngpus = {gpus}\n[worker]\nengine = "vllm"\nvllm_args = "{args}"\n'
    if complaint:
        with pytest.raises(ClusterError, match=re.escape(f"[hosts.a] gpus: {complaint}; with engine")):
            plans(text)
    else:
        workers = plans(text)["a"].processes[1:]
        seen = ["0", "0"] if not args else ["0,1", "2,3"]
        assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in workers] == seen
    with pytest.raises(ClusterError, match="prefill-0 has 2 and uses 1"):
        plans(HOST + 'workers = "1P1D"\ngpus = [[0, 1], [2, 3]]\n[worker]\nvllm_args = "-tp 2"\n')


def test_cpu_workers_hide_gpus_share_cores() -> None:
    """A host without gpus hides all GPUs from its workers and shares its cores out among them."""
    workers = plans(HOST + 'workers = "1P1D"\ncores = "0-3"\n')["a"].processes[1:]
    assert [one.environment for one in workers] == [{"CUDA_VISIBLE_DEVICES": ""}] * 2
    prefill, decode = (one.settings for one in workers)
    assert isinstance(prefill, WorkerSettings) and isinstance(decode, WorkerSettings)
    assert (decode.cpu_cores, decode.threads, decode.device) == ("2-3", 2, "cpu")
    assert (prefill.cpu_cores, prefill.nice > 0) == ("0-1", True)


def test_single_core_is_pinned() -> None:
    """All processes of a host with one core are pinned to it."""
    plan = plans(FRONT + 'cores = "3"\n')["a"]
    assert {process.cores for process in plan.processes} == {(3,)}
    assert {getattr(process.settings, "cpu_cores") for process in plan.processes[2:]} == {"3"}  # noqa: B009


def test_single_role_host_uses_its_cores() -> None:
    """Workers of one kind on a host get disjoint cores."""
    for ratio in ("2P0D", "0P2D"):
        workers = plans(HOST + f'workers = "{ratio}"\ncores = "0-4"\n')["a"].processes[1:]
        cores = [one.settings.cores for one in workers if isinstance(one.settings, WorkerSettings)]
        assert len(cores) == 2 and all(len(own) == 2 for own in cores) and not set(cores[0]) & set(cores[1])


def test_metrics_ports_are_given_in_turn() -> None:
    """Processes get metrics ports in turn, unless a role names its own."""
    found = plans(FRONT + '[ports]\nmetrics = 9400\n[prefill]\nmetrics = "10.0.0.1:9"\n')["a"].processes
    said = [" ".join(one.arguments()).partition("--metrics ")[2].split()[0] for one in found]
    assert said == ["127.0.0.1:9400", "127.0.0.1:9401", "10.0.0.1:9", "127.0.0.1:9403"]


def test_shared_machine_gets_distinct_ports() -> None:
    """Hosts that share a machine get metrics ports that do not collide."""
    found = plans(FRONT + '[hosts.b]\naddress = "127.0.0.2"\nworkers = "1P0D"\n[ports]\nmetrics = 9400\n')
    metrics = [one.settings.metrics for plan in found.values() for one in plan.processes]  # type: ignore[attr-defined]
    assert len(set(metrics)) == 5 and metrics[-1] == "127.0.0.2:9400"


def test_bind_address_differs_from_advertised() -> None:
    """A host with bind listens on that address and advertises the other one."""
    text = "insecure = true\n" + FRONT.replace('"127.0.0.1"', '"alpha.example"\nbind = "10.0.0.7"')
    plan = plans(text)["a"]
    gateway, prefill, decode = (process.settings for process in plan.processes[1:])
    assert isinstance(gateway, GatewaySettings) and isinstance(decode, WorkerSettings)
    assert (gateway.tokens_bind, gateway.advertise, gateway.host) == (
        "tcp://10.0.0.7:7100",
        "tcp://alpha.example:0",
        "10.0.0.7",
    )
    assert (decode.kv_bind, decode.advertise, decode.transfer_host) == (
        "tcp://10.0.0.7:7200",
        "tcp://alpha.example:0",
        "10.0.0.7",
    )
    assert getattr(prefill, "coordinator") == "tcp://alpha.example:7070"  # noqa: B009
    assert plan.base_urls == ("http://alpha.example:8000",)
    here = plans("insecure = true\n" + FRONT.replace('"127.0.0.1"', '"localhost"\nbind = "0.0.0.0"'))["a"]
    assert [getattr(one.settings, "transfer_host") for one in here.processes[2:]] == ["127.0.0.1"] * 2  # noqa: B009


def test_api_keys_are_environment_only() -> None:
    """A gateway's API keys are in its environment and not among its arguments."""
    plan = plans(FRONT + '[gateway]\napi_keys = ["secret-1", "secret-2"]\n')["a"]
    gateway = next(process for process in plan.processes if process.role == "gateway")
    assert "secret" not in " ".join(gateway.arguments())
    assert spec_of(gateway).environment["CROSSDOCK_API_KEYS"] == "secret-1,secret-2"


def test_arguments_restore_the_settings() -> None:
    """The arguments of each process parse back to the same settings."""
    text = HOST.replace("127.0.0.1", "fd00::1") + 'gateways = 2\nworkers = "1P1D"\n[decode]\nprefix_cache = false\n'
    for process in plans('insecure = true\nmodel = "m"\n' + text)["a"].processes:
        flags = process.arguments()
        values: dict[str, str] = {"role": process.role} if process.role in ("prefill", "decode") else {}
        for word in flags:
            if word.startswith("--"):
                name, value = word.removeprefix("--no-"), "false" if word.startswith("--no-") else "true"
                key = name.removeprefix("--").replace("-", "_")
                values[key] = value
            else:
                values[key] = word
        assert load(type(process.settings), values) == process.settings


def test_relative_paths_are_beside_the_file() -> None:
    """Relative paths are resolved beside the cluster file, and those files travel to the hosts."""
    text = (
        'keys = "keys"\nmodel = "org/name"\n[gateway]\ntenants = "t.toml"\n'
        '[coordinator]\nusage_db = "/var/u.db"\nevent_log = "e.log"\n' + FRONT
    )
    file = read(text)
    assert (file.keys, file.model) == ("/conf/keys", "org/name")
    assert (file.gateway["tenants"], file.coordinator["usage_db"]) == ("/conf/t.toml", "/var/u.db")
    assert file.coordinator["event_log"] == "/conf/e.log"
    assert travels(text) == ["keys", "t.toml"]
    text += '[hosts.a.gateway]\ntenants = "own.toml"\n'
    assert read(text).hosts["a"].gateway["tenants"] == "/conf/own.toml"
    assert travels(text) == ["keys", "own.toml", "t.toml"]
    assert read('model = "./m"\n' + FRONT).model == "/conf/m"


def test_host_may_serve_another_revision() -> None:
    """A host has a model of its own and its workers a revision, under the model id of all hosts."""
    other = '[hosts.b]\naddress = "127.0.0.2"\nworkers = "1P1D"\nmodel = "./new"\n[hosts.b.worker]\nrevision = "v2"\n'
    made = plans('model = "/srv/old"\nmodel_id = "m"\n' + FRONT + other)
    found = {
        (process.settings.model, process.settings.pool)
        for plan in made.values()
        for process in plan.processes
        if isinstance(process.settings, WorkerSettings)
    }
    assert found == {("/srv/old", "m"), ("/conf/new", "m@v2")}
    with pytest.raises(ClusterError, match=r"\[hosts.b\] model: needs model_id at the top"):
        plans(FRONT + other)


def test_several_hosts_may_have_a_coordinator() -> None:
    """With a database, each host with a coordinator runs one, and all processes get the addresses of all."""
    other = '[hosts.b]\naddress = "127.0.0.2"\ncoordinator = true\nworkers = "1P1D"\n'
    found = plans('[autopilot]\nprofile = "p.json"\n[coordinator]\ndatabase = "postgresql://u@h/d"\n' + FRONT + other)
    every = "tcp://127.0.0.1:7070,tcp://127.0.0.2:7070"
    assert [process.role for process in found["b"].processes] == ["coordinator", "prefill", "decode"]
    assert [plan.processes[0].settings.bind for plan in found.values()] == every.split(",")  # type: ignore[attr-defined]
    assert {process.settings.coordinator for plan in found.values() for process in plan.processes[1:]} == {every}  # type: ignore[attr-defined]


def test_autopilot_runs_beside_the_coordinator() -> None:
    """An autopilot section adds one autopilot process on the coordinator's host only."""
    other = '[hosts.b]\naddress = "127.0.0.2"\nworkers = "1P1D"\n'
    text = '[autopilot]\nmode = "on"\nprofile = "p.json"\nslo_tpot_ms = 80.0\n[ports]\nmetrics = 9400\n' + FRONT + other
    found = plans(text)
    assert [one.role for one in found["a"].processes] == ["coordinator", "gateway", "prefill", "decode", "autopilot"]
    assert "autopilot" not in [one.role for one in found["b"].processes]
    pilot = found["a"].processes[-1]
    values = dict(pair.split("=", 1) if "=" in pair else (pair, "") for pair in pilot.arguments())
    assert str(pilot.settings.profile) == "/conf/p.json" and pilot.settings.metrics == "127.0.0.1:9404"  # type: ignore[attr-defined]
    assert pilot.settings.coordinator == "tcp://127.0.0.1:7070" and "--slo-tpot-ms" in str(values)  # type: ignore[attr-defined]
    spec = spec_of(pilot)
    assert spec.arguments[-len(pilot.arguments()) - 1] == "lab.commands.autopilot" and spec.watchdog_s
    assert travels(text) == ["p.json"]
    for table, why in (
        ('[autopilot]\nmode = "on"\n', "[autopilot] profile: "),
        ('[autopilot]\nprofile = "p"\nmode = "off"\n', "[autopilot] mode: "),
        ('[autopilot]\nprofile = "p"\nspeed = 3\n', "[autopilot] speed: no such option of an autopilot"),
    ):
        with pytest.raises(ClusterError) as error:
            plans(table + FRONT)
        assert str(error.value).startswith(why), error.value


def test_example_cluster_file_is_complete() -> None:
    """The example cluster file parses, checks and lacks nothing."""
    file = parse((ROOT / "scripts/cluster.toml").read_text(), PurePosixPath("/conf"))
    assert sum(len(plan.processes) for plan in check(file).values()) == 6
    assert incomplete(file) == []
    assert base_urls(file) == ["http://10.0.0.1:8000"]
    assert len(incomplete(read(HOST))) == 3


def test_example_with_two_gpus_each_is_valid() -> None:
    """The example cluster file is valid with the lines for workers that have two GPUs."""
    text = (ROOT / "scripts/cluster.toml").read_text().replace("gpus = [0, 1] ", "#").replace("gpus = [0, 1]\n", "")
    text = re.sub(r"# (gpus = \[\[|engine|vllm_args)", r"\1", text)
    gamma = text.replace('workers = "0P2D"\n', 'workers = "0P2D"\ngpus = [[0, 1], [2, 3]]\n')
    found = check(parse(gamma, PurePosixPath("/conf")))
    workers = [one for host in ("beta", "gamma") for one in found[host].processes]
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in workers] == ["0,1", "2,3"] * 2
    assert {getattr(one.settings, "vllm_args") for one in workers} == {"--tensor-parallel-size 2"}  # noqa: B009
