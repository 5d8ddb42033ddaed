"""The reports to people: `crossdock status`, metrics, recent times.

Start with `report`.
"""
