"""How many files this process may have open."""

import resource


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard one, and return it.

    Every connection, pair and socket takes descriptors, and the usual soft limit of 1,024 is kept only for programs that call
    `select`, which none of ours does.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
