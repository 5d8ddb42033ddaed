"""`python -m prefill_worker`: this role alone, for unit files and launchers."""

from worker.main import run_alone

if __name__ == "__main__":
    run_alone("prefill", "prefill_worker")
