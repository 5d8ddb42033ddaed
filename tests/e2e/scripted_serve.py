"""`python -m tests.e2e.scripted_serve serve …` is `crossdock serve …` with the workers of `tests.e2e.scripted_worker`."""

from launcher import cli
from launcher.process import WORKER_MODULES

if __name__ == "__main__":
    WORKER_MODULES.update(dict.fromkeys(WORKER_MODULES, "tests.e2e.scripted_worker"))
    cli.main()
