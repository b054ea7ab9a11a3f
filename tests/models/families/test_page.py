"""The page of model types is what a trial of each gives: native, hosted or refused, and why."""

from __future__ import annotations

import pytest
from transformers import CONFIG_MAPPING

from tests.helpers import model_table
from tests.helpers.versions import OLDER


@pytest.mark.slow
@pytest.mark.skipif(OLDER, reason="the page is that of a newer transformers")
def test_the_page_of_model_types_is_what_a_trial_of_each_gives() -> None:
    now = model_table.page()
    assert "DIFFERS" not in now
    assert model_table.PAGE.read_text(encoding="utf-8") == now


@pytest.mark.slow
@pytest.mark.skipif(not OLDER, reason="the page is that of this transformers")
def test_an_older_transformers_hosts_what_the_page_says_or_it_is_refused() -> None:
    model_table.be_quiet()
    hosted = {name: row for name, row in model_table.published().items() if row.verdict == "hosted"}
    found = {name: model_table.entry(name) for name in hosted if name in CONFIG_MAPPING}
    assert len(found) > 60
    assert {name for name, row in found.items() if row != hosted[name] and row.verdict != "refused"} == set()
    assert sum(row.verdict == "refused" for row in found.values()) < 8
