"""The search for candidates: pFedHR's Algorithm 1 and its four rules.

R1, order: every block comes from a later place (of its own network) than the one before. R2, operations: after a dense
block no convolution. R3, completeness: at least one convolution and one dense block. R4, diversity: every group.

What the paper leaves open: groups are visited by the mean place of their blocks, a group's blocks by place, then owner,
and every block that R1 and R2 allow is taken.
"""

from collections.abc import Sequence

import numpy as np

from fedjax_mr.strategies.pfedhr.chains import Block

Candidate = tuple[int, ...]
"""Positions in a list of blocks, in the order of the candidate."""

NUM_RANDOM, LENGTHS, TRIES = 4, (4, 5, 6), 1000  # of the authors' sampler


def may_follow(after: Block, before: Block) -> bool:
    """Return whether R1 and R2 allow a block ``after`` the block ``before``."""
    return after.index > before.index and (before.kind, after.kind) != ("fc", "conv")


def is_complete(blocks: Sequence[Block]) -> bool:
    """Return whether R3 holds."""
    return {block.kind for block in blocks} >= {"conv", "fc"}


def by_rules(blocks: Sequence[Block], groups: np.ndarray, *, most: int, rng: np.random.Generator) -> list[Candidate]:
    """Return the candidates that start from each block in turn, without doubles, at most ``most``.

    Where no candidate has blocks of every group, R4 is dropped; the list is empty where the other rules leave none.

    Args:
      blocks: L blocks of the kinds ``conv`` and ``fc``.
      groups: the group of each block [L].
      most: of more candidates a random choice is kept, in their order.
      rng: the source of that choice.
    """
    place = {group: np.mean([block.index for block, own in zip(blocks, groups, strict=True) if own == group])
             for group in set(groups.tolist())}  # fmt: skip
    visited = sorted(range(len(blocks)), key=lambda i: (place[groups[i]], groups[i], blocks[i].index, blocks[i].owner))
    found: dict[Candidate, None] = {}
    for seed in visited:
        chosen = [seed]
        for i in visited:
            if may_follow(blocks[i], blocks[chosen[-1]]):
                chosen.append(i)
        if is_complete([blocks[i] for i in chosen]):
            found[tuple(chosen)] = None
    diverse = [each for each in found if set(groups[list(each)].tolist()) == set(place)]
    accepted = diverse or list(found)
    if len(accepted) > most:
        accepted = [accepted[i] for i in sorted(rng.choice(len(accepted), most, replace=False))]
    return accepted


def at_random(blocks: Sequence[Block], groups: np.ndarray, *, most: int, rng: np.random.Generator) -> list[Candidate]:
    """Return candidates as the authors' code draws them: a block of each group and some more, sorted.

    Lengths take turns (4, 5, 6, at least one per group). Convolutions come first, each kind sorted by place, ties
    allowed, so R1 holds only weakly. The authors draw until there are four; here drawing ends after 1,000 trials.

    Arguments are those of `by_rules`; ``most`` bounds the authors' four.
    """
    names = sorted(set(groups.tolist()))
    found: dict[Candidate, None] = {}
    for _ in range(TRIES):
        if len(found) >= min(most, NUM_RANDOM):
            break
        length = LENGTHS[len(found) % len(LENGTHS)]
        chosen = [int(rng.choice(np.flatnonzero(groups == name))) for name in names]
        left = [i for i in range(len(blocks)) if i not in chosen]
        extra = min(max(length - len(chosen), 0), len(left))
        chosen += [int(i) for i in rng.choice(left, extra, replace=False)] if extra else []
        chosen.sort(key=lambda i: (blocks[i].kind == "fc", blocks[i].index, blocks[i].owner))
        if is_complete([blocks[i] for i in chosen]):
            found[tuple(chosen)] = None
    return list(found)
