"""Torch definition of draft tokens by lookup: the tokens that followed an earlier occurrence of a row's last tokens.

Occurrences are searched in the row itself, in its prediction, and in texts that rows share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

GAP = 8  # largest number of last tokens that may be an edit, so that the text before them tells where a copy goes on
ANCHOR = 3  # smallest number of tokens before such a difference that must match
ANCHOR_MOST = 16  # number of matching tokens before a difference that are counted at most
LOOKED_AT = 8  # number of occurrences that are compared: the latest ones


@dataclass(frozen=True, slots=True)
class TextTable:
    """Tokens of several texts, and a sorted index of the hashes of their n-grams.

    The index has every n-gram for each n in `rungs`. An n-gram's hash is this sum, with i = 0 for its last token:

        sum over its tokens of (token + 1) * factors[i]  +  (owner + 1) * factors[-2]  +  n * factors[-1]

    Attributes:
        tokens: int64 [C], the texts one after the other.
        texts: int64 [C], number of the text that each token belongs to; -1: none.
        owners: int64 [C], number of the owner of that text. A row finds only texts of the owner that it names.
        keys: int64 [C * len(rungs)], hashes of the n-grams, ascending.
        places: int64, like `keys`: index in `tokens` of the token after each n-gram. Ascending among equal hashes.
        factors: int64 [rungs[-1] + 2], factors of the hash.
        lengths: int64 [len(rungs)]: `rungs` on the device.
        rungs: the indexed n, ascending, each at least 1.
    """

    tokens: Tensor
    texts: Tensor
    owners: Tensor
    keys: Tensor
    places: Tensor
    factors: Tensor
    lengths: Tensor
    rungs: tuple[int, ...]

    def of_owner(self, owners: Tensor) -> Tensor:
        """Returns the term that each owner number (int64, any shape) adds to the hash of an n-gram."""
        return (owners + 1) * self.factors[-2]


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predicted outputs, one text for each row. The row's answer is likely to repeat large parts of this text.

    Attributes:
        tokens: int64 [B, R], tokens of the predictions, R >= 1.
        lengths: int64 [B], number of tokens of each prediction. 0: the row has none.
        prompt_lengths: int64 [B], number of tokens of each row's prompt.
        weight: factor of the strength of a match, see `look_up`.
    """

    tokens: Tensor
    lengths: Tensor
    prompt_lengths: Tensor
    weight: float = 2.0


@dataclass(frozen=True, slots=True)
class SharedTexts:
    """Texts that several rows may repeat.

    Attributes:
        table: the texts.
        owners: int64 [B], the owner whose texts each row may find.
        weight: factor of the strength of a match, see `look_up`.
    """

    table: TextTable
    owners: Tensor
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class LookUp:
    """Arguments of `Ops.look_up`.

    Attributes:
        tokens: int64 [B, T], tokens of prompt and output. Only the first lengths[b] of row b are valid.
        lengths: int64 [B], at least 1.
        min_n, max_n: smallest and largest number of last tokens that must match an earlier occurrence.
        prediction: predicted outputs of the rows. None: there are none.
        texts: shared texts.
        per_match: largest number of draft tokens for each token that matches, except in predictions. None: no limit.
        row_weight: factor of the strength of a match in the row itself, see `look_up`.
    """

    tokens: Tensor
    lengths: Tensor
    min_n: int
    max_n: int
    prediction: Predictions | None = None
    texts: tuple[SharedTexts, ...] = ()
    per_match: int | None = None
    row_weight: float = 1.0

    @property
    def weights(self) -> tuple[float, ...]:
        """Weights of the sources, in this order: the row itself, its prediction if there is one, the shared texts."""
        predicted = () if self.prediction is None else (self.prediction.weight,)
        return self.row_weight, *predicted, *(shared.weight for shared in self.texts)


@dataclass(frozen=True, slots=True)
class RepeatedText:
    """One text for each row, which the row may repeat. Arguments of `follow`.

    Attributes:
        tokens: int64 [B, R], R >= 1.
        lengths: int64 [B], number of tokens of each text that count.
        expected: int64 [B], place at which the row goes on in the text if no match tells more.
    """

    tokens: Tensor
    lengths: Tensor
    expected: Tensor


def look_up(call: LookUp, k: int) -> tuple[Tensor, Tensor]:
    """Proposes up to k draft tokens for each row, from the source with the strongest match.

    Sources are the row's prediction, the row itself, and the shared texts. The strength of a match is its number of
    matching tokens times the weight of its source, in float32. A match without draft tokens has strength 0. If several
    are equally strong, the first source in this order is taken: prediction, row, shared texts.

    Args:
        call: the rows, and the texts to search.
        k: number of draft tokens.

    Returns:
        Draft tokens int64 [B, k], and the number of valid draft tokens of each row, int64 [B]. It is 0 without a match.
    """
    tokens, lengths, per_match = call.tokens, call.lengths, k if call.per_match is None else call.per_match
    start, run = follow(call, RepeatedText(tokens, lengths, lengths))
    found = [(_copied(tokens, lengths, start, k), (run * per_match).clamp(max=k), run)]  # drafts, counts, matching
    if (given := call.prediction) is not None:
        source = RepeatedText(given.tokens, given.lengths, lengths - given.prompt_lengths)
        found.append(_from_prediction(given, follow(call, source), k))
    back = lengths[:, None] - 1 - torch.arange(call.max_n, device=tokens.device)
    recent, known = tokens.gather(1, back.clamp_min(0)), back >= 0
    for shared in call.texts:
        drafts, counts, run = look_up_text(shared.table, recent, known, shared.owners, k)
        found.append((drafts, torch.minimum(counts, run * per_match), run))
    drafts, counts, matching = (torch.stack(each, dim=1) for each in zip(*found, strict=True))
    strengths = [one.float() * weight for one, weight in zip(matching.unbind(1), call.weights, strict=True)]
    best = _strongest(torch.stack(strengths, dim=1), call.prediction is not None)
    return drafts.gather(1, best[..., None].expand(-1, 1, k))[:, 0], counts.gather(1, best)[:, 0]


def _strongest(strengths: Tensor, predicted: bool) -> Tensor:
    """Returns the index of each row's strongest source, int64 [B, 1].

    Args:
        strengths: float32 [B, sources], in the order of `LookUp.weights`.
        predicted: True if source 1 is the prediction. It comes first among equally strong ones, then the lowest index.
    """
    order = torch.arange(strengths.shape[1], 0, -1, device=strengths.device)
    if predicted:
        order = torch.where(order == len(order) - 1, len(order) + 1, order)
    strongest = strengths == strengths.amax(dim=1, keepdim=True)
    return torch.where(strongest, order, 0).argmax(dim=1)[:, None]


def _copied(tokens: Tensor, lengths: Tensor, start: Tensor, k: int) -> Tensor:
    """Returns the k tokens of each row from position `start` on.

    A row with fewer than k tokens there repeats them: start .. length - 1, then again from `start` on.

    Args:
        tokens: int64 [B, T], tokens of the rows.
        lengths: int64 [B], number of tokens of each row.
        start: int64 [B], position of the first token that is returned.
        k: number of tokens to return.

    Returns:
        int64 [B, k].
    """
    period = (lengths - start).clamp_min(1)
    offsets = torch.arange(k, device=tokens.device) % period[:, None]
    return tokens.gather(1, start[:, None] + offsets)


def _from_prediction(prediction: Predictions, places: tuple[Tensor, Tensor], k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Proposes the tokens of each row's prediction from the place on that `follow` found.

    Args:
        prediction: predicted outputs of the rows.
        places: result of `follow`.
        k: number of draft tokens.

    Returns:
        Draft tokens [B, k], the number of valid ones [B], and the number of matching tokens [B]; 0 without drafts.
    """
    place, matched = places
    at = place[:, None] + torch.arange(k, device=place.device)
    drafts = prediction.tokens.gather(1, at.clamp(max=prediction.tokens.shape[1] - 1))
    counts = torch.where(matched > 0, (prediction.lengths - place).clamp(0, k), 0)
    return drafts, counts, torch.where(counts > 0, matched, 0)


def follow(call: LookUp, source: RepeatedText) -> tuple[Tensor, Tensor]:
    """Finds the place in a source at which each row continues.

    1. The expected place. Without its last g tokens, g = 1 .. `GAP`, the row may end with tokens that occur in the
       source: at least `ANCHOR` of them, and at least min_n. The longest such match is the anchor; matching tokens
       above `ANCHOR_MOST` do not count. Of equally long ones the anchor with the smallest g is taken, then the one
       nearest to `source.expected`, then the first. The expected place is g tokens after it. Without an anchor it is
       `source.expected`. The first `GAP` places of a source need no anchor.
    2. The longest match of the row's last tokens, min_n to max_n of them. Of equally long ones the nearest to the
       expected place is taken, then the first.
    3. Without such a match, but with an anchor: the longest match at most `GAP` places from the expected place, chosen
       as in 2. If there is none, the expected place itself.

    Args:
        call: the rows.
        source: the text to search for each row.

    Returns:
        The index of the next token in the source, int64 [B], and the number of tokens that match before it,
        int64 [B]: at least 1, or 0 if no place was found.
    """
    ends, room, min_n = source.lengths, source.tokens.shape[1], call.min_n
    place, runs = torch.arange(room, device=ends.device), _runs(call, source)
    back = torch.arange(1, GAP + 1, device=ends.device)[:, None]
    shifted, anchors = place + back, runs[:, 1 : GAP + 1]
    near = room - (shifted - source.expected[:, None, None]).abs().clamp(max=room)
    score = ((anchors.clamp(max=ANCHOR_MOST).long() * (GAP + 1) + GAP - back) * (room + 1) + near) * (room + 1)
    usable = (anchors >= max(ANCHOR, min_n)) & (shifted < ends[:, None, None])
    anchor = torch.where(usable, score + room - place, 0).flatten(1).amax(dim=1)
    gap = GAP - anchor // (room + 1) ** 2 % (GAP + 1)
    expected = torch.where(anchor > 0, room - anchor % (room + 1) + gap, source.expected)
    found = (anchor > 0) | ((source.expected <= GAP) & (source.expected < ends))
    distance, run = (place - expected[:, None]).abs(), runs[:, 0].clamp(max=call.max_n).long()
    close = found[:, None] & (run >= 1) & (distance <= GAP)
    score = (run * (room + 1) + room - distance.clamp(max=room)) * (room + 1) + room - place
    best, index = torch.where((run >= min_n) | close, score, 0).max(dim=1)
    hit = best > 0
    matched = torch.where(hit, run.gather(1, index[:, None])[:, 0], found.long())
    return torch.where(hit, index, expected.clamp(0, room - 1)), torch.where(ends > 0, matched, 0)


def _runs(call: LookUp, source: RepeatedText) -> Tensor:
    """Counts the tokens before each place of a source that equal the end of its row, less its last j tokens.

    Returns int32 [B, J, R] for j = 0 .. J - 1, where J > `GAP` + `ANCHOR_MOST` and J > max_n. A number is at most
    J - j.
    """
    room, depth = source.tokens.shape[1], max(GAP + ANCHOR_MOST, call.max_n) + 1
    place, j = (torch.arange(count, device=call.lengths.device) for count in (room, depth))
    at = call.lengths[:, None] - 1 - j
    same = pad(source.tokens, (1, 0))[:, None, :room] == call.tokens.gather(1, at.clamp_min(0))[:, :, None]
    same &= ((place >= 1) & (place < source.lengths[:, None]))[:, None] & (at >= 0)[:, :, None]
    # place p of j lies in column p + j: so does the place whose run it makes longer, p - 1 of j + 1
    width = room + depth
    columns = torch.zeros(len(same), depth, width, dtype=torch.int32, device=same.device)
    runs = columns.as_strided(same.shape, (depth * width, width + 1, 1))
    runs.copy_(same)
    of_end = columns.unbind(1)
    for one, longer in zip(of_end[-2::-1], of_end[:0:-1], strict=True):
        one.addcmul_(longer, one)
    return runs


def look_up_text(
    table: TextTable, recent: Tensor, known: Tensor, owners: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Finds the latest occurrences of each row's last tokens in the texts, and proposes their most common continuation.

    Of the indexed n, the largest one is used for which the row's last n tokens occur. Of the latest `LOOKED_AT`
    occurrences, those count before which most tokens match. The draft is the continuation that shares most tokens with
    the continuations of the others. It ends before the first token that fewer than a quarter of them share.

    Args:
        table: the texts.
        recent: int64 [B, W], last tokens of each row, the last one first; W is the largest indexed n.
        known: bool [B, W], False where the row has no such token.
        owners: int64 [B], the owner whose texts each row may find.
        k: number of draft tokens.

    Returns:
        Draft tokens int64 [B, k], the number of valid ones int64 [B], and the number of tokens that match before them,
        int64 [B]; 0 for none.
    """
    capacity = len(table.tokens)
    found, matched = _occurrences(table, recent, known, owners)
    best = matched.amax(dim=1)
    counted = (matched == best[:, None]) & (best > 0)[:, None]
    after = found[:, :, None] + torch.arange(k, device=found.device)  # [B, M, k]
    inside = after < capacity
    after = after.clamp(max=capacity - 1)
    alive = inside & (table.texts[after] == table.texts[found][:, :, None]) & counted[:, :, None]
    follows = table.tokens[after]
    equal = (follows[:, :, None] == follows[:, None]) & alive[:, :, None] & alive[:, None]  # [B, M, M, k]
    shared = equal.long().cumprod(dim=3).sum(dim=2)  # [B, M, k]: occurrences that go on in the same way so far
    order = torch.arange(found.shape[1], device=found.device)
    score = (shared.sum(dim=2) * len(order) + len(order) - order) * counted  # the latest of equally good ones
    chosen = score.argmax(dim=1)[:, None, None].expand(-1, 1, k)
    enough = shared.gather(1, chosen)[:, 0] * 4 >= counted.sum(dim=1)[:, None]
    counts = (enough & alive.gather(1, chosen)[:, 0]).long().cumprod(dim=1).sum(dim=1)
    return follows.gather(1, chosen)[:, 0], counts, torch.where(counts > 0, best, 0)


def _occurrences(table: TextTable, recent: Tensor, known: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
    """Finds the latest M = `LOOKED_AT` occurrences of each row's last tokens, the latest first.

    Args:
        table, recent, known, owners: see `look_up_text`.

    Returns:
        The index in `table.tokens` after each occurrence, int64 [B, M], and the number of tokens that match before it,
        int64 [B, M]; 0 if there is no such occurrence.
    """
    rungs, width = table.lengths, table.rungs[-1]
    hashed = ((recent + 1) * table.factors[:width]).cumsum(dim=1)[:, rungs - 1]
    key = hashed + table.of_owner(owners)[:, None] + rungs * table.factors[-1]
    low, high = torch.searchsorted(table.keys, key), torch.searchsorted(table.keys, key, right=True)
    hits = (high > low) & known[:, rungs - 1]
    rung = (hits * torch.arange(1, len(table.rungs) + 1, device=key.device)).amax(dim=1)
    at = (rung - 1).clamp_min(0)[:, None]
    index = high.gather(1, at) - 1 - torch.arange(LOOKED_AT, device=key.device)
    valid = (index >= low.gather(1, at)) & (rung > 0)[:, None]
    places = table.places[index.clamp(0, len(table.keys) - 1)]
    before = places[:, :, None] - 1 - torch.arange(width, device=key.device)
    same = (before >= 0) & known[:, None]
    before = before.clamp_min(0)
    same &= (table.tokens[before] == recent[:, None]) & (table.texts[before] == table.texts[places][:, :, None])
    run = same.long().cumprod(dim=2).sum(dim=2)
    valid &= (table.owners[places] == owners[:, None]) & (table.texts[places] >= 0) & (run >= table.rungs[0])
    return places, torch.where(valid, run, 0)
