"""The readers of compiled code, on listings short enough to count by hand."""

import pytest

from pallas_kernels.hardware import H200
from tests.compile.bundles import Kernel, parse
from tests.compile.gpu_bound import bound, thread_blocks
from tests.compile.sass import instructions, loads, loops

# A loop on v6e, with 4 delay slots a branch: bundle 4 may skip bundles 9 and 10, bundle 11 goes back to 1.
LISTING = """
     0   :  { %s1 = smov 0 } /* entry bundle: %kernel.1 = custom-call(%a) */
   0x1 LB: > { %v1 = vld [vmem:[#allocation2]]  ;;  %v2 = vld [vmem:[#allocation2 + $0x8]] } /* Start region 5 */
   0x2   : > { %9 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s9, /*size_in_granules=*/256, /*vmem=*/%s1 }
   0x3   : > { %10 = dma.done.wait %s2, 256 }
   0x4   : > { %20 = sbr.rel (%p1) target = $region7  ;;  %v3 = vld [vmem:[#allocation3_spill]] }
   0x5   :  {}
   0x6   :  {}
   0x7   :  {}
   0x8   :  {}
   0x9   : > { %v4 = vmul.f32 %v1, %v2 } /* Start region 6 */
   0xa   : > { %v5 = vmul.f32 %v1, %v4 } /* End region 6 */
   0xb CT: > { %21 = sbr.rel (!%p2) target = $region5 } /* Start/End empty region 7 */
   0xc   :  {}
   0xd   :  {}
   0xe   :  {}
   0xf   :  {}
  0x10   :  { %30 = vsyncpa [#allocation1], 1 }
"""
BUSY = {1: "0 0 2 0", 3: "1 0 0 0", 4: "0 0 1 1", 9: "0 1 0 0", 10: "0 1 0 0"}
HEADING = """== CAPACTIY:
MXU, VALU, VLOAD, VLOAD:FILL
  2     4      3           3
== UTILIZATION:
"""
USE = HEADING + "\n".join(BUSY.get(address, "0 0 0 0") for address in range(17))


@pytest.fixture
def kernel() -> Kernel:
    return parse("kernel.1", "v6e", LISTING, USE)


def test_a_loop_reaches_past_the_delay_slots_of_its_branch(kernel):
    (loop,) = kernel.loops
    assert (loop.first, loop.end, loop.depth) == (1, 16, 1)


def test_the_quickest_and_the_slowest_iteration(kernel):
    loop = kernel.innermost(8192)
    shortest, longest = loop.shortest(8192), loop.longest(8192)
    assert (shortest.bundles, longest.bundles) == (13, 15)
    assert (shortest.use, longest.use) == ((1, 0, 3, 1), (1, 2, 3, 1))
    assert shortest.moved == (8192, 8192, 8192), "256 granules are 8 KiB, and two vectors of 4 KiB are not a reload"
    assert kernel.utilisation(shortest)["MXU"] == 1 / 26


def test_a_loop_that_cannot_handle_a_block_is_refused(kernel):
    with pytest.raises(ValueError, match="block_bytes=16384"):
        kernel.innermost(16384)


def test_an_inner_loop_runs_as_often_as_the_block_needs_it():
    """The copy moves into a loop of its own, of 6 bundles, which has to run 4 times for 32 KiB."""
    lines = [
        "   {address}   : > {{ %x = smov 0 }}",
        "   {address} LB: >> {{ %9 = dma.hbm_to_vmem /*hbm=*/%s9, /*size_in_granules=*/256 }} /* Start region 8 */",
        "   {address}   : >> {{ %21 = sbr.rel (!%p2) target = $region8 }}",
        *["   {address}   :  {{}}"] * 4,
        "   {address} PF: > {{ %21 = sbr.rel (!%p3) target = $region5 }} /* Start/End empty region 9 */",
        *["   {address}   :  {{}}"] * 4,
    ]
    loads = ";;".join(f"  %v{i} = vld [vmem:[#allocation2 + ${i}]]" for i in range(8))
    first = f"     0 LB: > {{ {loads} }} /* Start region 5 */"
    listing = "\n".join([first, *(line.format(address=hex(at)) for at, line in enumerate(lines, 1))])
    use = HEADING + "\n".join(["1 0 8 0"] + ["0 0 0 0"] * len(lines))
    kernel = parse("kernel.1", "v6e", listing, use)
    assert kernel.innermost(2**15).shortest(2**15).bundles == 1 + 1 + 4 * 6 + 5


def test_a_table_of_another_kernel_is_refused():
    with pytest.raises(ValueError, match="17 bundles of kernel are listed and 16"):
        parse("kernel", "v6e", LISTING, USE.rpartition("\n")[0])


SASS = """
.L_x_1:
   -:-:-:Y:01        /*0010*/                   LDG.E R1, desc[UR4][R2.64]
   -:-:-:Y:01        /*0020*/              @UP1 UTMALDG.5D [UR8], [UR4]
   -:-:-:Y:01        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24
   -:-:-:Y:01        /*0040*/              @!P1 BRA `(.L_x_1)
   -:-:-:Y:01        /*0050*/                   LDG.E.128 R4, desc[UR4][R2.64]
   -:-:-:Y:01        /*0060*/                   LDGSTS.E.128 [R4], desc[UR4][R2.64]
   -:-:-:Y:01        /*0070*/                   BRA `(.L_x_2)
.L_x_2:
   -:-:-:Y:01        /*0080*/                   UBLKCP.G.S [UR6], [UR18], UR14
"""


def test_loops_and_products_of_machine_code():
    (body,) = loops(SASS)
    assert [instruction.opcode.split(".")[0] for instruction in body] == ["LDG", "UTMALDG", "HGMMA", "BRA"]
    assert sum(instruction.flops for instruction in body) == 2 * 64 * 128 * 16


def test_loads_are_sorted_and_a_bulk_store_is_none():
    code = [instruction for _, instruction in instructions(SASS)]
    assert loads(code) == {"bulk_copies": 1, "small_copies": 1, "other_loads": 1, "four_byte_loads": 1}


def test_thread_blocks_of_a_multiprocessor():
    """218 registers are 7,168 a warp, and 2 × 4 warps of them the most of 65,536; two times 92 KiB fit in 228 KiB."""
    found = thread_blocks(registers=218, threads=128, shared_bytes=91 * 1024, facts=H200)
    assert found == {"by_registers": 2, "by_shared_memory": 2, "by_threads": 16}


def test_what_a_loop_of_products_takes_in_a_cycle():
    """64×128×16 products are 2,048 elements of K or V, 4 KiB in bfloat16, in a loop of four instructions."""
    found = bound(loops(SASS), H200, element_bytes=2)
    assert found["loop_bytes"] == 4096 and found["bytes_per_cycle_by_issue"] == 1024
    assert found["bytes_per_cycle_by_tensor_cores"] == 64
    assert round(found["memory_bytes_per_cycle"], 1) == 19.9 and found["memory_bound"]
