"""A share of the runs of `crossdock simulate`, in a process of its own."""

import sys

from simulation.batch import child

sys.exit(child(sys.argv[1:]))
