"""`fastspec chat`: turns, the template, Ctrl-C, and what is said where there is no template."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fastspec import FastSpecGenerator
from fastspec.cli.app import app
from fastspec.cli.chat import Conversation, lines_typed
from fastspec.errors import InvalidLogits
from fastspec.scheduling.handle import Handle
from tests.helpers.services import opened, small_pair

pytestmark = pytest.mark.filterwarnings("ignore:drafting does not pay")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[Path, Path]]:
    return {
        told: small_pair(tmp_path_factory.mktemp(name), template=told)
        for told, name in ((True, "chat"), (False, "plain"))
    }


@pytest.fixture(scope="module")
def gen(pairs: dict[bool, tuple[Path, Path]]) -> Iterator[FastSpecGenerator]:
    with opened(pairs[True], max_length=200, max_batch_size=1) as made:
        yield made


def continued(gen: FastSpecGenerator, text: str, count: int) -> str:
    tokenizer: Any = gen.tokenizer
    output: Any = gen.generate([tokenizer(text)["input_ids"]], max_new_tokens=count, return_dict_in_generate=True)
    return str(tokenizer.decode(output.new_tokens[0], skip_special_tokens=True))


def test_a_conversation_goes_through_the_template(gen: FastSpecGenerator) -> None:
    pieces: list[str] = []
    talk = Conversation(gen, "be brief", 12, {})
    talk.answer("one", pieces.append)
    first = continued(gen, "<system>be brief\n<user>one\n<assistant>", 12)
    assert "".join(pieces) == first + "\n"
    assert len(pieces) > 3, "it comes piece by piece"
    pieces.clear()
    talk.answer("two", pieces.append)
    whole = f"<system>be brief\n<user>one\n<assistant>{first}\n<user>two\n<assistant>"
    assert "".join(pieces) == continued(gen, whole, 12) + "\n"
    talk.clear()
    assert talk.said == []


def test_ctrl_c_stops_the_answer_and_not_the_conversation(
    gen: FastSpecGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk, pieces = Conversation(gen, None, 100, {}), []

    def interrupted(piece: str) -> None:
        pieces.append(piece)
        if len("".join(pieces)) == 5:
            raise KeyboardInterrupt

    whole = continued(gen, "<user>one\n<assistant>", 100)
    talk.answer("one", interrupted)
    assert talk.said == [("user", "one"), ("assistant", whole[:5])]
    talk.answer("two", pieces.append)
    assert [who for who, _ in talk.said] == ["user", "assistant"] * 2
    assert gen._open().scheduler.idle or not gen._loop.deliveries


def test_a_long_conversation_loses_its_first_turns(gen: FastSpecGenerator, capsys: pytest.CaptureFixture[str]) -> None:
    talk = Conversation(gen, "brief", 10, {})
    for turn in range(6):
        talk.answer(f"{turn}" * 40, lambda piece: None)
    assert talk.said[0] == ("user", "4" * 40), "two turns have room, and their first side is the user's"
    assert "dropped its first turns" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"the message has \d+ tokens and --max-length is 200"):
        talk.answer("x" * 200, lambda piece: None)
    talk.answer("x", lambda piece: None)


def test_what_could_not_be_answered_was_not_said(gen: FastSpecGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would stand in every later prompt, and templates refuse two turns of one side."""
    talk = Conversation(gen, None, 5, {})
    talk.answer("one", lambda piece: None)
    before = list(talk.said)

    def failing(*given: Any, **options: Any) -> Any:
        raise InvalidLogits("no token could be chosen")

    with monkeypatch.context() as plant:
        plant.setattr(gen, "submit", failing)
        with pytest.raises(InvalidLogits):
            talk.answer("two", lambda piece: None)
    for text in ("x" * 300, "a\udcff"):  # too long, and no text
        with pytest.raises(ValueError, match=r"shorten it|which is no text"):
            talk.answer(text, lambda piece: None)
    assert talk.said == before


def test_a_template_that_refuses_is_no_end(gen: FastSpecGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    for fault, says in (("raise_exception('no system role')", "no system role"), ("1 / 0", "ZeroDivisionError: .*")):
        template = (
            "{% if messages[0].role == 'system' %}{{ " + fault + " }}{% endif %}{{ messages[-1].content }}<assistant>"
        )
        monkeypatch.setattr(gen.tokenizer, "chat_template", template)
        with pytest.raises(ValueError, match=f"the chat template refuses these messages: {says}; leave out --system"):
            Conversation(gen, "be brief", 5, {}).answer("one", lambda piece: None)
        Conversation(gen, None, 5, {}).answer("one", lambda piece: None)


def chatted(pair: tuple[Path, Path], text: str | bytes, *flags: str) -> Any:
    options = ["--draft", str(pair[1]), "--device", "cpu", "--max-length", "200", "--max-new-tokens", "8", *flags]
    return CliRunner().invoke(app, ["chat", str(pair[0]), *options], input=text)


def test_the_command(pairs: dict[bool, tuple[Path, Path]], gen: FastSpecGenerator) -> None:
    result = chatted(pairs[True], b"one\n\n/what\n/clear\n" + b"x" * 300 + b"\nno \xff text\none\n/bye\nnever\n")
    assert result.exit_code == 0, result.output
    answer = continued(gen, "<user>one\n<assistant>", 8)
    assert result.stdout == f"{answer}\n" * 2
    assert "by the checkpoint's chat template" in result.stderr
    assert "/what is no command" in result.stderr
    assert "shorten it" in result.stderr
    assert "which is no text" in result.stderr
    assert "tokens per step" in result.stderr
    drawn = [chatted(pairs[True], "one\n", "--temperature", "1", "--seed", "3").stdout for _ in range(2)]
    assert drawn[0] == drawn[1] != f"{answer}\n"


def test_without_a_template_it_continues_and_says_so(
    pairs: dict[bool, tuple[Path, Path]], gen: FastSpecGenerator
) -> None:
    result = chatted(pairs[False], "one\ntwo\n")
    assert result.exit_code == 0, result.output
    first = continued(gen, "one\n", 8)
    assert result.stdout == f"{first}\n{continued(gen, f'one{chr(10)}{first}{chr(10)}two{chr(10)}', 8)}\n"
    assert "has no chat template: it continues your text instead of answering" in result.stderr


def test_a_closed_stdin_is_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert list(lines_typed()) == []


def test_an_answer_that_is_not_stopped_goes_on(gen: FastSpecGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the cancel, the row would be busy until the end of the answer that nobody waits for."""
    monkeypatch.setattr(Handle, "cancel", lambda self: None)
    kept: list[Handle] = []
    submit = gen.submit

    def keeping(*arguments: Any, **options: Any) -> Handle:
        kept.append(submit(*arguments, **options))
        return kept[-1]

    monkeypatch.setattr(gen, "submit", keeping)

    first = iter([True])

    def interrupted(piece: str) -> None:
        if next(first, False):
            raise KeyboardInterrupt

    Conversation(gen, None, 100, {}).answer("one", interrupted)
    assert kept[0].result().finish_reasons != ["cancelled"]
