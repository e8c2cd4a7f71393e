"""The search for candidates: pFedHR's Algorithm 1 and its four rules.

R1, order: every block comes from a later place (of its own network) than the one before. R2, operations: after a dense
block no convolution. R3, completeness: at least one convolution and one dense block. R4, diversity: every group.

The algorithm starts a candidate from each block in turn, then visits the groups and adds blocks that R1 and R2 allow.
The paper leaves open how many of a group. `one_per_group` adds one, so that a candidate has at most K + 1 blocks: those
of the paper's Figure 7 have five at K = 4, four convolutions and a dense block, and the authors' sampler makes four to
six. `all_allowed` adds every one: from the paper's networks it makes candidates of up to nine blocks, some with a
client's classifier in the middle, and what it adds in the first groups leaves no later place for the last ones. With
these networks as they start, two or more different ones among four clients, and activations of MNIST, all candidates of
`one_per_group` met R4 (four or five blocks), and none of `all_allowed`. Both visit the groups by the mean place of
their blocks; the paper does not say in which order.
"""

from collections.abc import Sequence

import numpy as np

from fedjax_mr.strategies.pfedhr.chains import Block

Candidate = tuple[int, ...]
"""Positions in a list of blocks, in the order of the candidate."""

NUM_RANDOM, LENGTHS, TRIES = 4, (4, 5, 6), 1000  # of the authors' sampler


def may_follow(after: Block, before: Block) -> bool:
    """Whether R1 and R2 allow a block ``after`` the block ``before``."""
    return after.index > before.index and (before.kind, after.kind) != ("fc", "conv")


def is_complete(blocks: Sequence[Block]) -> bool:
    """Whether R3 holds."""
    return {block.kind for block in blocks} >= {"conv", "fc"}


def one_per_group(
    blocks: Sequence[Block], groups: np.ndarray, *, most: int, rng: np.random.Generator
) -> list[Candidate]:
    """Candidates of a first block and one more of each group, without doubles, at most ``most``.

    Every block is once the first one. A group adds the block of the earliest place that R1 and R2 allow, convolutions
    before dense blocks, so that as many groups as possible can follow; of several clients' blocks a random one. Where
    the first block's own group stands in the way of a later one (R4), it adds none.

    Arguments and what is accepted are those of `all_allowed`.
    """
    order = _visiting_order(blocks, groups)
    early = lambda i: (blocks[i].kind == "fc", blocks[i].index)
    found: list[Candidate] = []
    for first in _by_place(blocks, groups):
        for visited in (order, [group for group in order if group != groups[first]]):
            chosen = [first]
            for group in visited:
                own = np.flatnonzero(groups == group).tolist()
                if allowed := [i for i in own if may_follow(blocks[i], blocks[chosen[-1]])]:
                    earliest = min(map(early, allowed))
                    chosen.append(int(rng.choice([i for i in allowed if early(i) == earliest])))
            found.append(tuple(chosen))
            if set(groups[chosen].tolist()) == set(order):
                break
    return _accepted(found, blocks, groups, most=most, rng=rng)


def all_allowed(blocks: Sequence[Block], groups: np.ndarray, *, most: int, rng: np.random.Generator) -> list[Candidate]:
    """The candidates that take every block that R1 and R2 allow, without doubles, at most ``most``.

    Every block is once the first one; a group's blocks are visited by place, then owner. Where no candidate has blocks
    of every group, R4 is dropped; the list is empty where the other rules leave none.

    Args:
      blocks: L blocks of the kinds ``conv`` and ``fc``.
      groups: the group of each block [L].
      most: of more candidates a random choice is kept, in their order.
      rng: the source of that choice.
    """
    found: list[Candidate] = []
    for first in (visited := _by_place(blocks, groups)):
        chosen = [first]
        for i in visited:
            if may_follow(blocks[i], blocks[chosen[-1]]):
                chosen.append(i)
        found.append(tuple(chosen))
    return _accepted(found, blocks, groups, most=most, rng=rng)


def _visiting_order(blocks: Sequence[Block], groups: np.ndarray) -> list[int]:
    """The groups by the mean place of their blocks."""
    places = np.array([block.index for block in blocks])
    return sorted(set(groups.tolist()), key=lambda group: (places[groups == group].mean(), group))


def _by_place(blocks: Sequence[Block], groups: np.ndarray) -> list[int]:
    """All blocks in the order of their groups, then by place and owner."""
    rank = {group: number for number, group in enumerate(_visiting_order(blocks, groups))}
    return sorted(range(len(blocks)), key=lambda i: (rank[int(groups[i])], blocks[i].index, blocks[i].owner))


def _accepted(
    found: Sequence[Candidate],
    blocks: Sequence[Block],
    groups: np.ndarray,
    *,
    most: int,
    rng: np.random.Generator,
) -> list[Candidate]:
    """The different candidates that R3 and R4 accept, R4 being dropped where none is left; at most ``most``."""
    complete = [each for each in dict.fromkeys(found) if is_complete([blocks[i] for i in each])]
    everything = set(groups.tolist())
    accepted = [each for each in complete if set(groups[list(each)].tolist()) == everything] or complete
    if len(accepted) > most:
        accepted = [accepted[i] for i in sorted(rng.choice(len(accepted), most, replace=False))]
    return accepted


def at_random(blocks: Sequence[Block], groups: np.ndarray, *, most: int, rng: np.random.Generator) -> list[Candidate]:
    """Candidates as the authors' code draws them: a block of each group and some more, sorted.

    Lengths take turns (4, 5, 6, at least one per group). Convolutions come first, each kind sorted by place, ties
    allowed, so R1 holds only weakly. The authors draw until there are four; here drawing ends after 1,000 trials.

    Arguments are those of `all_allowed`; ``most`` bounds the authors' four.
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


SEARCHES = {"one_per_group": one_per_group, "rules": all_allowed, "random": at_random}
"""By the name in the strategy's settings."""
