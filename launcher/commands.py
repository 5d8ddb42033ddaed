"""Every command of `crossdock`: where its options and its function are. Both are imported when the command runs."""

from typing import Final

import typer

from runtime.process.version import version_of
from runtime.settings.command_line import Command, CommandGroup, Table, new_app

HELP: Final = """Serve language models with prefill and decode in separate processes.

To begin, [bold]crossdock serve[/bold] brings a whole cluster up on this machine. On several machines, describe them in one
file, look at the plan with [bold]crossdock cluster check FILE[/bold], and run [bold]crossdock up FILE[/bold] on each.
"""

_LAUNCH: Final[Table] = {
    "up": Command(
        "Bring the whole cluster up", "launcher.cluster.settings:LaunchUpSettings", "launcher.cluster.launch_ssh:up"
    ),
    "status": Command(
        "Show which hosts are up, and the coordinator's view of the workers",
        "launcher.cluster.settings:LaunchStatusSettings",
        "launcher.cluster.launch_ssh:status",
    ),
    "logs": Command(
        "The last lines of every process's log",
        "launcher.cluster.settings:LaunchLogsSettings",
        "launcher.cluster.launch_ssh:logs",
    ),
    "down": Command(
        "Take the whole cluster down",
        "launcher.cluster.settings:LaunchDownSettings",
        "launcher.cluster.launch_ssh:down",
    ),
}

_BENCH: Final[Table] = {
    "serve": Command(
        "Send a server a realistic load, and say how well it was served.",
        "launcher.load.settings:ServeBenchSettings",
        "launcher.bench.ratio:run",
    ),
    "agents": Command(
        "Conversations of several turns, like those of coding agents: how fast do their turns come back?",
        "launcher.bench.settings:AgentsSettings",
        "launcher.bench.agents:run",
    ),
    "compare": Command("Two runs side by side", "launcher.load.settings:CompareSettings", "launcher.bench.compare:run"),
    "isolation": Command(
        "Do running streams slow down when long prompts arrive?",
        "launcher.bench.settings:IsolationSettings",
        "launcher.bench.isolation:run",
    ),
    "continuity": Command(
        "What do users notice when a part of a server is killed?",
        "launcher.bench.settings:ContinuitySettings",
        "launcher.bench.continuity:run",
    ),
}

TABLE: Final[Table] = {
    "serve": Command(
        "Bring up a whole cluster on this machine",
        "runtime.settings.serve:ServeSettings",
        "launcher.local.serve:run",
        takes="runtime.settings.serve:EveryServeOption",
    ),
    "up": Command("Start what belongs on this host", "launcher.cluster.settings:UpSettings", "launcher.cluster.up:up"),
    "down": Command(
        "Stop what crossdock up runs on this host", "launcher.cluster.settings:DownSettings", "launcher.cluster.up:down"
    ),
    "stop": Command(
        "Stop a cluster that crossdock serve or up runs on this machine.",
        "launcher.local.detached:StopSettings",
        "launcher.local.detached:stop",
    ),
    "restart": Command(
        "Stop a cluster that crossdock serve --detach has started, and start it again with the same options.",
        "launcher.local.detached:RestartSettings",
        "launcher.local.detached:restart",
    ),
    "cluster": CommandGroup(
        "A cluster on several machines, described in one file.",
        {
            "check": Command(
                "Show every process that a cluster.toml describes, or its mistakes",
                "launcher.cluster.settings:ClusterCheckSettings",
                "launcher.cluster.check:run",
            ),
            "launch": CommandGroup(
                "Run the cluster that a cluster.toml describes, on all of its hosts, by ssh.", _LAUNCH
            ),
            "units": Command(
                "Make systemd units for this host's part of a cluster",
                "launcher.cluster.settings:UnitsSettings",
                "launcher.cluster.install_units:run",
            ),
        },
    ),
    "coordinator": Command(
        "Accept requests, place them on workers and tell the workers what to compute.",
        "runtime.settings.roles:CoordinatorSettings",
        "coordinator.serve:run",
    ),
    "gateway": Command("Serve the OpenAI HTTP API.", "runtime.settings.roles:GatewaySettings", "gateway.main:run"),
    "worker": Command(
        "Compute prompts (prefill), stream answers (decode), or do both (mixed).",
        "runtime.settings.workers:WorkerSettings",
        "worker.main:run",
    ),
    "batch": CommandGroup(
        "Run a file of requests when the cluster has capacity to spare.",
        {
            "run": Command(
                "Run a file of requests as a batch, and write their results to a file.",
                "launcher.batch.settings:BatchRunSettings",
                "launcher.batch.run:run",
            )
        },
    ),
    "status": Command(
        "Show workers, queues and running requests of a cluster",
        "launcher.admin.status:StatusSettings",
        "launcher.admin.status:run",
    ),
    "top": Command(
        "Show workers with their load and KV, the queue, and tenants, refreshed each second",
        "launcher.admin.top:TopSettings",
        "launcher.admin.top:run",
    ),
    "doctor": Command(
        "Find out what is wrong with a cluster", "launcher.doctor.run:DoctorSettings", "launcher.doctor.run:run"
    ),
    "logs": Command(
        "Show the logs of a cluster that crossdock serve or up runs on this machine, or ran last",
        "launcher.admin.logs:LogsSettings",
        "launcher.admin.logs:run",
    ),
    "drain": Command(
        "Place nothing new on a worker.", "launcher.admin.drain:DrainSettings", "launcher.admin.drain:run"
    ),
    "flip": Command("Change a worker's role", "launcher.admin.flip:FlipSettings", "launcher.admin.flip:run"),
    "autopilot": Command(
        "Watch the traffic of a cluster", "runtime.settings.autopilot:AutopilotSettings", "lab.commands.autopilot:run"
    ),
    "usage": Command(
        "Show what tenants used, by day (UTC)", "launcher.admin.usage:UsageSettings", "launcher.admin.usage:run"
    ),
    "config": CommandGroup(
        "The options of commands and processes.",
        {
            "show": Command(
                "Show the values of all options of a command or a running process, and where each comes from.",
                "launcher.config:ConfigShowSettings",
                "launcher.config:show",
            )
        },
    ),
    "models": CommandGroup(
        "The models on this machine.",
        {
            "pull": Command(
                "Fetch a model, so that crossdock serve starts without the network.",
                "launcher.models.commands:PullSettings",
                "launcher.models.commands:pull",
            ),
            "list": Command(
                "List the models that were fetched to this machine, with their folders and sizes.",
                "launcher.models.commands:ListModelsSettings",
                "launcher.models.commands:show_list",
            ),
        },
    ),
    "chat": Command("Talk to a model in the terminal", "launcher.chat:ChatSettings", "launcher.chat:run"),
    "tenants": CommandGroup(
        "Check a tenants file, or make a key for it.",
        {
            "check": Command(
                "Check a tenants file: show its content or its mistakes.",
                "launcher.admin.tenants:CheckSettings",
                "launcher.admin.tenants:check",
            ),
            "key": Command(
                "Make an API key for an organisation or a user",
                "launcher.admin.tenants:KeySettings",
                "launcher.admin.tenants:make_key",
            ),
        },
    ),
    "policy": CommandGroup(
        "Change weights, limits and classes in versions: try one on some organisations, promote it, or roll it back.",
        {
            "list": Command(
                "Show the versions of the scheduling policy",
                "launcher.admin.policy:ListSettings",
                "launcher.admin.policy:show_list",
            ),
            "diff": Command(
                "Show what a tenants file would change in the policy in force",
                "launcher.admin.policy:DiffSettings",
                "launcher.admin.policy:diff",
            ),
            "try": Command(
                "Run some organisations under another tenants file",
                "launcher.admin.policy:TrySettings",
                "launcher.admin.policy:try_",
            ),
            "compare": Command(
                "Compare the requests that run under the policy on trial with all others",
                "launcher.admin.policy:PolicyCompareSettings",
                "launcher.admin.policy:compare",
            ),
            "promote": Command(
                "Put what is on trial, or a tenants file, in force for everyone",
                "launcher.admin.policy:PromoteSettings",
                "launcher.admin.policy:promote",
            ),
            "rollback": Command(
                "Put an earlier version in force again",
                "launcher.admin.policy:RollbackSettings",
                "launcher.admin.policy:roll_back",
            ),
        },
    ),
    "rollout": CommandGroup(
        "Try another revision of a model on a part of the requests, then promote or abort it.",
        {
            "status": Command(
                "Show the revisions of models, which requests each gets, and how these fare",
                "launcher.rollout:RolloutStatusSettings",
                "launcher.rollout:show_status",
            ),
            "start": Command(
                "Send a part of the requests for a model to another revision",
                "launcher.rollout:StartSettings",
                "launcher.rollout:start",
            ),
            "promote": Command(
                "Send all new requests to the revision on trial",
                "launcher.rollout:RolloutPromoteSettings",
                "launcher.rollout:promote",
            ),
            "abort": Command(
                "Send no new requests to the revision on trial",
                "launcher.rollout:AbortSettings",
                "launcher.rollout:abort",
            ),
        },
    ),
    "keys": CommandGroup(
        "Make the keys with which the processes of a cluster authenticate each other.",
        {
            "new": Command(
                "Make a pair of keys for each role", "launcher.admin.keys:NewKeysSettings", "launcher.admin.keys:run"
            )
        },
    ),
    "engine": CommandGroup(
        "The engine of the workers.",
        {
            "check": Command(
                "Say whether a Python has what --engine vllm needs",
                "launcher.admin.engine:EngineCheckSettings",
                "launcher.admin.engine:check",
            )
        },
    ),
    "explain": Command(
        "Show why a request waited, and for which others",
        "launcher.admin.event_log_settings:ExplainSettings",
        "launcher.admin.replay:explain",
    ),
    "replay": Command(
        "Execute an event log again and check that this coordinator decides the same",
        "launcher.admin.event_log_settings:ReplaySettings",
        "launcher.admin.replay:replay",
    ),
    "simulate": CommandGroup(
        "Play loads against the coordinator's own scheduler in virtual time.",
        {
            "load": Command(
                "Play a load against the coordinator's own scheduler in virtual time",
                "lab.commands.simulate:SimulateLoadSettings",
                "lab.commands.simulate:run",
            )
        },
    ),
    "calibrate": Command(
        "Measure how long prefill, decode and KV transfer take on this installation.",
        "lab.commands.settings:CalibrateSettings",
        "lab.commands.calibrate:run",
    ),
    "profile": CommandGroup(
        "Profiles for crossdock tune without a calibration.",
        {
            "estimate": Command(
                "Estimate a profile of hardware that you do not have at hand.",
                "lab.commands.profiles.settings:EstimateSettings",
                "lab.commands.profiles.estimate:run",
            ),
            "from-vllm": Command(
                "Make a profile of a vLLM that runs, without stopping it.",
                "lab.commands.profiles.settings:FromVllmSettings",
                "lab.commands.profiles.from_vllm:run",
            ),
        },
    ),
    "tune": Command(
        "Which ratio of prefill to decode workers serves this traffic best, or should they be mixed?",
        "lab.commands.settings:TuneSettings",
        "lab.commands.tune:run",
    ),
    "tune check": Command(
        "Run the recommended ratio and the next best ones live, and print what was predicted beside what is measured.",
        "lab.commands.settings:TuneCheckSettings",
        "lab.commands.check:run",
    ),
    "bench": CommandGroup("Send a load to a server, and compare runs.", _BENCH),
}


def build_app() -> typer.Typer:
    return new_app(HELP, TABLE, completion=True, version=f"crossdock {version_of('crossdock')}")


def only_groups(arguments: list[str]) -> bool:
    """Whether the words name a group of commands, and no command in it."""
    table = TABLE
    for word in arguments:
        row = table.get(word)
        if not isinstance(row, CommandGroup):
            return False
        table = row.commands
    return True


def as_listed(arguments: list[str]) -> list[str]:
    """`tune check` is a command beside `tune`, which has options of its own."""
    return ["tune check", *arguments[2:]] if arguments[:2] == ["tune", "check"] else arguments
