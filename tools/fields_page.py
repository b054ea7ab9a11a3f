"""Writes docs/fields.md from the table of fields: `python -m tools.fields_page`."""

from __future__ import annotations

from pathlib import Path

from fastspec.server.field_table import FIELDS, RESPONSE_FIELDS, RequestField, Treatment

PAGE = Path(__file__).parents[1] / "docs/fields.md"

HEAD = """# Fields of a request

Fields of the bodies of `POST /v1/chat/completions`, `POST /v1/completions` and
[`POST /v1/responses`](#responses): OpenAI's, vLLM's, and fastspec's own. A field that is in no table is a 400 with its
name in `error.param`. A `null` counts as a missing field. The columns *chat* and *completions* tell which specification
has the field.

<!-- Written by tools/fields_page.py from fastspec/server/field_table.py: change that table. -->
"""
PARTS = {
    Treatment.SERVED: "These act as the specification says.",
    Treatment.TAKEN: "These change no answer. Types are checked, and the log names each field once.",
    Treatment.REFUSED: "These are a 400 that tells the reason, unless they have a value that asks for nothing.",
}
ON_BOTH = " They are taken on both paths."
RESPONSES = """
## Responses

Fields of `POST /v1/responses`. [Serve](guides/serve.md#responses) tells what the path does.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for treatment, told in PARTS.items():
        more = ON_BOTH if treatment is Treatment.TAKEN else ""
        parts.append(f"\n## {treatment.value.capitalize()}\n\n{told}{more}\n\n")
        parts += table(FIELDS, treatment, ("chat", "completions"))
    parts.append(RESPONSES)
    for treatment, told in PARTS.items():
        parts.append(f"\n### {treatment.value.capitalize()} in responses\n\n{told}\n\n")
        parts += table(RESPONSE_FIELDS, treatment, ())
    return "".join(parts)


def table(rows: tuple[RequestField, ...], treatment: Treatment, paths: tuple[str, ...]) -> list[str]:
    """Lines of a table, with a column for each of some paths."""
    refused = treatment is Treatment.REFUSED
    heads = ["field", "of", *paths, *(["values that are accepted", "why, and what to do"] if refused else ["notes"])]
    chosen = sorted((row for row in rows if row.treatment is treatment), key=lambda row: row.name)
    return [f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|\n", *(line(row, paths) for row in chosen)]


def line(row: RequestField, paths: tuple[str, ...]) -> str:
    """One row of a table."""
    cells = [f"`{row.name}`", row.origin, *("yes" if path in row.paths else "-" for path in paths)]
    if row.treatment is Treatment.REFUSED:
        cells.append(", ".join(f"`{json_of(value)}`" for value in row.neutral) or "-")
    return f"| {' | '.join([*cells, row.note.replace('|', chr(92) + '|')])} |\n"


def json_of(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
