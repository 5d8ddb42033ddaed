"""The ratio lab: how many prefill, decode and mixed workers serve a traffic best, and what a load does to a cluster.

`profile` says what things take on one installation, `play` plays traffic against it by the scheduler that serves, `search`
looks for the best layout, and `advise` says within milliseconds what another ratio would do to present traffic. `cluster` runs
the whole coordinator and its workers in virtual time, under loads that `scenarios` reads. `commands` has what a user types; it
may import the launcher, and the launcher nothing of the lab.
"""
