# A shared object in memory: two functions of the compiler's run-time library, and the least that the dynamic
# loader asks for beside them. `cpu/mod.rs` says what it is for.
#
# The file is one page and is mapped twice: to be executed at 0, and to be written (by the loader, which puts
# addresses into the dynamic section) one page above.

.set .Lpage, 0x1000

.pushsection .rodata.flash_dma_round, "a", @progbits
.balign 8
.globl flash_dma_round_begin
.hidden flash_dma_round_begin
flash_dma_round_begin:
.Lfile:
    .byte 0x7f, 'E', 'L', 'F', 2, 1, 1, 0       # 64 bits, little-endian, version 1, System V
    .zero 8
    .short 3, 62                                # a shared object for x86-64
    .long 1
    .quad 0                                     # no entry point
    .quad .Lsegments - .Lfile
    .quad 0                                     # no section headers
    .long 0
    .short 64, 56, 4, 64, 0, 0                  # sizes of the headers, four segments, no sections

.Lsegments:                                     # type, flags; offset, address (twice), sizes, alignment
    .long 1, 5                                  # loaded, to be read and executed
    .quad 0, 0, 0, .Lend - .Lfile, .Lend - .Lfile, .Lpage
    .long 1, 6                                  # loaded, to be read and written
    .quad 0, .Lpage, .Lpage, .Lend - .Lfile, .Lend - .Lfile, .Lpage
    .long 2, 6                                  # the dynamic section
    .quad .Ldynamic - .Lfile, .Lpage + .Ldynamic - .Lfile, .Lpage + .Ldynamic - .Lfile
    .quad .Ldynamic_end - .Ldynamic, .Ldynamic_end - .Ldynamic, 8
    .long 0x6474e551, 6                         # the stack: not to be executed
    .quad 0, 0, 0, 0, 0, 16

.balign 8
.Ldynamic:
    .quad 4, .Lhash - .Lfile                    # the hash table
    .quad 5, .Lnames - .Lfile                   # the names, and their size
    .quad 10, .Lnames_end - .Lnames
    .quad 6, .Lsymbols - .Lfile                 # the symbols, and the size of one
    .quad 11, 24
    .quad 14, .Lsoname - .Lnames                # its own name
    .quad 0, 0
.Ldynamic_end:

.Lsymbols:                                      # name, global function, section, address, size
    .zero 24
    .long .Lname_f32 - .Lnames
    .byte 0x12, 0
    .short 1
    .quad .Lround_f32 - .Lfile, .Lround_f64 - .Lround_f32
    .long .Lname_f64 - .Lnames
    .byte 0x12, 0
    .short 1
    .quad .Lround_f64 - .Lfile, .Lend - .Lround_f64

.Lhash:                                         # one bucket: symbol 1, then 2
    .long 1, 3
    .long 1
    .long 0, 2, 0

.Lnames:
    .byte 0
.Lname_f32:
    .asciz "__truncsfbf2"
.Lname_f64:
    .asciz "__truncdfbf2"
.Lsoname:
    .asciz "libflash-dma-round.so"
.Lnames_end:

.balign 16
.Lround_f32:                                    # xmm0: f32 -> bf16 in the low half, to nearest even
    movd eax, xmm0
    ucomiss xmm0, xmm0
    jp 2f
1:
    mov ecx, eax
    shr ecx, 16
    and ecx, 1
    lea eax, [rax + rcx + 0x7fff]
    shr eax, 16
    movd xmm0, eax
    ret
2:                                              # NaN: quiet, with the sign and payload it has
    shr eax, 16
    or eax, 0x40
    movd xmm0, eax
    ret

.balign 16
.Lround_f64:                                    # xmm0: f64 -> bf16 in the low half, to nearest even
    cvtsd2ss xmm1, xmm0
    cvtss2sd xmm2, xmm1
    movd eax, xmm1
    ucomisd xmm0, xmm0
    jp 2b
    ucomisd xmm2, xmm0
    je 1b
    # Inexact: rounding twice is right if the first leaves an odd last bit. That is the f32 towards zero, its
    # last bit set.
    movq rcx, xmm0
    movq rdx, xmm2
    add rcx, rcx
    add rdx, rdx
    cmp rcx, rdx
    sbb eax, 0
    or eax, 1
    jmp 1b
.Lend:
.globl flash_dma_round_end
.hidden flash_dma_round_end
flash_dma_round_end:
.popsection
