"""What people are told: `crossdock status`, metrics, recent times.

Start with `report`.
"""
