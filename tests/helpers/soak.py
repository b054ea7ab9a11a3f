"""Requests of every kind and fate, many at a time, from several threads: every text is right, and nothing is left.

python -m tests.helpers.soak --requests 100000
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastspec import FastSpecGenerator, GenerateOutput
from fastspec.demo import demo_pair
from tests.helpers.limits import HANGS
from tests.helpers.services import opened, small_pair
from tests.helpers.soak_http import FATES as HTTP_FATES
from tests.helpers.soak_http import ask, body_of, served

FATES = ("result", "iterate", "cancel", "leave", "drop", "wait")
LONGEST, USUAL = 48, 8  # new tokens
SHARE = 500  # requests between two looks at what is left


@dataclass
class Kind:
    """A request that comes again and again, and the text that it has alone."""

    prompt: list[int]
    options: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    reason: str = ""
    text: str = ""  # over HTTP


@dataclass
class Soak:
    """What was seen."""

    gen: FastSpecGenerator
    kinds: list[Kind]
    fates: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    port: int | None = None  # of a server: a third of the requests go there

    @classmethod
    def of(
        cls, gen: FastSpecGenerator, count: int, seed: int = 0, usual: float = USUAL, port: int | None = None
    ) -> Soak:
        rng, kinds = random.Random(seed), []
        for index in range(count):
            prompt = [rng.randrange(256) for _ in range(rng.choice([1, 3, 17, 64, 70]))]
            options: dict[str, Any] = {"max_new_tokens": 1 + int(min(rng.expovariate(1 / usual), LONGEST - 1))}
            if index % 3 == 1:
                options |= {"do_sample": True, "temperature": 0.9, "seed": index}
            if index % 4 == 2:
                options |= {"num_speculative_tokens": rng.choice([0, 1, 3])}
            if index % 5 == 3:
                options |= {"stop_strings": ["a", "the"], "repetition_penalty": 1.2}
            kind = Kind(prompt, options)
            output = gen.generate([prompt], return_dict_in_generate=True, **options)
            assert isinstance(output, GenerateOutput)
            kind.tokens, kind.reason = output.new_tokens[0], output.finish_reasons[0]
            if port is not None:
                kind.text = ask(port, body_of(prompt, options), "answer") or ""
            kinds.append(kind)
        return cls(gen, kinds, port=port)

    def run(self, requests: int, threads: int, seed: int = 0) -> None:
        """Makes so many requests from so many threads; raises AssertionError at the first wrong text."""
        with ThreadPoolExecutor(threads) as pool:
            each = [requests // threads + (index < requests % threads) for index in range(threads)]
            for done in [pool.submit(self.client, count, seed * 1000 + index) for index, count in enumerate(each)]:
                done.result()
        self.check_empty()

    def client(self, requests: int, seed: int) -> None:
        rng, open_handles = random.Random(seed), []
        for _ in range(requests):
            kind, fate = rng.choice(self.kinds), rng.choice(FATES)
            if self.port is not None and rng.random() < 1 / 3:
                self.over_http(kind, rng.choice(HTTP_FATES))
                continue
            handle = self.gen.submit(kind.prompt, **kind.options)
            with self.lock:
                self.fates[fate] = self.fates.get(fate, 0) + 1
            if fate == "wait":
                open_handles.append((kind, handle))
            elif fate == "iterate":
                assert list(handle) == kind.tokens
            elif fate == "leave":
                seen = []
                for token in handle:
                    seen.append(token)
                    if len(seen) == 3:
                        break
                assert seen == kind.tokens[: len(seen)]
            elif fate != "drop":
                if fate == "cancel":
                    handle.cancel()
                self.check(kind, handle.result(), cancelled=fate == "cancel")
            while len(open_handles) > rng.randint(0, 6):
                kind, handle = open_handles.pop(rng.randrange(len(open_handles)))
                self.check(kind, handle.result(), cancelled=False)
        for kind, handle in open_handles:
            self.check(kind, handle.result(), cancelled=False)

    def over_http(self, kind: Kind, fate: str) -> None:
        assert self.port is not None
        with self.lock:
            self.fates[fate] = self.fates.get(fate, 0) + 1
        text = ask(self.port, body_of(kind.prompt, kind.options), fate)
        assert text in (None, kind.text), (text, kind.text)

    def check(self, kind: Kind, output: GenerateOutput, *, cancelled: bool) -> None:
        if cancelled and output.finish_reasons == ["cancelled"]:
            assert output.new_tokens[0] == kind.tokens[: len(output.new_tokens[0])]
        else:
            assert (output.new_tokens[0], output.finish_reasons[0]) == (kind.tokens, kind.reason)

    def check_empty(self) -> None:
        """Messages are obeyed in their order: what came before this request is done.

        A server may learn late that a client is gone; its requests come to their ends then, which is waited for.
        """
        loop, end = self.gen._open(), time.monotonic() + HANGS
        while loop.deliveries and self.port is not None and time.monotonic() < end:
            self.gen.submit([1], max_new_tokens=1).result()
        self.gen.submit([1], max_new_tokens=1).result()
        assert not loop.deliveries
        assert not loop._keys
        assert not loop._plans
        assert loop.scheduler.idle
        loop.engine.pages.check_integrity()
        assert loop.engine.pages.num_free + loop.engine.pages.num_idle == loop.engine.pages.num_pages - 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="another one gives other requests")
    parser.add_argument("--seconds", type=float, default=1e9, help="no further requests after so long")
    parser.add_argument("--usual", type=float, default=USUAL, help="new tokens in the mean")
    parser.add_argument("--http", action="store_true", help="a third of the requests go to a server")
    parser.add_argument("--small", action="store_true", help="a pair of random weights, in place of the shipped one")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("SIGTERM"))
    start, row = time.monotonic(), {"bench": "soak", "seed": given.seed, "http": given.http, "requests": 0}
    try:
        _soak(given, start, row)
        row["status"] = "all texts right, nothing left"
    except BaseException as error:
        row["status"] = f"failed: {error!r}"[:500]
        raise
    finally:  # whatever happens: one line for who counts
        print(json.dumps({**row, "seconds": round(time.monotonic() - start)}), flush=True)


def _soak(given: argparse.Namespace, start: float, row: dict[str, Any]) -> None:
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        pair = small_pair(folder) if given.small else demo_pair()
        gen = held.enter_context(opened(pair, max_batch_size=given.rows, max_length=256))
        port = held.enter_context(served(gen)) if given.http else None
        soak = Soak.of(gen, 40, given.seed, given.usual, port)
        row["fates"] = soak.fates
        while row["requests"] < given.requests and time.monotonic() - start < given.seconds:
            part = min(SHARE, given.requests - row["requests"])
            soak.run(part, given.threads, given.seed * 1_000_003 + row["requests"])
            row["requests"] += part
        assert sum(soak.fates.values()) == row["requests"]


if __name__ == "__main__":
    main()
