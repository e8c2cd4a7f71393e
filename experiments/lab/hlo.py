"""Read compiled programs: the kernels of a loop, the bytes they touch, the collectives between devices.

XLA prints a compiled module as text, one computation after the other; everything here is read from that text, because
it is the one thing that all backends give. For GPUs it also prints what the host will do, one line for each thing it
launches (`launches`).
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

import numpy as np

COLLECTIVES = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute")
WIDTHS = {
    "pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8,
    "u64": 8, "f64": 8, "c64": 8,
}  # fmt: skip
# Names for values, or control whose body is counted instead: nothing is launched for them.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "while", "conditional", "call",
    "partition-id", "replica-id", "opt-barrier", "add-dependency",
}  # fmt: skip
FREE_CALLS = {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "AllocateBuffer"}


class Instruction(NamedTuple):
    """One instruction of a computation."""

    name: str
    opcode: str
    result: str  # its type, such as f32[8,3]
    operands: tuple[str, ...]  # names of instructions of the same computation
    bodies: tuple[str, ...]  # computations that it runs by itself: loops, branches, calls; not what is fused
    source: str  # op_name: the JAX functions and scopes from which it came
    times: int  # how often a loop runs its body, if the compiler knows; else 1
    target: str  # what a custom call calls
    cycles: int  # the TPU compiler's estimate; 0 where it gives none

    @property
    def bytes(self) -> int:
        """Return the size of the result."""
        return num_bytes(self.result)

    @property
    def is_kernel(self) -> bool:
        """Return whether a device has something to launch for it; scalars beside loops are not counted."""
        if self.opcode in FREE or self.opcode.endswith("-done") or self.target in FREE_CALLS:
            return False
        return self.opcode in ("fusion", "custom-call") or self.bytes > 8


class Module:
    """A compiled program.

    Attributes:
      computations: the instructions of each computation by its name; fused ones too.
      entry: the name of the one that begins.
    """

    def __init__(self, text: str) -> None:
        """Read the text of a compiled program (``compiled.as_text()``)."""
        self.computations: dict[str, list[Instruction]] = {}
        self.entry, current = "", ""
        for line in text.splitlines():
            head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
            if head:
                current = head[2]
                self.computations[current] = []
                self.entry = current if head[1] else self.entry
            elif current and (instruction := _instruction(line)):
                self.computations[current].append(instruction)

    def reached(self, start: str) -> list[str]:
        """Return a computation and all that run inside it, without those that are fused."""
        found = [start]
        for name in found:
            for instruction in self.computations[name]:
                found += [body for body in instruction.bodies if body not in found]
        return found

    def loops(self, start: str | None = None) -> Iterator[str]:
        """Yield the bodies of all loops inside a computation, outer ones first."""
        for name in self.reached(start or self.entry):
            for instruction in self.computations[name]:
                if instruction.opcode == "while":
                    yield instruction.bodies[0]

    def local_step(self) -> str:
        """Return the body of the loop over a client's batches (``local.run`` in ``map_clients``).

        Raises:
          ValueError: there is none; JAX's compilation cache may also return a program with the names of an older one.
        """
        scopes = ("clients_part", "local_step")
        own = lambda name: sum(all(scope in each.source for scope in scopes) for each in self.computations[name])
        found = max(self.loops(), key=own, default=None)
        if found is None or not own(found):
            raise ValueError("the program has no local step; try JAX_ENABLE_COMPILATION_CACHE=false")
        return found

    def round_and_clients(self) -> tuple[str, str]:
        """Return the body of the loop over rounds and that of the outermost loop inside it that holds local steps."""
        step = self.local_step()
        around = [loop for loop in self.loops() if step in self.reached(loop)]  # outer ones first
        return around[0], around[1]

    def kernels(self, name: str, *, without: str = "") -> int:
        """Return how many kernels a computation launches, loops inside as often as they are known to run."""
        return int(self._sum(name, lambda _, each: each.is_kernel, without))

    def bytes(self, name: str, *, without: str = "") -> int:
        """Return the bytes that the kernels of a computation read and write, if nothing stays in caches."""

        def touched(sizes: dict[str, int], each: Instruction) -> int:
            return each.is_kernel * (each.bytes + sum(sizes.get(operand, 0) for operand in each.operands))

        return int(self._sum(name, touched, without))

    def cycles(self, name: str) -> int:
        """Return what the TPU's compiler estimates for a computation; 0 for other targets."""
        return int(self._sum(name, lambda _, each: each.cycles, ""))

    def opcodes(self) -> set[str]:
        """Return every opcode that occurs, in fused computations too."""
        return {each.opcode for body in self.computations.values() for each in body}

    def _sum(self, name: str, value: Callable[[dict[str, int], Instruction], float], without: str) -> float:
        sizes = {each.name: each.bytes for each in self.computations[name]}
        total = 0.0
        for each in self.computations[name]:
            inside = [body for body in each.bodies if body != without]
            total += value(sizes, each) + each.times * sum(self._sum(body, value, without) for body in inside)
        return total


def launches(thunks: Iterable[str], names: Collection[str]) -> int | None:
    """Return what the host launches in one turn of a loop on a GPU; kernels of one graph are one launch.

    Args:
      thunks: XLA's lists of what the host does (``thunk_sequence_after_thunk_passes``), of several programs.
      names: the instructions of the loop's body, by which it is found in them.

    Returns:
      The number; None if the body has loops of its own, or is not in the lists.
    """
    known = {name.replace(".", "_") for name in names}
    best, count = 0, None
    for body in (body for text in thunks for body in _bodies(text)):
        found = sum(not known.isdisjoint(words) for _, _, words in body)
        if found > best and all(kind != "kWhile" for _, kind, _ in body):
            best, count = found, sum(depth == body[0][0] for depth, _, _ in body)
    return count


def _bodies(thunks: str) -> Iterator[list[tuple[int, str, list[str]]]]:
    """Yield the body of every loop as lines: how far they are indented, what they are, and their words."""
    lines = [found.groups() for each in thunks.splitlines() if (found := re.match(r"( *)(?:\d+: (k\w+))?(.*)", each))]
    every = [(len(indent), kind, rest.split()) for indent, kind, rest in lines]
    for start in (number for number, (_, _, words) in enumerate(every, 1) if words == ["body:"]):
        least = every[start][0]
        ends = (number for number in range(start, len(every)) if every[number][1] and every[number][0] < least)
        yield [line for line in every[start : next(ends, None)] if line[1]]


def _instruction(line: str) -> Instruction | None:
    found = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)", line)
    if not found:
        return None
    name, result, opcode, rest = found.groups()
    depths = np.cumsum([(letter == "(") - (letter == ")") for letter in rest])
    end = int(np.argmax(depths < 0))
    arguments, attributes = rest[:end], rest[end:]
    bodies: list[str] = []
    if opcode in ("while", "call", "conditional", "async-start"):
        # The body of a loop comes first; its condition launches next to nothing.
        keys = ("body", "to_apply", "calls", "true_computation", "false_computation")
        bodies = [each[1] for key in keys if (each := re.search(rf"\b{key}=%?([\w.\-]+)", attributes))]
        branches = re.search(r"branch_computations=\{([^}]*)\}", attributes)
        bodies += re.findall(r"[\w.\-]+", branches[1]) if branches else []
    source = re.search(r'op_name="([^"]*)"', attributes)
    times = re.search(r'"known_trip_count":\{"n":"(\d+)"', attributes)
    cycles = re.search(r'"estimated_cycles":"(\d+)"', attributes)
    target = re.search(r'custom_call_target="([^"]*)"', attributes)
    return Instruction(
        name,
        opcode,
        result,
        tuple(re.findall(r"%([\w.\-]+)", arguments)),
        tuple(bodies),
        source[1] if source else "",
        int(times[1]) if times else 1,
        target[1] if target else "",
        int(cycles[1]) if cycles else 0,
    )


def num_bytes(result: str) -> int:
    """Return the size of a type of the text, a tuple's as the sum of its parts."""
    plain = re.sub(r"/\*.*?\*/|\{[^}]*\}", "", result)
    return sum(
        WIDTHS.get(dtype, 0) * int(np.prod([int(size) for size in shape.split(",") if size]))
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", plain)
    )


class Collective(NamedTuple):
    """One collective instruction."""

    kind: str  # one of COLLECTIVES
    computation: str  # where it is
    bytes: int  # sent by all devices together, each time


def collectives(module: Module, *, devices: int) -> Iterator[Collective]:
    """Yield the collectives of a compiled program.

    All devices together send, where s are the bytes of a result: all-to-all (D - 1) s, all-gather (D - 1) s, all-reduce
    2 (D - 1) s (both as rings), reduce-scatter D (D - 1) s, a permutation s per pair.
    """
    times = {
        "all-to-all": devices - 1,  # the result holds D pieces, one of them the device's own
        "all-gather": devices - 1,
        "all-reduce": 2 * (devices - 1),
        "reduce-scatter": devices * (devices - 1),
        "collective-permute": devices,
    }
    for name, instructions in module.computations.items():
        sizes = {each.name: each.bytes for each in instructions}
        for each in instructions:
            kind = each.opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                size = each.bytes
                if each.opcode != kind and kind != "all-reduce":  # such a start holds its operands beside the results
                    size -= sum(sizes[operand] for operand in each.operands)
                yield Collective(kind, name, size * times[kind])
