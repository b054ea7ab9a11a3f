"""Writes docs/fields.md from the table of fields: `python -m tools.fields_page`."""

from __future__ import annotations

from pathlib import Path

from fastspec.server.field_table import FIELDS, RequestField, Treatment

PAGE = Path(__file__).parents[1] / "docs/fields.md"

HEAD = """# Fields of a request

Fields of the bodies of `POST /v1/chat/completions` and `POST /v1/completions`: OpenAI's, vLLM's, and
fastspec's own. A field that is in no table is a 400 with its name in `error.param`. A `null` counts as a missing
field. The columns *chat* and *completions* tell which specification has the field.

<!-- Written by tools/fields_page.py from fastspec/server/field_table.py: change that table. -->
"""
PARTS = {
    Treatment.SERVED: "These act as the specification says.",
    Treatment.TAKEN: "These change no answer. Types are checked, and the log names each field once. They are taken on "
    "both paths.",
    Treatment.REFUSED: "These are a 400 that tells the reason, unless they have a value that asks for nothing.",
}


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for treatment, told in PARTS.items():
        last = "values that are accepted | why, and what to do" if treatment is Treatment.REFUSED else "notes"
        rule = "|---" * (6 if treatment is Treatment.REFUSED else 5) + "|"
        parts.append(f"\n## {treatment.value.capitalize()}\n\n{told}\n\n")
        parts.append(f"| field | of | chat | completions | {last} |\n{rule}\n")
        parts += [line(row) for row in sorted(FIELDS, key=lambda row: row.name) if row.treatment is treatment]
    return "".join(parts)


def line(row: RequestField) -> str:
    """One row of a table."""
    cells = [f"`{row.name}`", row.origin, "yes" if row.chat else "-", "yes" if row.completions else "-"]
    if row.treatment is Treatment.REFUSED:
        cells.append(", ".join(f"`{json_of(value)}`" for value in row.neutral) or "-")
    return f"| {' | '.join([*cells, row.note.replace('|', chr(92) + '|')])} |\n"


def json_of(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
