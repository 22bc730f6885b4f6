//! The PTX instructions that CubeCL has no operation for.

use cubecl::intrinsic;
use cubecl::ir::dialect::barrier::CopyAsyncOp;
use cubecl::prelude::*;
use flash_dma_problem::ElementType;

/// Reads a variable into a register: a `let mut` passed to `in(_)` directly passes its address.
#[cube]
pub(crate) fn value<T: CubePrimitive>(x: T) -> T {
    intrinsic!(|scope| { x.read_value(scope).into() })
}

/// `2^x` by one special-function instruction; `exp` would compile to the slow form. `-inf` gives 0, NaN stays NaN.
#[cube]
pub(crate) fn ex2(x: f32) -> f32 {
    let out: f32;
    gpu_asm!("ex2.approx.ftz.f32 {}, {};", out(_) out, in(_) value::<f32>(x), options(pure, nomem));
    out
}

/// `min(x, 0)`; NaN stays NaN, which CubeCL's `min` drops.
#[cube]
pub(crate) fn at_most_zero(x: f32) -> f32 {
    let out: f32;
    gpu_asm!("min.NaN.f32 {}, {}, 0f00000000;", out(_) out, in(_) value::<f32>(x), options(pure, nomem));
    out
}

/// `1 / x` to one unit in the last place by one special-function instruction; a division branches in special cases.
#[cube]
pub(crate) fn reciprocal(x: f32) -> f32 {
    let out: f32;
    gpu_asm!("rcp.approx.ftz.f32 {}, {};", out(_) out, in(_) value::<f32>(x), options(pure, nomem));
    out
}

/// The value of the lane whose index differs from this lane's in the bits of `mask`. All 32 lanes take
/// part: CubeCL's own shuffle reads the active mask first.
#[cube]
pub(crate) fn shuffle_xor(x: f32, #[comptime] mask: u32) -> f32 {
    let out: f32;
    gpu_asm!("shfl.sync.bfly.b32 {}, {}, {m}, 31, -1;", out(_) out, in(_) value::<f32>(x), m = const mask, options(nomem));
    out
}

#[cube]
pub(crate) fn shuffle_xor_word(x: u32, #[comptime] mask: u32) -> u32 {
    let out: u32;
    gpu_asm!("shfl.sync.bfly.b32 {}, {}, {m}, 31, -1;", out(_) out, in(_) value::<u32>(x), m = const mask, options(nomem));
    out
}

/// The value of lane `from`. All 32 lanes take part.
#[cube]
pub(crate) fn shuffle(x: u32, from: u32) -> u32 {
    let out: u32;
    gpu_asm!("shfl.sync.idx.b32 {}, {}, {}, 31, -1;", out(_) out, in(_) value::<u32>(x), in(_) value::<u32>(from), options(nomem));
    out
}

/// The first lane's `x`, which every lane has. The compiler then knows that it is uniform, and keeps derived values,
/// such as loop counters and operand descriptors, in uniform registers. All 32 lanes take part.
#[cube]
pub(crate) fn uniform(x: usize) -> usize {
    shuffle(x as u32, 0u32) as usize
}

/// [`uniform`] for a boolean: code after a branch on anything else gets no uniform registers.
#[cube]
pub(crate) fn uniform_bool(x: bool) -> bool {
    shuffle(u32::cast_from(x), 0u32) != 0u32
}

/// [`uniform`] for 64 bits, such as an address.
#[cube]
pub(crate) fn uniform_address(x: u64) -> u64 {
    let (low, high) = (shuffle(x as u32, 0u32), shuffle((x >> 32) as u32, 0u32));
    low as u64 | ((high as u64) << 32)
}

/// Starts the `cp.async` copy of the one element of `source`, `bytes` long, to `place`, or of zero bytes if not
/// `there`: it then fills the destination with zeros and reads nothing. CubeCL's own `copy_async_checked` passes the
/// length as an index, and no assembler accepts one of 64 bits.
#[cube]
pub(crate) fn copy_or_zero<T: CubePrimitive>(
    source: &[T],
    place: &mut [T],
    there: bool,
    #[comptime] bytes: u32,
) {
    let length = select(there, bytes, 0u32);
    intrinsic!(|scope| {
        // SAFETY: the caller's slices hold an element.
        let from = unsafe { *source.__expand_as_ptr_unchecked_method(scope) }.value(scope);
        let to = unsafe { *place.__expand_as_ptr_unchecked_method(scope) }.value(scope);
        let length = length.read_value(scope);
        let copy = CopyAsyncOp::new(scope.ctx_mut(), from, to, length, bytes as usize, true);
        scope.register(&copy);
    })
}

/// The address of the first of `elements` in global memory. This makes the compiler keep it in registers; otherwise it
/// would recompute it before each use.
#[cube]
pub(crate) fn global_address<T: CubePrimitive>(elements: &[T]) -> u64 {
    let address: u64;
    gpu_asm!(
        "cvta.to.global.u64 {o}, {p};",
        p = in(_) unsafe { elements.as_ptr_unchecked() },
        o = out(_) address,
        options(nomem)
    );
    address
}

/// Starts the `cp.async` copy of 16 bytes at `first + row * stride` to shared memory: one multiply-add for the address.
#[cube]
pub(crate) fn copy_of_row(first: u64, row: u32, stride: u32, place: u32) {
    gpu_asm!(
        "{{ .reg .u64 f; mad.wide.u32 f, {}, {}, {}; cp.async.cg.shared.global [{}], [f], 16; }}",
        in(_) value::<u32>(row),
        in(_) value::<u32>(stride),
        in(_) value::<u64>(first),
        in(_) value::<u32>(place),
        options(explicit_mem, reads_address_space global, writes_address_space shared)
    );
}

/// [`copy_of_row`] for 8 bytes.
#[cube]
pub(crate) fn copy_pair(first: u64, row: u32, stride: u32, place: u32) {
    gpu_asm!(
        "{{ .reg .u64 f; mad.wide.u32 f, {}, {}, {}; cp.async.ca.shared.global [{}], [f], 8; }}",
        in(_) value::<u32>(row),
        in(_) value::<u32>(stride),
        in(_) value::<u64>(first),
        in(_) value::<u32>(place),
        options(explicit_mem, reads_address_space global, writes_address_space shared)
    );
}

/// [`copy_of_row`] for word `index` from `first` on.
#[cube]
pub(crate) fn copy_word(first: u64, index: u32, place: u32) {
    gpu_asm!(
        "{{ .reg .u64 f; mad.wide.u32 f, {}, 4, {}; cp.async.ca.shared.global [{}], [f], 4; }}",
        in(_) value::<u32>(index),
        in(_) value::<u64>(first),
        in(_) value::<u32>(place),
        options(explicit_mem, reads_address_space global, writes_address_space shared)
    );
}

/// Word `index` from `first` on in global memory, which must not be written meanwhile. It is read at the position of
/// the call, far from its use.
#[cube]
pub(crate) fn read_ahead(first: u64, index: u32) -> u32 {
    let word: u32;
    gpu_asm!(
        "{{ .reg .u64 f; mad.wide.u32 f, {}, 4, {}; ld.global.nc.u32 {}, [f]; }}",
        in(_) value::<u32>(index),
        in(_) value::<u64>(first),
        out(_) word,
        options(nomem)
    );
    word
}

/// Closes the group of the `cp.async` copies that this unit has issued since the last group.
#[cube]
pub(crate) fn commit_copies() {
    gpu_asm!("cp.async.commit_group;", options(explicit_mem, reads_address_space shared, writes_address_space shared));
}

/// Waits until at most `pending` groups of this unit's copies are in flight.
#[cube]
pub(crate) fn wait_copies(#[comptime] pending: u32) {
    gpu_asm!("cp.async.wait_group {n};", n = const pending, options(explicit_mem, reads_address_space shared, writes_address_space shared));
}

/// True if `x` holds for any of the 32 lanes, all of which take part.
#[cube]
pub(crate) fn any_lane(x: bool) -> bool {
    let word = u32::cast_from(x);
    let out: u32;
    gpu_asm!(
        "{{ .reg .pred p, q; setp.ne.u32 p, {}, 0; vote.sync.any.pred q, p, -1; selp.u32 {}, 1, 0, q; }}",
        in(_) value::<u32>(word),
        out(_) out,
        options(nomem)
    );
    out != 0u32
}

/// True if `x` holds for any unit of the cube, all of which take part: a barrier.
#[cube]
pub(crate) fn any_unit(x: bool) -> bool {
    let word = u32::cast_from(x);
    let out: u32;
    gpu_asm!(
        "{{ .reg .pred p, q; setp.ne.u32 p, {}, 0; barrier.cta.red.or.pred q, 0, p; selp.u32 {}, 1, 0, q; }}",
        in(_) value::<u32>(word),
        out(_) out,
        options(nomem)
    );
    out != 0u32
}

/// The position of this unit in a cube whose rows are warps, read where it is called: for rarely run code, for which a
/// variable would take a register from everything before it.
#[cube]
pub(crate) fn unit_position() -> usize {
    let lane: u32;
    let warp: u32;
    gpu_asm!("mov.u32 {}, %%tid.x;", out(_) lane, options(nomem));
    gpu_asm!("mov.u32 {}, %%tid.y;", out(_) warp, options(nomem));
    (warp * 32 + lane) as usize
}

/// The address of the first of `elements` in shared memory, in bytes.
#[cube]
pub(crate) fn shared_address<T: CubePrimitive>(elements: &[T]) -> u32 {
    let address: u32;
    gpu_asm!(
        "{{ .reg .u64 t; cvta.to.shared.u64 t, {p}; cvt.u32.u64 {o}, t; }}",
        p = in(_) unsafe { elements.as_ptr_unchecked() },
        o = out(_) address,
        options(pure, nomem)
    );
    address
}

/// The two words at an address in shared memory, a multiple of 8. They are read at the position of the call.
#[cube]
pub(crate) fn read_pair(address: u32) -> Vector<u32, Const<2>> {
    let words: Vector<u32, Const<2>>;
    gpu_asm!(
        "ld.shared.v2.u32 {{%0, %1}}, [%2]; // {} {}",
        out(_) words,
        in(_) value::<u32>(address),
        options(explicit_mem, reads_address_space shared)
    );
    words
}

pub(crate) fn ptx_type(element: ElementType) -> &'static str {
    match element {
        ElementType::F16 => "f16",
        ElementType::Bf16 => "bf16",
        ElementType::F32 => panic!("tensor cores multiply 16-bit types"),
    }
}
