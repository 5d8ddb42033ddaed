"""Options of the commands that read a `cluster.toml`."""

from pydantic import Field

from runtime.settings.types import Options

_ARGUMENT = Field(
    min_length=1,
    description="cluster.toml with the hosts and what runs on each; scripts/cluster.toml is one.",
    json_schema_extra={"argument": "FILE"},
)
_HOST = Field(
    "",
    max_length=32,
    description="The host of the file that this machine is; empty: the one named like it.",
    json_schema_extra={"option": "--host"},
)


class UpSettings(Options):
    """Start what belongs on this host, restart what dies, and take it down in order on Ctrl-C or SIGTERM.

    Every host of a cluster runs this with the same file; crossdock cluster launch does so for all of them.
    """

    cluster_file: str = _ARGUMENT
    on_host: str = _HOST
    detach: bool = Field(False, description="Return once all is ready; it runs on until crossdock down.")
    ready_timeout_s: float = Field(
        300.0, gt=0.0, le=86_400.0, description="Seconds until all here is ready, the other hosts' part included."
    )
    verbose: bool = Field(False, description="Show every log line of every process, not only warnings and errors.")


class DownSettings(Options):
    """Stop what crossdock up runs on this host, and remove its files."""

    cluster_file: str = _ARGUMENT
    on_host: str = _HOST
    keep_logs: bool = Field(False, description="Keep the logs.")


class LaunchSettings(Options):
    """The options that the commands of `crossdock cluster launch` share."""

    cluster_file: str = _ARGUMENT
    local: bool = Field(
        False,
        description="Run every host's part on this machine instead of by ssh; each needs an address of its own, like"
        " 127.0.0.2. A host with a netns runs in that network namespace here, with or without this.",
    )


class LaunchUpSettings(LaunchSettings):
    """Bring the whole cluster up: copy the file and each host's keys there, start its part, wait until all serves.

    Where one host fails, all are taken down again. Hosts are reached by ssh without a password, and have crossdock: the key
    `command` says how it is called there.
    """

    ready_timeout_s: float = Field(
        300.0, gt=0.0, le=86_400.0, description="Seconds it may take to be ready, once models are there."
    )


class LaunchStatusSettings(LaunchSettings):
    """Show which hosts are up, and the coordinator's view of the workers. Status 0: all hosts are up."""


class LaunchLogsSettings(LaunchSettings):
    """The last lines of every process's log, or all from now on."""

    on_host: str = Field("", description="Only the logs of this host.", json_schema_extra={"option": "--host"})
    lines: int = Field(20, ge=0, le=1_000_000, description="Lines of each log.")
    follow: bool = Field(False, description="Keep printing new lines until Ctrl-C.")


class LaunchDownSettings(LaunchSettings):
    """Take the whole cluster down, and remove what was copied to the hosts."""

    keep_logs: bool = Field(False, description="Keep the logs on the hosts.")


class ClusterCheckSettings(LaunchSettings):
    """Show every process that a cluster.toml describes, or its mistakes.

    It prints hosts and options, and starts nothing. On hosts with gpus it counts them, by ssh with nvidia-smi -L.
    """


class UnitsSettings(Options):
    """Make systemd units for this host's part of a cluster: one for each process, in crossdock.target.

    Options, ports, GPUs and cores are those of cluster.toml; called again after a change, what is not needed any more is
    removed. Secret keys are read by systemd and handed to the processes as credentials.
    """

    cluster_file: str = _ARGUMENT
    on_host: str = _HOST
    dest: str = Field(
        "/", min_length=1, description="Root of the tree written to, for an image or to look at them first."
    )
    dry_run: bool = Field(False, description="Only print what would be written, with every text.")
