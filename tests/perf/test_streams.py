"""`python -m perf servers`: what its figures are made of, and servers that cannot take part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fastspec import FastSpecGenerator
from perf.pairs import unplanted
from perf.servers import PAGE, Answer, Line, answer_of, copied, ours, theirs, written
from perf.serving import Turn, compared, share_of, summary
from perf.workloads import WORKLOADS


def event(text: str | None, tokens: int | None = None) -> bytes:
    told: dict[str, object] = {"choices": [] if text is None else [{"text": text}]}
    return json.dumps(told | ({"usage": {"completion_tokens": tokens}} if tokens else {"usage": None})).encode()


def test_an_answer_is_the_pieces_that_have_text() -> None:
    found = answer_of(1.0, [(1.5, event("a")), (1.6, event("")), (1.75, event("bc")), (1.8, event(None, 7))])
    assert found == Answer(1.0, [1.5, 1.75], "abc", 7)
    with pytest.raises(RuntimeError, match="without text"):
        answer_of(1.0, [(1.5, event(None, 7))])
    with pytest.raises(RuntimeError, match="too late"):
        answer_of(1.0, [(1.5, json.dumps({"error": {"message": "too late"}}).encode())])


def test_figures_of_a_server_and_what_it_is_compared_with() -> None:
    mine = Turn([Answer(0.0, [1.0, 2.0], "a", 10), Answer(0.0, [2.0, 5.0], "b", 10)], cpu=2.0, load=0.5)
    other = Turn([Answer(0.0, [4.0, 10.0], "a", 10), Answer(0.0, [4.0, 10.0], "c", 10)], cpu=4.0, load=0.5)
    row = summary([mine], [other])
    assert (row["tok_s"], row["tok_cpu_s"], row["over_peer"]) == (4.0, 10.0, 2.0)
    assert (row["first_ms"], row["gap_ms"]) == ([2000.0, 2000.0], [3000.0, 3000.0])
    assert (row["tokens_a_piece"], row["texts_as_peer"]) == (5.0, "1 of 2")
    assert "over_peer" not in summary([mine], None)
    assert [share_of([3.0, 1.0, 2.0, 4.0], share) for share in (0.0, 0.5, 0.99)] == [1.0, 3.0, 4.0]


def test_a_server_that_cannot_take_part_says_why(tmp_path: Path) -> None:
    gone = Line("gone", ["-c", "raise SystemExit(3)"], "model")
    assert list(compared([gone], [["x"]], 4, ())) == [{"how": "gone", "status": "failed: it ended with 3"}]


def test_servers_are_started_for_what_is_asked(tmp_path: Path) -> None:
    shape = {"rows": 32, "length": 300, "device": "cpu"}
    assert "--draft" not in ours(tmp_path, None, k=0, **shape).arguments  # type: ignore[arg-type]
    assert ours(tmp_path, tmp_path, k=4, **shape).name == "fastspec serve, 4 drafts a step"  # type: ignore[arg-type]
    peer = theirs(tmp_path, **shape).arguments  # type: ignore[arg-type]
    pages = int(peer[peer.index("--cb-num-blocks") + 1])
    assert pages * PAGE >= 32 * 300


def test_a_copied_checkpoint_ends_no_text(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    for name in ("config.json", "generation_config.json"):
        (tmp_path / "from" / name).write_text(json.dumps({"eos_token_id": 0, "other": 1}))
    place = copied(tmp_path / "from", tmp_path / "to")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((place / name).read_text()) == {"eos_token_id": None, "other": 1}


@pytest.mark.filterwarnings("ignore:the tokenizers:UserWarning")
def test_a_written_checkpoint_is_the_live_model(tmp_path: Path) -> None:
    config = WORKLOADS["tiny"].config("draft")  # its head is tied to its embedding
    live = unplanted(config, torch.float32, "cpu")
    options = {"max_length": 64, "progress": False, "device": "cpu"}
    asked = {"max_new_tokens": 6, "return_dict_in_generate": True}
    texts = []
    for model in (live, written(live, tmp_path / "model")):
        with FastSpecGenerator(model, **options) as generator:  # type: ignore[arg-type]
            texts.append(generator.generate([[3, 1, 4]], **asked).new_tokens)  # type: ignore[arg-type, union-attr]
    assert texts[0] == texts[1]
    assert len(texts[0][0]) == 6
