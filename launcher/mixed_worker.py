"""`python -m launcher.mixed_worker`: a worker that does both phases, for unit files and launchers."""

from runtime.worker.command import run_alone

if __name__ == "__main__":
    run_alone("mixed", "launcher.mixed_worker")
