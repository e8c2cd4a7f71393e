"""The search for candidates: pFedHR's Algorithm 1 and its four rules.

R1, order: each block has a later position in its own network than the block before it. R2, operations: no convolution
after a dense block. R3, completeness: at least one convolution and one dense block. R4, diversity: blocks of every
group.

The algorithm starts one candidate from each block. It then visits the groups and adds blocks that R1 and R2 allow. The
paper does not specify how many blocks of a group are added. `one_per_group` adds one, so a candidate has at most K + 1
blocks: the candidates in the paper's Figure 7 have five at K = 4 (four convolutions and a dense block), and the
authors' sampler produces four to six. `all_allowed` adds all of them. With the paper's networks it produces candidates
of up to nine blocks, some with a client's classifier in the middle, and the blocks of the first groups leave no later
position for the last groups. With these networks at initialisation, two or more different ones among four clients, and
activations on MNIST, all candidates of `one_per_group` (four or five blocks) and none of `all_allowed` satisfied R4.
Both visit the groups by the mean position of their blocks; the paper does not specify the order.
"""

from collections.abc import Sequence

import numpy as np

from fedjax_mr.strategies.pfedhr.chains import Block

Candidate = tuple[int, ...]
"""Indices in a list of blocks, in the order of the candidate."""

NUM_RANDOM, LENGTHS, TRIES = 4, (4, 5, 6), 1000  # of the authors' sampler


def may_follow(after: Block, before: Block) -> bool:
    """Whether R1 and R2 allow the block ``after`` to follow the block ``before``."""
    return after.index > before.index and (before.kind, after.kind) != ("fc", "conv")


def is_complete(blocks: Sequence[Block]) -> bool:
    """Whether R3 holds."""
    return {block.kind for block in blocks} >= {"conv", "fc"}


def one_per_group(
    blocks: Sequence[Block], groups: np.ndarray, *, most: int, rng: np.random.Generator
) -> list[Candidate]:
    """Candidates of a first block and one more block of each group, without duplicates, at most ``most``.

    Each block is the first one of a candidate. From each group the candidate takes the allowed block (R1 and R2) with
    the earliest position, convolutions before dense blocks, so that as many groups as possible can follow; in a tie, a
    random block. If the group of the first block prevents a later group (R4), no further block of it is taken.

    Arguments and accepted candidates are those of `all_allowed`.
    """
    order = _visiting_order(blocks, groups)
    early = lambda i: (blocks[i].kind == "fc", blocks[i].index)
    candidates: list[Candidate] = []
    for first in _by_position(blocks, groups):
        for visited in (order, [group for group in order if group != groups[first]]):
            candidate = [first]
            for group in visited:
                members = np.flatnonzero(groups == group).tolist()
                if allowed := [i for i in members if may_follow(blocks[i], blocks[candidate[-1]])]:
                    earliest = min(map(early, allowed))
                    candidate.append(int(rng.choice([i for i in allowed if early(i) == earliest])))
            candidates.append(tuple(candidate))
            if set(groups[candidate].tolist()) == set(order):
                break
    return _accepted(candidates, blocks, groups, most=most, rng=rng)


def all_allowed(blocks: Sequence[Block], groups: np.ndarray, *, most: int, rng: np.random.Generator) -> list[Candidate]:
    """Candidates that take every block allowed by R1 and R2, without duplicates, at most ``most``.

    Each block is the first one of a candidate. The blocks of a group are visited by position, then owner. If no
    candidate has blocks of every group, R4 is ignored. If no candidate satisfies the other rules, the list is empty.

    Args:
      blocks: L blocks of the kinds ``conv`` and ``fc``.
      groups: group of each block [L].
      most: maximum number of candidates. If there are more, a random subset is kept in order.
      rng: random generator.
    """
    candidates: list[Candidate] = []
    for first in (visited := _by_position(blocks, groups)):
        candidate = [first]
        for i in visited:
            if may_follow(blocks[i], blocks[candidate[-1]]):
                candidate.append(i)
        candidates.append(tuple(candidate))
    return _accepted(candidates, blocks, groups, most=most, rng=rng)


def _visiting_order(blocks: Sequence[Block], groups: np.ndarray) -> list[int]:
    """The groups by the mean position of their blocks."""
    positions = np.array([block.index for block in blocks])
    return sorted(set(groups.tolist()), key=lambda group: (positions[groups == group].mean(), group))


def _by_position(blocks: Sequence[Block], groups: np.ndarray) -> list[int]:
    """All blocks in the order of their groups, then by position and owner."""
    rank = {group: number for number, group in enumerate(_visiting_order(blocks, groups))}
    return sorted(range(len(blocks)), key=lambda i: (rank[int(groups[i])], blocks[i].index, blocks[i].owner))


def _accepted(
    candidates: Sequence[Candidate],
    blocks: Sequence[Block],
    groups: np.ndarray,
    *,
    most: int,
    rng: np.random.Generator,
) -> list[Candidate]:
    """The distinct candidates that satisfy R3 and R4 (only R3 if none satisfies R4), at most ``most``."""
    complete = [each for each in dict.fromkeys(candidates) if is_complete([blocks[i] for i in each])]
    all_groups = set(groups.tolist())
    accepted = [each for each in complete if set(groups[list(each)].tolist()) == all_groups] or complete
    if len(accepted) > most:
        accepted = [accepted[i] for i in sorted(rng.choice(len(accepted), most, replace=False))]
    return accepted


def at_random(blocks: Sequence[Block], groups: np.ndarray, *, most: int, rng: np.random.Generator) -> list[Candidate]:
    """Candidates drawn as in the authors' code: a block of each group and some more blocks, sorted.

    Lengths alternate between 4, 5 and 6, with at least one block per group. Convolutions come first. Each kind is
    sorted by position, with ties, so R1 holds only weakly. The authors draw until there are four candidates; here the
    search stops after 1,000 trials.

    Arguments are those of `all_allowed`. There are at most four candidates.
    """
    names = sorted(set(groups.tolist()))
    candidates: dict[Candidate, None] = {}
    for _ in range(TRIES):
        if len(candidates) >= min(most, NUM_RANDOM):
            break
        length = LENGTHS[len(candidates) % len(LENGTHS)]
        drawn = [int(rng.choice(np.flatnonzero(groups == name))) for name in names]
        others = [i for i in range(len(blocks)) if i not in drawn]
        extra = min(max(length - len(drawn), 0), len(others))
        drawn += [int(i) for i in rng.choice(others, extra, replace=False)] if extra else []
        drawn.sort(key=lambda i: (blocks[i].kind == "fc", blocks[i].index, blocks[i].owner))
        if is_complete([blocks[i] for i in drawn]):
            candidates[tuple(drawn)] = None
    return list(candidates)


SEARCHES = {"one_per_group": one_per_group, "rules": all_allowed, "random": at_random}
"""The searches by the value of `Hyper.search`."""
