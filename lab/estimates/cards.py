"""Accelerators by name, with their makers' figures: dense bfloat16 arithmetic, memory, and links to others of their kind."""

from typing import Final, NamedTuple


class Card(NamedTuple):
    tflops: float  # dense bfloat16, in 10^12 operations a second
    gb_per_s: float  # of its memory, in 10^9 bytes a second
    memory_gib: float
    link_gb_per_s: float  # to the worker's other cards, in one direction
    system: str = ""  # its name in aiconfigurator-core; "": no operator was measured on it
    has_fp8: bool = True  # arithmetic in 8 bit, at twice the speed


CARDS: Final = {
    "A10": Card(125, 600, 24, 32, has_fp8=False),
    "A100-40GB-SXM": Card(312, 1555, 40, 300, has_fp8=False),
    "A100-80GB-PCIe": Card(312, 1935, 80, 32, has_fp8=False),
    "A100-80GB-SXM": Card(312, 2039, 80, 300, "a100_sxm", has_fp8=False),
    "B200": Card(2250, 8000, 180, 900, "b200_sxm"),
    "B300": Card(2250, 7750, 268, 900, "b300_sxm"),
    "GB200": Card(2500, 8000, 185, 900, "gb200"),
    "GB300": Card(2500, 8000, 277, 900, "gb300"),
    "H100-NVL": Card(835, 3938, 94, 300),
    "H100-PCIe": Card(756, 2000, 80, 64),
    "H100-SXM": Card(989, 3350, 80, 450, "h100_sxm"),
    "H200-SXM": Card(989, 4800, 141, 450, "h200_sxm"),
    "L4": Card(121, 300, 24, 32),
    "L40S": Card(362, 864, 48, 32, "l40s"),
    "MI300X": Card(1307, 5300, 192, 448),
    "RTX-4090": Card(165, 1008, 24, 32),
    "RTX-PRO-6000": Card(468, 1792, 95, 64, "rtx_pro_6000_server"),
}
"""Figures of data sheets; products that are sold under one name with and without sparsity are given without."""
