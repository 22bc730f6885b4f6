//! Plans, masks and biases.

use crate::args::{Outputs, Saved};
use crate::codegen::cases::{Case, HEADS, case, tensor};
use crate::codegen::cuda::Gpu;
use crate::host::engine::Engine;
use crate::pattern::mask::args::{MaskBits, MaskedGradients, MaskedInputs};
use crate::pattern::mask::plan::{plan, plan_ranges};
use crate::{AttentionOptions, ElementType, MaskedProblem, PlanGeometry, backward, forward};
use cubecl::client::Client;

/// Lengths of a problem.
const LEN: usize = 32 << 10;

pub(crate) fn all() -> Vec<Case> {
    use ElementType::{Bf16, F32};
    let mut cases = Vec::new();
    for (name, head_dim, element, mask, bias) in [
        ("masked-bf16-d128", 128, Bf16, Some(HEADS), Some(1)),
        ("masked-bf16-d64", 64, Bf16, Some(HEADS), Some(1)),
        ("masked-bf16-d128-no-bias", 128, Bf16, Some(HEADS), None),
        ("masked-bf16-d128-no-mask", 128, Bf16, None, Some(1)),
        (
            "masked-bf16-d128-heads",
            128,
            Bf16,
            Some(4 * HEADS),
            Some(1),
        ),
        ("masked-bf16-d128-pairs", 128, Bf16, Some(HEADS), Some(LEN)),
        ("masked-bf16-d128-pairs-no-mask", 128, Bf16, None, Some(LEN)),
        ("masked-bf16-d64-pairs", 64, Bf16, Some(HEADS), Some(LEN)),
        ("masked-f32-d128", 128, F32, Some(HEADS), Some(1)),
    ] {
        cases.push(case(name.into(), move |client| {
            let engines = [Engine::Portable, Engine::Wgmma];
            run(
                client,
                head_dim,
                element,
                mask,
                bias,
                false,
                AttentionOptions::new(),
                &engines,
            );
        }));
    }
    // The variants that pack masks of each shape and element size, and ranges instead of a mask.
    for (name, queries, len, size) in [
        ("plan-rows", LEN, LEN, 1),
        ("plan-rows-words", LEN, LEN, 4),
        ("plan-rows-odd", LEN - 1, LEN - 1, 1),
        ("plan-rows-odd-words", LEN - 1, LEN - 1, 4),
        ("plan-any", 1, LEN, 1),
    ] {
        cases.push(case(name.into(), move |client| {
            let (geometry, bits) = planned(client, queries, len);
            let mask = tensor(client, geometry.mask, size);
            plan(client, &geometry, mask, size, false, bits).expect("a valid plan");
        }));
    }
    cases.push(case("plan-ranges".into(), |client| {
        let (geometry, bits) = planned(client, LEN, LEN);
        let keys = || tensor(client, [1, 1, LEN, 1], 4);
        plan_ranges(client, &geometry, keys(), keys(), bits).expect("valid ranges");
    }));
    cases.extend(on_mma());
    for (name, mask, bias) in [
        ("masked-bf16-d128-dropout", Some(HEADS), Some(1)),
        ("masked-bf16-d128-pairs-dropout", Some(HEADS), Some(LEN)),
    ] {
        cases.push(case(name.into(), move |client| {
            let engines = [Engine::Portable, Engine::Wgmma];
            let options = AttentionOptions::new().with_dropout(super::dropout());
            run(client, 128, Bf16, mask, bias, false, options, &engines);
        }));
    }
    cases.push(case("masked-mma-d128-dropout".into(), |client| {
        let engines = [Engine::Mma];
        run(
            client,
            128,
            Bf16,
            Some(HEADS),
            Some(1),
            false,
            AttentionOptions::new().with_dropout(super::dropout()),
            &engines,
        );
    }));
    for (name, mask, bias) in [
        ("masked-bf16-d128-alibi", Some(HEADS), Some(1)),
        ("masked-bf16-d128-pairs-alibi", Some(HEADS), Some(LEN)),
    ] {
        cases.push(case(name.into(), move |client| {
            let options = AttentionOptions::new().with_alibi(super::slopes());
            let engines = [Engine::Portable, Engine::Mma, Engine::Wgmma];
            run(client, 128, Bf16, mask, bias, false, options, &engines);
        }));
    }
    cases.push(case("masked-bf16-d128-residual".into(), move |client| {
        let engines = [Engine::Portable, Engine::Mma, Engine::Wgmma];
        run(
            client,
            128,
            Bf16,
            Some(HEADS),
            Some(1),
            true,
            AttentionOptions::new(),
            &engines,
        );
    }));
    cases
}

/// Masks and biases without `wgmma`, on each kind of device with different limits.
fn on_mma() -> impl Iterator<Item = Case> {
    use ElementType::Bf16;
    [
        ("masked-mma-d128", 128, Some(HEADS), Some(1)),
        ("masked-mma-d64", 64, Some(HEADS), Some(1)),
        ("masked-mma-d256", 256, Some(HEADS), Some(1)),
        ("masked-mma-d128-no-bias", 128, Some(HEADS), None),
        ("masked-mma-d128-no-mask", 128, None, Some(1)),
        ("masked-mma-d128-heads", 128, Some(4 * HEADS), Some(1)),
        ("masked-mma-d128-pairs", 128, Some(HEADS), Some(LEN)),
    ]
    .map(|(name, head_dim, mask, bias)| Case {
        gpus: &Gpu::ALL,
        ..case(name.into(), move |client| {
            run(
                client,
                head_dim,
                Bf16,
                mask,
                bias,
                false,
                AttentionOptions::new(),
                &[Engine::Mma],
            );
        })
    })
    .into_iter()
}

/// A mask of `queries` rows, or of one for all, and room for its plan.
fn planned(client: &Client, queries: usize, len: usize) -> (PlanGeometry, MaskBits) {
    let geometry =
        PlanGeometry::new(&[1, 1, queries, len], [len; 2], true).expect("a valid geometry");
    let bits = MaskBits {
        bits: tensor(client, geometry.bits_shape(), 4),
        counts: tensor(client, geometry.counts_shape(), 4),
    };
    (geometry, bits)
}

fn run(
    client: &Client,
    head_dim: usize,
    element: ElementType,
    mask: Option<usize>,
    bias: Option<usize>,
    residual: bool,
    options: AttentionOptions,
    engines: &[Engine],
) {
    let (q, kv) = ([1, 4 * HEADS, LEN, head_dim], [1, HEADS, LEN, head_dim]);
    let mask_shape = mask.map(|heads| [1, heads, LEN, LEN]);
    let bias_shape = bias.map(|queries| [1, mask.unwrap_or(HEADS), queries, LEN]);
    let problem = MaskedProblem::new(
        &q,
        &kv,
        &kv,
        mask_shape.as_ref().map(<[usize; 4]>::as_slice),
        bias_shape.as_ref().map(<[usize; 4]>::as_slice),
        element,
        &options,
    )
    .expect("a valid problem");
    let rows = |shape| tensor(client, shape, element.size());
    let words = |shape| tensor(client, shape, 4);
    let bits = problem.plan.map(|geometry| {
        let bits = MaskBits {
            bits: tensor(client, geometry.bits_shape(), 4),
            counts: words(geometry.counts_shape()),
        };
        let mask = tensor(client, geometry.mask, 1);
        plan(client, &geometry, mask, 1, false, bits.clone()).expect("a valid plan");
        bits
    });
    let inputs = MaskedInputs {
        q: rows(q),
        k: rows(kv),
        v: rows(kv),
        plan: bits,
        bias: problem.bias.map(words),
    };
    let (out, lse) = (rows(q), tensor(client, problem.attention.lse_shape(), 4));
    let saved = Saved {
        out: out.clone(),
        residual: residual.then(|| out.clone()),
        lse: lse.clone(),
        lse_rest: Some(lse.clone()),
        grad_out: out,
        grad_lse: Some(lse),
    };
    let grads = MaskedGradients {
        q: rows(q),
        k: rows(kv),
        v: rows(kv),
        bias: problem.bias.map(words),
    };
    for &engine in engines {
        // Refused if the engine does not support the problem.
        let outputs = Outputs {
            out: saved.out.clone(),
            residual: saved.residual.clone(),
            lse: saved.lse.clone(),
            lse_rest: saved.residual.is_some().then(|| saved.lse.clone()),
        };
        let _ =
            forward::plan_on(engine, client, &problem, &inputs).and_then(|plan| plan.run(outputs));
        let _ = backward::plan_on(engine, client, &problem, &inputs, &saved)
            .and_then(|plan| plan.run(grads.clone()));
    }
}
