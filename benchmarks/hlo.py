"""The memory traffic of a compiled TPU program, operation by operation, read from its text.

XLA's own "bytes accessed" counts what stays in a core's vector memory (VMEM) like what goes to the
chip's main memory (HBM), and a weight that is fetched ahead several times. Only HBM limits a
program, so the two are told apart here by the memory space in each shape's layout.
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

    @property
    def source(self) -> str:
        """The end of its path."""
        return "/".join(self.path.split("/")[-2:])


def operations(text: str) -> Iterator[Operation]:
    """Yield the instructions of a compiled program, those of loops and branches once."""
    inlined = set(CALLED.findall(text))
    computation, shapes = "", {}
    for line in text.splitlines():
        if begins := COMPUTATION.match(line):
            computation, shapes = begins[1], {}
        elif (instruction := INSTRUCTION.match(line)) and computation not in inlined:
            name, rest = instruction.groups()
            shape, kind, arguments, attributes = _parts(rest)
            shapes[name] = shape
            if kind not in MOVES_NOTHING:
                operands = [shapes.get(operand, "") for operand in arguments]
                yield _operation(name, computation, kind, shape, operands, attributes)


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


def _operation(
    name: str, computation: str, kind: str, shape: str, operands: list[str], attributes: str
) -> Operation:
    cycles = re.search(r'"estimated_cycles":"(\d+)"', attributes)
    source = re.search(r'op_name="([^"]*)"', attributes)
    if kind in STARTS:  # one side is HBM; a slice is as large as the smaller side
        moved = min(
            size for part in SHAPE.finditer(shape) if (size := _bytes(part)) > 4
        )  # the rest is a semaphore
    elif "ConcatBitcast" in attributes:  # slices that were fetched, seen as one array
        moved = 0
    else:
        moved = sum(
            _bytes(part)
            for text in (shape, *operands)
            for part in SHAPE.finditer(text)
            if "S(" not in (part[3] or "")
        )
    return Operation(
        name, computation, source[1] if source else kind, moved, int(cycles[1]) if cycles else 0
    )


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
