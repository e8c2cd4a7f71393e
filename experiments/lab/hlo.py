"""Read compiled programs: kernels of a loop, their bytes, and collectives between devices.

XLA prints a compiled module as text, one computation after the other. This module reads that text, because all backends
provide it. For GPUs XLA also prints the plan of the host, one line per launch (`launches`).
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
        """The size of the result in bytes."""
        return num_bytes(self.result)

    @property
    def is_kernel(self) -> bool:
        """Whether a device launches something for it. Scalars beside loops are not counted."""
        if self.opcode in FREE or self.opcode.endswith("-done") or self.target in FREE_CALLS:
            return False
        return self.opcode in ("fusion", "custom-call") or self.bytes > 8


class Module:
    """A compiled program.

    Attributes:
      computations: the instructions of each computation by name, also of fused ones.
      entry: the name of the first computation.
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
        """The names of a computation and of all computations inside it that are not fused."""
        names = [start]
        for name in names:
            for instruction in self.computations[name]:
                names += [body for body in instruction.bodies if body not in names]
        return names

    def loops(self, start: str | None = None) -> Iterator[str]:
        """The bodies of all loops inside a computation, outer ones first."""
        for name in self.reached(start or self.entry):
            for instruction in self.computations[name]:
                if instruction.opcode == "while":
                    yield instruction.bodies[0]

    def local_step(self) -> str:
        """The body of the loop over a client's batches (``local.run`` in ``map_clients``).

        Raises:
          ValueError: there is none. The compilation cache of JAX may also return a program with older names.
        """
        scopes = ("clients_part", "local_step")
        steps_in = lambda name: sum(
            all(scope in instruction.source for scope in scopes) for instruction in self.computations[name]
        )
        body = max(self.loops(), key=steps_in, default=None)
        if body is None or not steps_in(body):
            raise ValueError("the program has no local step; try JAX_ENABLE_COMPILATION_CACHE=false")
        return body

    def round_and_clients(self) -> tuple[str, str]:
        """The body of the loop over rounds, and that of its outermost inner loop that contains local steps."""
        step = self.local_step()
        around = [loop for loop in self.loops() if step in self.reached(loop)]  # outer ones first
        return around[0], around[1]

    def kernels(self, name: str, *, without: str = "") -> int:
        """Number of kernels that a computation launches. Inner loops count by their number of turns if it is known."""
        return int(self._sum(name, lambda _, instruction: instruction.is_kernel, without))

    def bytes(self, name: str, *, without: str = "") -> int:
        """Bytes that the kernels of a computation read and write if nothing stays in caches."""

        def touched(sizes: dict[str, int], instruction: Instruction) -> int:
            return instruction.is_kernel * (
                instruction.bytes + sum(sizes.get(operand, 0) for operand in instruction.operands)
            )

        return int(self._sum(name, touched, without))

    def cycles(self, name: str) -> int:
        """Cycles that the TPU's compiler estimates for a computation. 0 for other targets."""
        return int(self._sum(name, lambda _, instruction: instruction.cycles, ""))

    def opcodes(self) -> set[str]:
        """All opcodes, also those in fused computations."""
        return {instruction.opcode for body in self.computations.values() for instruction in body}

    def _sum(self, name: str, value: Callable[[dict[str, int], Instruction], float], without: str) -> float:
        sizes = {instruction.name: instruction.bytes for instruction in self.computations[name]}
        total = 0.0
        for instruction in self.computations[name]:
            inside = [body for body in instruction.bodies if body != without]
            total += value(sizes, instruction) + instruction.times * sum(
                self._sum(body, value, without) for body in inside
            )
        return total


def launches(thunks: Iterable[str], names: Collection[str]) -> int | None:
    """Number of launches by the host in one turn of a loop on a GPU. The kernels of one graph are one launch.

    Args:
      thunks: XLA's lists of what the host does (``thunk_sequence_after_thunk_passes``), of several programs.
      names: the names of the instructions of the loop's body, which identify it.

    Returns:
      The number, or None if the body contains loops or is not in the lists.
    """
    thunk_names = {name.replace(".", "_") for name in names}
    best, count = 0, None
    for body in (body for text in thunks for body in _bodies(text)):
        matches = sum(not thunk_names.isdisjoint(words) for _, _, words in body)
        if matches > best and all(kind != "kWhile" for _, kind, _ in body):
            best, count = matches, sum(depth == body[0][0] for depth, _, _ in body)
    return count


def _bodies(thunks: str) -> Iterator[list[tuple[int, str, list[str]]]]:
    """The body of every loop as lines: indentation, kind and words."""
    lines = [match.groups() for line in thunks.splitlines() if (match := re.match(r"( *)(?:\d+: (k\w+))?(.*)", line))]
    thunk_lines = [(len(indent), kind, words.split()) for indent, kind, words in lines]
    for start in (number for number, (_, _, words) in enumerate(thunk_lines, 1) if words == ["body:"]):
        least = thunk_lines[start][0]
        ends = (
            number
            for number in range(start, len(thunk_lines))
            if thunk_lines[number][1] and thunk_lines[number][0] < least
        )
        yield [line for line in thunk_lines[start : next(ends, None)] if line[1]]


def _instruction(line: str) -> Instruction | None:
    match = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)", line)
    if not match:
        return None
    name, result, opcode, text = match.groups()
    depths = np.cumsum([(letter == "(") - (letter == ")") for letter in text])
    end = int(np.argmax(depths < 0))
    arguments, attributes = text[:end], text[end:]
    bodies: list[str] = []
    if opcode in ("while", "call", "conditional", "async-start"):
        # The body of a loop comes first; its condition launches next to nothing.
        keys = ("body", "to_apply", "calls", "true_computation", "false_computation")
        bodies = [found_body[1] for key in keys if (found_body := re.search(rf"\b{key}=%?([\w.\-]+)", attributes))]
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
    """The size in bytes of a type in the text. The size of a tuple is the sum of its parts."""
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
    """The collectives of a compiled program.

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
        sizes = {instruction.name: instruction.bytes for instruction in instructions}
        for instruction in instructions:
            kind = instruction.opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                size = instruction.bytes
                # The result of such a start contains its operands.
                if instruction.opcode != kind and kind != "all-reduce":
                    size -= sum(sizes[operand] for operand in instruction.operands)
                yield Collective(kind, name, size * times[kind])
