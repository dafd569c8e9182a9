"""The memory traffic of a compiled TPU program, operation by operation, read from its text.

XLA's own "bytes accessed" counts what stays in a core's vector memory (VMEM) like what goes to the
chip's main memory (HBM), and a weight that is fetched ahead several times. Only HBM limits a
program, so the two are told apart here by the memory space in each shape's layout, and of an array
from which a fusion cuts a part, or into which it writes one, that part alone counts.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

BITS = {
    "pred": 8,
    "s8": 8,
    "u8": 8,
    "bf16": 16,
    "f16": 16,
    "s16": 16,
    "u16": 16,
    "s32": 32,
    "u32": 32,
    "f32": 32,
    "s64": 64,
    "u64": 64,
}
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
SHAPE = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
KERNEL_FLOPS = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')
CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
STARTS = ("copy-start", "slice-start", "async-start")
# These name or wait for what another instruction moves.
MOVES_NOTHING = (
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "call",
    "conditional",
    "copy-done",
    "slice-done",
    "async-done",
)


@dataclass(frozen=True)
class Operation:
    """An instruction of the compiled program; a fusion is one."""

    name: str
    computation: str  # the body of a loop, for one, or the main program
    path: str  # of the JAX functions it comes from, or its kind
    hbm_bytes: int  # to and from the chip's main memory
    cycles: int  # the compiler's estimate; it makes none for Pallas kernels
    kernel_flops: int = 0  # of a Pallas kernel, by its own estimate

    @property
    def source(self) -> str:
        """The end of its path."""
        return "/".join(self.path.split("/")[-2:])


def operations(text: str) -> Iterator[Operation]:
    """Yield the instructions of a compiled program, those of loops and branches once."""
    computations = _computations(text)
    inlined = set(CALLED.findall(text))
    for name, instructions in computations.items():
        if name not in inlined:
            for one in instructions:
                if one.kind not in MOVES_NOTHING:
                    yield _operation(one, name, computations)


def around(found: list[Operation], scope: str) -> list[Operation]:
    """Operations of the computation that holds most of a `jax.named_scope`, as a loop's body does.

    It may be the body of a loop. Among them are copies that have no path, but not what was moved
    out of the loop and still bears the name.
    """
    held = Counter(one.computation for one in found if scope in one.path.split("/"))
    return [one for one in found if held and one.computation == held.most_common(1)[0][0]]


def by_source(found: Iterator[Operation]) -> list[dict[str, str | int | float]]:
    """Rows of a table, largest first: operations of one kind from one place, added up."""
    moved, cycles, count = Counter(), Counter(), Counter()
    for operation in found:
        key = re.sub(r"[.\d]+$", "", operation.name), operation.source
        moved[key] += operation.hbm_bytes
        cycles[key] += operation.cycles
        count[key] += 1
    ranked = sorted(count, key=lambda key: (cycles[key], moved[key]), reverse=True)
    return [
        {
            "operation": name,
            "from": source,
            "count": count[name, source],
            "million cycles": cycles[name, source] / 1e6,
            "HBM MB": moved[name, source] / 1e6,
        }
        for name, source in ranked
    ]


@dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    kind: str
    operands: list[str]
    attributes: str
    shapes: list[str]  # of the operands
    is_root: bool


Computations = dict[str, list[_Instruction]]


def _computations(text: str) -> Computations:
    """Read the instructions of each computation."""
    found, current, shapes = {}, [], {}
    for line in text.splitlines():
        if begins := COMPUTATION.match(line):
            current, shapes = found.setdefault(begins[1], []), {}
        elif instruction := INSTRUCTION.match(line):
            name, rest = instruction.groups()
            shape, kind, operands, attributes = _parts(rest)
            if kind == "parameter":
                operands = re.findall(r"parameter\((\d+)\)", rest)
            shapes[name] = shape
            given = [shapes.get(each, "") for each in operands]
            root = line.lstrip().startswith("ROOT")
            current.append(_Instruction(name, shape, kind, operands, attributes, given, root))
    return found


def _operation(one: _Instruction, computation: str, computations: Computations) -> Operation:
    cycles = re.search(r'"estimated_cycles":"(\d+)"', one.attributes)
    source = re.search(r'op_name="([^"]*)"', one.attributes)
    if one.kind in STARTS:  # one side is HBM; a slice is as large as the smaller side
        moved = min(
            size for part in SHAPE.finditer(one.shape) if (size := _bytes(part)) > 4
        )  # the rest is a semaphore
    elif "ConcatBitcast" in one.attributes:  # slices that were fetched, seen as one array
        moved = 0
    else:
        moved = sum(_read(one, computations)) + _written(one, computations)
    flops = KERNEL_FLOPS.search(one.attributes) if one.kind == "custom-call" else None
    return Operation(
        one.name,
        computation,
        source[1] if source else one.kind,
        moved,
        int(cycles[1]) if cycles else 0,
        int(flops[1]) if flops else 0,
    )


def _read(one: _Instruction, computations: Computations) -> Iterator[int]:
    """Yield the bytes of main memory that an instruction reads of each operand."""
    for position, shape in enumerate(one.shapes):
        whole = _in_main_memory(shape)
        cut = _cut(one, position, computations) if whole else None
        yield whole if cut is None else min(whole, cut)


def _written(one: _Instruction, computations: Computations) -> int:
    """Return the bytes of main memory that an instruction writes: its result, or what it puts into
    an array that is there already."""
    whole, inside = _in_main_memory(one.shape), _called(one, computations)
    root = next((each for each in inside if each.is_root), one)
    while root.kind == "bitcast" and inside:
        root = next(each for each in inside if each.name == root.operands[0])
    return min(whole, _size(root.shapes[1])) if root.kind == "dynamic-update-slice" else whole


def _cut(one: _Instruction, position: int, computations: Computations) -> int | None:
    """Return the bytes that an instruction cuts from an operand, or None if it takes all of it."""
    if one.kind in ("slice", "dynamic-slice"):
        return _size(one.shape) if position == 0 else 0
    if one.kind == "dynamic-update-slice" and position == 0:
        return 0  # it is written in place
    inside = _called(one, computations)
    for each in inside:
        if each.kind == "parameter" and each.operands == [str(position)]:
            return _used(each, inside, computations)
    return None


def _used(one: _Instruction, inside: list[_Instruction], computations: Computations) -> int | None:
    """Return the bytes that a fusion uses of what an instruction of it makes, or None for all."""
    if one.is_root:
        return None
    total = 0
    for each in inside:
        for position, operand in enumerate(each.operands):
            if operand == one.name:
                if each.kind == "bitcast":
                    found = _used(each, inside, computations)
                else:
                    found = _cut(each, position, computations)
                if found is None:
                    return None
                total += found
    return total


def _called(one: _Instruction, computations: Computations) -> list[_Instruction]:
    """Return the instructions of a fusion, or none."""
    name = CALLED.search(one.attributes) if one.kind == "fusion" else None
    return computations.get(name[1], []) if name else []


def _in_main_memory(text: str) -> int:
    return sum(_bytes(part) for part in SHAPE.finditer(text) if "S(" not in (part[3] or ""))


def _size(text: str) -> int:
    return sum(_bytes(part) for part in SHAPE.finditer(text))


def _parts(rest: str) -> tuple[str, str, list[str], str]:
    """Split `shape kind(%a, %b), attributes` into the four."""
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    end = opening + _closing(rest[opening:])
    return shape, rest[:opening], re.findall(r"%([\w.\-]+)", rest[opening:end]), rest[end:]


def _closing(text: str) -> int:
    """Return the position behind the parenthesis that closes the first."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return i + 1
    raise ValueError(f"No parenthesis closes the first of {text[:80]}")


def _bytes(shape: re.Match) -> int:
    """Return the bytes with the padding of the layout's tiles, as `{1,0:T(8,128)}`.

    Minor dimensions come first.
    """
    kind, numbers, layout = shape.groups()
    sizes = [int(n) for n in numbers.split(",") if n]
    tiled = re.match(r"([\d,]+):T\(([\d,]+)\)", layout or "")
    if tiled:
        order = [int(n) for n in tiled[1].split(",")]
        tile = [int(n) for n in tiled[2].split(",")]
        for dimension, unit in zip(order, reversed(tile), strict=False):
            sizes[dimension] = -(-sizes[dimension] // unit) * unit
    return math.prod(sizes) * BITS.get(kind, 0) // 8
