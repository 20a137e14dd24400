"""Reads the machine code of a GPU kernel, as nvdisasm lists it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^\n]*)")
LABEL = re.compile(r"^\.(L_x_\d+):", re.MULTILINE)
PRODUCT = re.compile(r"HGMMA\.(\d+)x(\d+)x(\d+)")


@dataclass(frozen=True)
class Instruction:
    """One of the machine code, in its order."""

    opcode: str
    operands: str

    @property
    def flops(self) -> int:
        """Of a matrix product."""
        shape = PRODUCT.match(self.opcode)
        return 2 * int(shape[1]) * int(shape[2]) * int(shape[3]) if shape else 0


def instructions(sass: str) -> Iterator[tuple[int, Instruction]]:
    """All instructions, each with its place in the text."""
    return ((match.start(), Instruction(match[2], match[3])) for match in INSTRUCTION.finditer(sass))


def loops(sass: str) -> list[list[Instruction]]:
    """The bodies of all loops: what lies between a label and a branch back to it."""
    labels = {label[1]: label.start() for label in LABEL.finditer(sass)}
    found = list(instructions(sass))
    bodies = []
    for position, instruction in found:
        to = re.search(r"\.(L_x_\d+)", instruction.operands) if instruction.opcode.startswith("BRA") else None
        if to and labels[to[1]] < position:
            bodies.append([inside for at, inside in found if labels[to[1]] < at <= position])
    return bodies


def loads(code: list[Instruction]) -> dict[str, int]:
    """How memory is read: bulk copies to shared memory, small asynchronous ones, and loads to registers.

    Page ids and lengths are loads of 4 bytes. Those that copy and those that compute each read a worker's share of the
    work as 16 bytes, once; other loads of any other width could only be keys or values.
    """
    opcodes = [instruction.opcode for instruction in code]
    ordinary = [opcode for opcode in opcodes if re.match(r"LDG?(\.|$)", opcode)]
    other = [opcode for opcode in ordinary if re.search(r"\.(U8|S8|U16|S16|64|128)\b", opcode)]
    return {
        "bulk_copies": sum(bool(re.match(r"UTMALDG|UBLKCP\.S\.G", opcode)) for opcode in opcodes),
        "small_copies": sum(opcode.startswith("LDGSTS") for opcode in opcodes),
        "other_loads": len(other),
        "four_byte_loads": len(ordinary) - len(other),
    }
