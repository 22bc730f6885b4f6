//! Vectorised loops: one copy per instruction set, chosen at run time, and the elementary functions that they use.

use pulp::{Arch, Simd, WithSimd};

/// Lanes the loops are written for: one AVX-512 register, two of AVX2, four of NEON.
pub(crate) const LANES: usize = 16;

/// A loop that is compiled once for each instruction set. Everything it calls must be inlined into it, otherwise that
/// part keeps the baseline's instructions.
pub(crate) trait Loop {
    type Output;

    /// The loop. `FUSED` is true if the instruction set has a fused multiply-add.
    fn run<const FUSED: bool>(self) -> Self::Output;
}

/// Runs `operation` with the widest instruction set of this machine.
pub(crate) fn run<L: Loop>(operation: L) -> L::Output {
    match Arch::new() {
        Arch::Scalar => operation.run::<false>(),
        arch => arch.dispatch(Fused(operation)),
    }
}

struct Fused<L>(L);

impl<L: Loop> WithSimd for Fused<L> {
    type Output = L::Output;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> L::Output {
        // WebAssembly's SIMD has no fused operation: `mul_add` would call a software one.
        if cfg!(target_family = "wasm") {
            self.0.run::<false>()
        } else {
            self.0.run::<true>()
        }
    }
}

/// `a * b + c`, rounded once if the instruction set can.
#[inline(always)]
pub(crate) fn mul_add<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// `e^x` within 2 ulp, without branches. Results below the smallest normal number are 0 (in a softmax they are lost
/// next to the greatest term, 1), those above `e^88.37` are infinite; NaN stays NaN.
#[inline(always)]
pub(crate) fn exp<const FUSED: bool>(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts; the product of the first with any exponent is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let shifted = mul_add::<FUSED>(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = mul_add::<FUSED>(-n, LN2_HIGH, x);
    let r = mul_add::<FUSED>(-n, LN2_LOW, r);
    // (e^r - 1 - r) / r^2 on |r| <= ln(2) / 2, interpolated at Chebyshev nodes: error below 1e-8.
    let mut p = 1.392_692_7e-3;
    p = mul_add::<FUSED>(p, r, 8.363_774e-3);
    p = mul_add::<FUSED>(p, r, 4.166_655e-2);
    p = mul_add::<FUSED>(p, r, 1.666_657_3e-1);
    p = mul_add::<FUSED>(p, r, 0.5);
    p = mul_add::<FUSED>(p, r * r, r) + 1.0;
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0f32.to_bits()));
    let y = p * power;
    let y = if x < -87.33 { 0.0 } else { y };
    if x > 88.37 { f32::INFINITY } else { y }
}

/// `tanh x` within 4 ulp, without branches; NaN stays NaN.
#[inline(always)]
pub(crate) fn tanh<const FUSED: bool>(x: f32) -> f32 {
    let a = x.abs();
    // Near 0 the quotient below cancels; (tanh(x) / x - 1) / x^2 in x^2 <= 0.4, error below 2e-8.
    let u = x * x;
    let mut p = -6.045_165e-3;
    p = mul_add::<FUSED>(p, u, 2.096_133e-2);
    p = mul_add::<FUSED>(p, u, -5.384_326_3e-2);
    p = mul_add::<FUSED>(p, u, 1.333_271_9e-1);
    p = mul_add::<FUSED>(p, u, -3.333_333e-1);
    let small = mul_add::<FUSED>(p * u, x, x);
    let large = (1.0 - 2.0 / (exp::<FUSED>(a + a) + 1.0)).copysign(x);
    if a < 0.625 { small } else { large }
}

/// `sigmoid(x)` and `softplus(x)` within a few ulp, without branches, for `x` of any size; NaN stays NaN.
#[inline(always)]
pub(crate) fn sigmoid_softplus<const FUSED: bool>(x: f32) -> (f32, f32) {
    let e = exp::<FUSED>(-x.abs());
    let sigmoid = if x < 0.0 { e } else { 1.0 } / (1.0 + e);
    // ln(1 + e) = 2 artanh(e / (2 + e)), whose series in s <= 1/3 ends with an error of 1e-8.
    let s = e / (2.0 + e);
    let u = s * s;
    let mut p = 1.0 / 13.0;
    p = mul_add::<FUSED>(p, u, 1.0 / 11.0);
    p = mul_add::<FUSED>(p, u, 1.0 / 9.0);
    p = mul_add::<FUSED>(p, u, 1.0 / 7.0);
    p = mul_add::<FUSED>(p, u, 1.0 / 5.0);
    p = mul_add::<FUSED>(p, u, 1.0 / 3.0);
    p = mul_add::<FUSED>(p, u, 1.0);
    let positive = if x > 0.0 { x } else { 0.0 };
    (sigmoid, mul_add::<FUSED>(2.0 * s, p, positive))
}

/// True if every element is a finite number.
pub(crate) fn is_finite(row: &[f32]) -> bool {
    // 0 times anything finite is 0, times anything else NaN; the sum vectorises, a search does not.
    let mut sums = [0.0f32; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *sum += x * 0.0;
        }
    }
    sums.iter().sum::<f32>() + rest.iter().map(|x| x * 0.0).sum::<f32>() == 0.0
}

/// `target += factor * source`, over the length of `target`.
#[inline]
pub(crate) fn add_scaled(target: &mut [f32], factor: f32, source: &[f32]) {
    for (target, source) in target.iter_mut().zip(source) {
        *target += factor * source;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Map<'a>(&'a mut [f32], bool);
    impl Loop for Map<'_> {
        type Output = ();
        #[inline(always)]
        fn run<const FUSED: bool>(self) {
            for x in self.0 {
                *x = if self.1 {
                    exp::<FUSED>(*x)
                } else {
                    tanh::<FUSED>(*x)
                };
            }
        }
    }

    fn both(x: &[f32], is_exp: bool) -> [Vec<f32>; 2] {
        let (mut fused, mut plain) = (x.to_vec(), x.to_vec());
        run(Map(&mut fused, is_exp));
        Map(&mut plain, is_exp).run::<false>();
        [fused, plain]
    }

    fn worst_ulp(x: &[f32], y: &[f32], exact: impl Fn(f64) -> f64) -> f64 {
        let ulp = |v: f64| 2f64.powi(v.abs().log2().floor() as i32 - 23);
        (x.iter().zip(y))
            .map(|(&x, &y)| (f64::from(y) - exact(x.into())).abs() / ulp(exact(x.into())))
            .fold(0.0, f64::max)
    }

    #[test]
    fn exp_is_within_two_ulp() {
        let x: Vec<f32> = (-873_200..883_600).map(|i| i as f32 * 1e-4).collect();
        for y in both(&x, true) {
            let worst = worst_ulp(&x, &y, f64::exp);
            assert!(worst < 2.0, "{worst} ulp");
        }
    }

    #[test]
    fn tanh_is_within_four_ulp() {
        let x: Vec<f32> = (-200_000..200_000)
            .filter(|&i| i != 0)
            .map(|i| i as f32 * 1e-4)
            .collect();
        for y in both(&x, false) {
            let worst = worst_ulp(&x, &y, f64::tanh);
            assert!(worst < 4.0, "{worst} ulp");
        }
    }

    struct Inclusion<'a>(&'a [f32], Vec<(f32, f32)>);
    impl Loop for Inclusion<'_> {
        type Output = Vec<(f32, f32)>;
        #[inline(always)]
        fn run<const FUSED: bool>(self) -> Self::Output {
            let mut all = self.1;
            all.extend(self.0.iter().map(|&x| sigmoid_softplus::<FUSED>(x)));
            all
        }
    }

    #[test]
    fn sigmoid_and_softplus_are_within_four_ulp_and_stable() {
        let x: Vec<f32> = (-870_000..2_000_000).map(|i| i as f32 * 1e-4).collect();
        let plain = Inclusion(&x, Vec::new()).run::<false>();
        for y in [run(Inclusion(&x, Vec::new())), plain] {
            let (sigmoid, softplus): (Vec<f32>, Vec<f32>) = y.into_iter().unzip();
            let worst = worst_ulp(&x, &sigmoid, |x| 1.0 / (1.0 + (-x).exp()));
            assert!(worst < 4.0, "sigmoid: {worst} ulp");
            let worst = worst_ulp(&x, &softplus, |x| x.max(0.0) + (-x.abs()).exp().ln_1p());
            assert!(worst < 4.0, "softplus: {worst} ulp");
        }
        let inf = f32::INFINITY;
        let far = run(Inclusion(&[-inf, -1e30, 1e30, inf], Vec::new()));
        assert_eq!(far, [(0.0, 0.0), (0.0, 0.0), (1.0, 1e30), (1.0, inf)]);
        let [(p, s)] = run(Inclusion(&[f32::NAN], Vec::new()))[..] else {
            panic!("one in, one out");
        };
        assert!(p.is_nan() && s.is_nan());
    }

    #[test]
    fn limits_and_nan() {
        let inf = f32::INFINITY;
        for y in both(&[-inf, -1e30, -104.0, 0.0, -0.0, 100.0, 1e30, inf], true) {
            assert_eq!(y, [0.0, 0.0, 0.0, 1.0, 1.0, inf, inf, inf]);
        }
        for y in both(&[-inf, -1e30, 0.0, 1e-30, 1e30, inf], false) {
            assert_eq!(y, [-1.0, -1.0, 0.0, 1e-30, 1.0, 1.0]);
        }
        for is_exp in [true, false] {
            for y in both(&[f32::NAN, -f32::NAN], is_exp) {
                assert!(y.iter().all(|y| y.is_nan()));
            }
        }
    }
}
