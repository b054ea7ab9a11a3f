"""Writes docs/options.md from the table of options: `python -m tools.options_page`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from fastspec.inputs.table import ADVICE, ARGUMENTS, IGNORED, OFF, OPTIONS, Flag, Option

PAGE = Path(__file__).parents[1] / "docs/options.md"

HEAD = """# Options of a call

Keywords of `generate`, `stream` and `submit`. Names that transformers has mean what they mean there. Keywords come
before `generation_config=`, that before the checkpoint's `generation_config.json`, and that before the defaults below.
In the column *per prompt*, "yes" means that a list with one value per prompt is accepted too. A dash in the last two
columns: the command line, or the server, has no such option.

<!-- Written by tools/options_page.py from fastspec/inputs/table.py: change that table. -->
"""

REFUSED = """
## What is refused

An option that is not listed above is refused with `UnsupportedOption`, never ignored, unless it has a value that
changes nothing.

| option of transformers | accepted | otherwise |
|---|---|---|
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for group, rows in groupby(OPTIONS, key=lambda option: option.group):
        parts.append(
            f"\n## {group}\n\n| keyword | type | default | values | per prompt | meaning | flag | request field |\n"
            "|---|---|---|---|---|---|---|---|\n"
        )
        parts += [line(row) for row in rows]
    parts.append(REFUSED)
    parts += [
        f"| `{name}` | {', '.join(f'`{value!r}`' for value in values)} | refused |\n" for name, values in OFF.items()
    ]
    parts += [f"| `{name}` | unset | {told} |\n" for name, told in {**ADVICE, **ARGUMENTS}.items()]
    ignored = ", ".join(f"`{name}`" for name in sorted(IGNORED))
    parts.append(f"\nThese change nothing in the text of plain decoding, and are accepted with any value: {ignored}.\n")
    return "".join(parts)


def line(option: Option) -> str:
    """One row of a table."""
    cells = [f"`{option.keyword}`", option.type, default_of(option), values_of(option)]
    cells += ["yes" if option.per_row else "no", option.meaning, flag_of(option), field_of(option)]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def default_of(option: Option) -> str:
    return option.default or f"{option.number.neutral:g}" if option.number else option.default


def values_of(option: Option) -> str:
    return option.takes or f"{option.number.low:g} to {option.number.high:g}" if option.number else option.takes


def flag_of(option: Option) -> str:
    if not isinstance(option.flag, Flag):
        return f"`{option.flag}`" if option.flag.startswith("--") else "-"
    return f"`{option.flag.name or '--' + option.keyword.replace('_', '-')}`"


def field_of(option: Option) -> str:
    return "-" if option.field.startswith("-") else f"`{option.field}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
