use super::*;
use half::bf16;
use pliron_llvm::llvm_sys::core::{LLVMContext, LLVMModule};
use pliron_llvm::llvm_sys::lljit::SimpleJIT;
use pliron_llvm::llvm_sys::target::initialize_native;
use std::ptr::NonNull;

/// The result is the low half of the register that holds an f32 or f64 result.
type Round<T> = extern "C" fn(T) -> f32;

/// Every upper half of an f32 with lower halves about the middle between two numbers, and some other values.
fn floats() -> impl Iterator<Item = f32> {
    let lower = [0, 1, 0x1234, 0x7fff, 0x8000, 0x8001, 0xffff];
    (0..=u32::from(u16::MAX))
        .flat_map(move |upper| lower.map(|lower| f32::from_bits(upper << 16 | lower)))
}

/// The nearest bf16, of two the even one; infinity is 2¹²⁸. (`bf16::from_f64` looks only at the upper half of an f64.)
fn nearest(x: f64) -> bf16 {
    let magnitude = (x.abs() as f32).to_bits() >> 16;
    let value = |bits: u16| match bits {
        0x7f80 => 2f64.powi(128),
        _ => f64::from(bf16::from_bits(bits)),
    };
    let candidates = magnitude.saturating_sub(1)..=(magnitude + 1).min(0x7f80);
    let nearest = candidates.map(|bits| bits as u16).min_by(|&a, &b| {
        let distance = |bits| (value(bits) - x.abs()).abs();
        distance(a)
            .total_cmp(&distance(b))
            .then((a % 2).cmp(&(b % 2)))
    });
    let sign = if x.is_sign_negative() { 0x8000 } else { 0 };
    bf16::from_bits(nearest.expect("two or three candidates") | sign)
}

fn assert_rounded(register: f32, x: f64) {
    let rounded = bf16::from_bits(register.to_bits() as u16);
    if x.is_nan() {
        assert!(rounded.is_nan(), "{x:?}: {rounded:?}");
        assert_eq!(rounded.is_sign_negative(), x.is_sign_negative());
    } else if x.is_infinite() {
        assert_eq!(rounded.to_f64(), x);
    } else {
        assert_eq!(rounded.to_bits(), nearest(x).to_bits(), "{x:e}: {rounded}");
    }
}

#[test]
fn the_process_exports_a_conversion_from_f32_to_bf16() {
    let function = exported(ROUND_F32).expect("exported when the program starts");
    // SAFETY: the name denotes this function, with this calling convention.
    let round = unsafe { std::mem::transmute::<NonNull<c_void>, Round<f32>>(function) };
    for x in floats() {
        assert_rounded(round(x), x.into());
    }
}

#[test]
fn the_process_exports_a_conversion_from_f64_that_rounds_once() {
    let function = exported(ROUND_F64).expect("exported when the program starts");
    // SAFETY: the name denotes this function, with this calling convention.
    let round = unsafe { std::mem::transmute::<NonNull<c_void>, Round<f64>>(function) };
    for x in floats() {
        let bits = f64::from(x).to_bits();
        // Neighbours of an f32 in the middle of two numbers round to different ones, though all three are the same f32.
        for bits in [bits.saturating_sub(1), bits, bits.saturating_add(1)] {
            let x = f64::from_bits(bits);
            assert_rounded(round(x), x);
        }
    }
}

/// Does on any CPU what CubeCL's CPU runtime does on a CPU without AVX512-BF16: the attributes of the function come
/// before the features of the host.
#[test]
fn code_for_a_cpu_without_bf16_instructions_finds_the_conversion() {
    let ir = r#"
        define i16 @round_f32(float %x) #0 {
            %y = fptrunc float %x to bfloat
            %bits = bitcast bfloat %y to i16
            ret i16 %bits
        }
        define i16 @round_f64(double %x) #0 {
            %y = fptrunc double %x to bfloat
            %bits = bitcast bfloat %y to i16
            ret i16 %bits
        }
        attributes #0 = { "target-cpu"="x86-64-v3" "target-features"="-avx512bf16,-avxneconvert" }"#;
    initialize_native().expect("this is the native target");
    let context = LLVMContext::default();
    let module = LLVMModule::from_ir_in_str(&context, ir, None).expect("good code");
    let jit = SimpleJIT::new(context, module).expect("a compiler");
    // SAFETY: the code above says so.
    let f32_to_bf16 = unsafe { jit.lookup_symbol::<extern "C" fn(f32) -> u16>("round_f32") };
    let f32_to_bf16 = f32_to_bf16.expect("every function it calls is found");
    // SAFETY: the code above says so.
    let f64_to_bf16 = unsafe { jit.lookup_symbol::<extern "C" fn(f64) -> u16>("round_f64") };
    let f64_to_bf16 = f64_to_bf16.expect("every function it calls is found");
    for x in [0.0, -1.0, 0.1, 1e-40, 3.4e38, f32::INFINITY] {
        assert_eq!(f32_to_bf16(x), bf16::from_f32(x).to_bits(), "{x}");
        assert_eq!(f64_to_bf16(x.into()), bf16::from_f32(x).to_bits(), "{x}");
    }
}
