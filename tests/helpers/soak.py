"""Requests of every kind and fate, many at a time, from several threads: every text is right, and nothing is left.

python -m tests.helpers.soak --requests 100000
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastspec import FastSpecGenerator, GenerateOutput
from fastspec.demo import demo_pair
from tests.helpers.services import opened, small_pair

FATES = ("result", "iterate", "cancel", "leave", "drop", "wait")
LONGEST, USUAL = 48, 8  # new tokens
SHARE = 200  # requests between two looks at what is left


@dataclass
class Kind:
    """A request that comes again and again, and the text that it has alone."""

    prompt: list[int]
    options: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    reason: str = ""


@dataclass
class Soak:
    """What was seen."""

    gen: FastSpecGenerator
    kinds: list[Kind]
    fates: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, gen: FastSpecGenerator, count: int, seed: int = 0) -> Soak:
        rng, kinds = random.Random(seed), []
        for index in range(count):
            prompt = [rng.randrange(256) for _ in range(rng.choice([1, 3, 17, 64, 70]))]
            options: dict[str, Any] = {"max_new_tokens": 1 + int(min(rng.expovariate(1 / USUAL), LONGEST - 1))}
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
            kinds.append(kind)
        return cls(gen, kinds)

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

    def check(self, kind: Kind, output: GenerateOutput, *, cancelled: bool) -> None:
        if cancelled and output.finish_reasons == ["cancelled"]:
            assert output.new_tokens[0] == kind.tokens[: len(output.new_tokens[0])]
        else:
            assert (output.new_tokens[0], output.finish_reasons[0]) == (kind.tokens, kind.reason)

    def check_empty(self) -> None:
        """Messages are obeyed in their order: what came before this request is done."""
        self.gen.submit([1], max_new_tokens=1).result()
        session = self.gen._open()
        assert not session.loop.deliveries
        assert not session.loop._keys
        assert not session.loop._calls
        assert session.scheduler.idle
        session.engine.pages.check_integrity()
        assert session.engine.pages.num_free + session.engine.pages.num_idle == session.engine.pages.num_pages - 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="another one gives other requests")
    parser.add_argument("--seconds", type=float, default=1e9, help="no further requests after so long")
    parser.add_argument("--small", action="store_true", help="a pair of random weights, in place of the shipped one")
    given = parser.parse_args()
    start, done = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        pair = small_pair(Path(folder)) if given.small else demo_pair()
        with opened(pair, max_batch_size=given.rows, max_length=256) as gen:
            soak = Soak.of(gen, 60, given.seed)
            while done < given.requests and time.monotonic() - start < given.seconds:
                part = min(SHARE, given.requests - done)
                soak.run(part, given.threads, given.seed + done)
                done += part
                print(f"{done} requests right after {time.monotonic() - start:.0f} s", flush=True)
    took = time.monotonic() - start
    print(f"{done} requests in {took:.0f} s, all texts right, nothing left: {sum(soak.fates.values())} {soak.fates}")


if __name__ == "__main__":
    main()
