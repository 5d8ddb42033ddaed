"""Files that outlive a process: SQLite files that this user alone can read, and locks that the kernel frees with their holder.

Start with `lock_file`.
"""
