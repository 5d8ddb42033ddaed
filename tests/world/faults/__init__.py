"""The seeded world: simulated processes, network and faults around the production cores.

Start with `cluster`.
"""
