"""Lines of PTX, SASS and assembly, linked with those of the source."""

from __future__ import annotations

from roller_svc.toolchain.listings import Link, read_assembly, read_ptx, read_sass

PTX = """.version 9.0
.target sm_90a
.file 1 "k.cu"
.visible .entry k(
.param .u64 p
)
{
.loc 1 3 1
$L__tmp0:
ld.param.u64 %rd1, [p];
.loc 1 7 2
.loc 1 40 5, function_name $L__info_string0, inlined_at 1 7 2
mov.u32 %r1, 0;
mov.u32 %r2, 0;
$L__BB0_1:
.loc 2 9 9
ret;
}
.section .debug_str
{
$L__info_string0:
.b8 1
}
"""


def test_lines_of_ptx() -> None:
    found = read_ptx(PTX, "k.cu")
    lines = found.text.split("\n")
    assert lines[:3] == [".version 9.0", ".target sm_90a", ".visible .entry k("]
    assert "debug" not in found.text
    assert ".loc" not in found.text
    assert found.links == (Link(7, 7, (3,)), Link(8, 9, (40, 7)))
    assert lines[6:9] == ["ld.param.u64 %rd1, [p];", "mov.u32 %r1, 0;", "mov.u32 %r2, 0;"]
    assert "$L__BB0_1:" in lines  # of the code


SASS = """	.section	.text.k,"ax",@progbits
.text.k:
	//## File "/k.cu", line 3
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   MOV R2, R1 ;
	//## File "/k.cu", line 40 inlined at "/k.cu", line 7
	//## File "/k.cu", line 7
        /*0020*/                   SYNCS.EXCH.64 URZ, [UR4], UR6 ;
.L_x_0:
        /*0030*/                   BRA `(.L_x_0);
	//## File "/builtin.h", line 9
        /*0040*/                   EXIT ;
"""


def test_lines_of_sass() -> None:
    found = read_sass(SASS, "k.cu")
    assert "##" not in found.text
    assert found.links == (Link(3, 4, (3,)), Link(5, 5, (40, 7)), Link(7, 7, (40, 7)))
    assert found.text.split("\n")[4].endswith("SYNCS.EXCH.64 URZ, [UR4], UR6 ;")


ASSEMBLY = """	.file	"kernel.c"
	.text
	.globl	k
k:
.LFB0:
	.file 1 "kernel.c"
	.loc 1 2 17
	.cfi_startproc
	movq	%rsp, %rbp
.L2:
.LVL1:
	.loc 1 3 9 is_stmt 0 view .LVU2
	.loc 1 4 9 view .LVU3
	vmulss	(%rdi), %xmm0, %xmm1
	jne	.L2
	ret
	.cfi_endproc
.Letext0:
	.section	.debug_info,"",@progbits
	.long	0x9f
"""


def test_lines_of_assembly() -> None:
    found = read_assembly(ASSEMBLY)
    lines = ["\t.text", "\t.globl\tk", "k:", "\tmovq\t%rsp, %rbp", ".L2:", "\tvmulss\t(%rdi), %xmm0, %xmm1", "\tjne\t.L2", "\tret"]
    assert found.text.split("\n") == lines
    assert found.links == (Link(4, 4, (2,)), Link(6, 8, (4,)))
