"""The ratio lab: how many prefill, decode and mixed workers serve a traffic best. Pure: numbers in, numbers out.

`profile` says what things take on one installation, `play` plays traffic against it by the scheduler that serves, `search`
looks for the best ratio, and `advise` says within milliseconds what another ratio would do to present traffic.
The commands are in `launcher/tuning`.
"""
