"""Leadership by a lease in PostgreSQL: of several processes on any hosts, one leads.

Start with `lease`, which decides who leads. `held_lease` keeps the lease, and `lease_table` has its row and fences its terms.
"""
