"""`python -m worker`: a worker that does both phases, for unit files and launchers."""

from worker.main import run_alone

if __name__ == "__main__":
    run_alone("mixed", "worker")
