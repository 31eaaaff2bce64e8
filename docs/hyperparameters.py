"""Write docs/hyperparameters.md, and the JSON Schema of an experiment file for editors.

python -m docs.hyperparameters
"""

from __future__ import annotations

import json
from pathlib import Path

from lm.config.hyperparameters import PARTS, SCHEMA
from lm.config.table import key_rows, preset_rows, summary

PAGE = Path(__file__).with_name("hyperparameters.md")
EDITOR_SCHEMA = Path(__file__).with_name("hyperparameters.schema.json")


def markdown_page() -> str:
    """Return docs/hyperparameters.md: the keys of every part, and the presets."""
    lines = [
        "# Hyperparameters",
        "",
        "All keys of `hyperparameters:` in an experiment file and of `key=value` arguments.",
        "`make docs` writes this page, and the [JSON Schema](hyperparameters.schema.json) for"
        " editors.",
    ]
    for name, part in PARTS.items():
        lines += ["", f"## {name.capitalize()}", "", summary(part), ""]
        lines += ["| key | default | accepted values | meaning |", "|---|---|---|---|"]
        for row in key_rows(part):
            lines.append(f"| `{row.key}` | `{row.default}` | {row.accepted} | {row.meaning} |")
    lines += ["", "## Presets", ""]
    lines += ["Values of `model`. A key that is set in the file overrides the preset's.", ""]
    lines += ["| model | parameters | keys |", "|---|---|---|"]
    lines += [f"| `{row.name}` | {row.size} | {row.keys} |" for row in preset_rows()]
    return "\n".join(lines) + "\n"


def editor_schema() -> str:
    """Return docs/hyperparameters.schema.json, for editors.

    A key accepts a value or a search range; Determined's own sections are free.
    """
    types = ["const", "int", "double", "log", "categorical"]
    search = {"type": "object", "required": ["type"], "properties": {"type": {"enum": types}}}
    reference = {"$ref": "#/$defs/Search"}
    keys = {key: {"anyOf": [value, reference]} for key, value in SCHEMA["properties"].items()}
    section = {"type": "object", "additionalProperties": False, "properties": keys}
    experiment = {
        "type": "object",
        "$defs": SCHEMA["$defs"] | {"Search": search},
        "required": ["hyperparameters"],
        "properties": {"hyperparameters": section},
    }
    return json.dumps(experiment, indent=1) + "\n"


def main() -> None:
    """Run the command."""
    PAGE.write_text(markdown_page())
    EDITOR_SCHEMA.write_text(editor_schema())


if __name__ == "__main__":
    main()
