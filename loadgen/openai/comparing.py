"""Two runs of the same plan against each other, token by token.

Pure. Answers are compared where both runs asked the same prompt. After a session's first unlike answer its later
prompts are unlike too (they hold the answer), so what follows says nothing more and is only counted.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from loadgen.openai.records import RequestRecord


class Difference(msgspec.Struct, frozen=True):
    """Unlike answers to one prompt."""

    session: int
    turn: int
    at: int
    """The first unlike token (character where the server gave no ids), from 0."""
    cached_a: int | None
    """Prompt tokens that the server had cached, where it says: at unlike hits bfloat16 alone may change a token."""
    cached_b: int | None


class Comparison(msgspec.Struct, frozen=True):
    """What two runs have in common."""

    same: int
    """Requests with the same prompt and the same answer."""
    tokens: int
    """Output tokens in those."""
    different: tuple[Difference, ...]
    other_prompt: int
    """Asked with another prompt: after a difference, or other options."""
    only_a: int
    only_b: int
    failed: int
    """Failed in one run or both: not compared."""

    @property
    def is_same(self) -> bool:
        """Every request of either run was answered in both, alike, and there was at least one."""
        return self.same > 0 and not (self.different or self.other_prompt or self.only_a or self.only_b or self.failed)

    def lines(self) -> list[str]:
        """For a terminal."""
        told = [f"same answer   {self.same:,} requests, {self.tokens:,} tokens"]
        counts = (("different", len(self.different)), ("other prompt", self.other_prompt), ("only in A", self.only_a),
                  ("only in B", self.only_b), ("failed", self.failed))  # fmt: skip
        told += [f"{name:13} {count:,} requests" for name, count in counts if count]
        for one in self.different[:5]:
            cached = "" if one.cached_a is None else f" (cached prompt tokens: {one.cached_a} and {one.cached_b})"
            told.append(f"  session {one.session} turn {one.turn}: first unlike at {one.at}{cached}")
        return told


def compare(record_a: Iterable[RequestRecord], record_b: Iterable[RequestRecord]) -> Comparison:
    """Match requests by session and turn and compare what they were answered; ValueError for a request twice."""
    a, b = _by_key("A", record_a), _by_key("B", record_b)
    same = tokens = other_prompt = failed = 0
    different: list[Difference] = []
    for key in sorted(a.keys() & b.keys()):
        one, other = a[key], b[key]
        if one.failure or other.failure:
            failed += 1
        elif one.prompt_digest != other.prompt_digest:
            other_prompt += 1
        elif (at := _first_unlike(one, other)) is None:
            same += 1
            tokens += one.output_tokens
        else:
            different.append(Difference(*key, at, one.cached_tokens, other.cached_tokens))
    return Comparison(
        same, tokens, tuple(different), other_prompt, len(a.keys() - b.keys()), len(b.keys() - a.keys()), failed
    )


def _by_key(name: str, records: Iterable[RequestRecord]) -> dict[tuple[int, int], RequestRecord]:
    found: dict[tuple[int, int], RequestRecord] = {}
    for record in records:
        if record.key in found:
            raise ValueError(f"record {name}: session {record.session} turn {record.turn} twice, expected once")
        found[record.key] = record
    return found


def _first_unlike(one: RequestRecord, other: RequestRecord) -> int | None:
    has_ids = one.token_ids is not None and other.token_ids is not None
    a, b = (one.token_ids, other.token_ids) if has_ids else (one.text, other.text)
    assert a is not None
    assert b is not None
    if a == b and one.finish == other.finish:
        return None
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
