"""Versions of what is installed."""

from importlib.metadata import PackageNotFoundError, version


def version_of(package: str = "crossdock") -> str:
    """The installed version; a checkout that is not installed says so."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "from source"
