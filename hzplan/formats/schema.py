"""JSON Schemas of the files, for editors and other programs: ``hzplan/formats/schemas/``.

They say which fields there are and of what type; what fields mean to each other is checked on reading only.
``python -m hzplan.formats.schema`` writes them anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from hzplan.formats.base import Strict, write_text
from hzplan.formats.links import Links
from hzplan.formats.plan import Plan
from hzplan.formats.profile import Profile

FOLDER = Path(__file__).parent / "schemas"

DOCUMENTS: Mapping[str, type[Strict]] = {"plan": Plan, "profile": Profile, "links": Links}


def schema_text(kind: str) -> str:
    """The schema of a kind of file, as text."""
    schema = DOCUMENTS[kind].model_json_schema()
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema, indent=1) + "\n"


if __name__ == "__main__":
    for name in DOCUMENTS:
        write_text(FOLDER / f"{name}.schema.json", schema_text(name))
