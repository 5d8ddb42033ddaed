"""`docs/profile.schema.json`: the format of a profile, as a JSON schema.

python -m tools.profile_schema docs/profile.schema.json
"""

import sys
from pathlib import Path

import msgspec

from lab.profile import FORMAT, Profile


def schema() -> bytes:
    found = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Profile of crossdock tune, format {FORMAT}",
        **msgspec.json.schema(Profile),
    }
    return msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(schema())
